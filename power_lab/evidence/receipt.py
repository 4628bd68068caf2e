"""Receipts: what a run claims, bound by digests, without the prompt in it.

A receipt has two parts. The *claim* holds what anyone can reproduce on a machine with the same arithmetic digest: model file,
settings, sampling with the seed, digests of prompt and output, finish. Two identical runs have equal claims. *Observed* holds
what belongs to one execution: times, cache hits, acceptance, a digest of the trace.

Each section has a digest of its own, so a change is named. The digests show that nothing was changed by accident or in one place; they
are not signatures: who rewrites all of them makes another consistent receipt. The proof is to run the claim again. A prompt digest hides a
prompt only as far as the prompt cannot be guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from pathlib import PurePath
from typing import Any

import msgspec

from power_lab.engine.trace import DraftFacts, RunRecord
from power_lab.errors import EvidenceError
from power_lab.evidence.canonical import canonical, digest, parse, token_digest
from power_lab.evidence.page import MIME, receipt_html

SCHEMA = "power-lab.receipt/1"
LARGEST = 1 << 20  # bytes; a receipt has about 3000

_SECTIONS: dict[str, dict[str, type]] = {
    "claim.engine": {
        "config": dict,
        "device": str,
        "digest": str,
        "draft": dict,
        "mode": str,
        "revision": str,
        "threads": int,
        "versions": dict,
    },
    "claim.model": {
        "architecture": str,
        "file": str,
        "license": str,
        "name": str,
        "parameters": int,
        "quantisation": dict,
        "sha256": str,
    },
    "claim.output": {"finish": str, "sha256": str, "tokens": int},
    "claim.prompt": {"sha256": str, "tokens": int},
    "claim.sampling": {},  # the engine's parameters as they are; new ones need no new schema
    "observed": {
        "accepted": int,
        "cached": int,
        "decode_s": float,
        "drafted": int,
        "preemptions": int,
        "prefill_s": float,
        "queue_s": float,
        "rounds": int,
        "steps": int,
        "trace_sha256": str,
    },
}
_LATER = ("draft",)  # fields that receipts made before they existed do not have
_HEX = re.compile(r"[0-9a-f]{64}")


class Receipt:
    """A receipt, always in a verified state. Make one with `of` (from a run) or `verify` (from text).

    Attributes:
        data: the receipt as plain values: `schema`, `claim`, `observed`, `digests`.
    """

    __slots__ = ("__dict__", "data")

    def __init__(self, data: dict[str, Any]) -> None:
        _check(data)
        self.data = data

    @classmethod
    def of(cls, record: RunRecord) -> Receipt:
        """The receipt of a finished run. Raises EvidenceError if the record holds a value that has no exact JSON form."""
        facts = record.engine
        body: dict[str, Any] = {
            "claim.engine": {
                # Model and drafter are bound by their digests; where a user keeps the files is private and no part of the claim.
                "config": {key: value for key, value in facts.config.items() if key not in ("model", "draft")},
                "device": facts.device,
                "digest": facts.digest,
                "draft": _draft(facts.draft),
                "mode": facts.mode,
                "revision": facts.revision,
                "threads": facts.threads,
                "versions": dict(facts.versions),
            },
            "claim.model": {
                "architecture": facts.architecture,
                "file": PurePath(facts.file).name,
                "license": facts.license,
                "name": PurePath(facts.model).name,
                "parameters": facts.parameters,
                "quantisation": dict(facts.quantisation),
                "sha256": facts.sha256,
            },
            "claim.output": {
                "finish": str(record.finish),
                "sha256": token_digest("output/1", record.tokens),
                "tokens": len(record.tokens),
            },
            "claim.prompt": {
                "sha256": token_digest("prompt/1", record.prompt_tokens),
                "tokens": len(record.prompt_tokens),
            },
            "claim.sampling": {key: _plain(value) for key, value in record.params.items()},
            "observed": {
                "accepted": sum(entry.accepted for entry in record.rounds),
                "cached": record.cached,
                "decode_s": record.decode_s,
                "drafted": sum(len(entry.drafted) for entry in record.rounds),
                "preemptions": record.preemptions,
                "prefill_s": record.prefill_s,
                "queue_s": record.queue_s,
                "rounds": len(record.rounds),
                "steps": len(record.steps),
                "trace_sha256": trace_digest(record),
            },
        }
        # A seed may need 63 bits and JSON numbers carry 53.
        if isinstance(body["claim.sampling"].get("seed"), int):
            body["claim.sampling"]["seed"] = str(body["claim.sampling"]["seed"])
        claim = {name.removeprefix("claim."): section for name, section in body.items() if name != "observed"}
        digests = {name: _section_digest(name, section) for name, section in body.items()}
        digests["claim"] = _section_digest("claim", claim)
        return cls({"schema": SCHEMA, "claim": claim, "observed": body["observed"], "digests": digests})

    @classmethod
    def verify(cls, text: str | bytes) -> Receipt:
        """Read a receipt in canonical form. Raises EvidenceError naming the section or field that was changed."""
        raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        if len(raw) > LARGEST:
            raise EvidenceError("json", f"{len(raw)} bytes; a receipt has at most {LARGEST}")
        receipt = cls(parse(raw))
        if receipt.json.encode() != raw:
            raise EvidenceError("json", "the values are intact but the text is not in canonical form (RFC 8785)")
        return receipt

    @cached_property
    def json(self) -> str:
        """The receipt as canonical JSON (RFC 8785)."""
        return canonical(self.data, "receipt").decode()

    @property
    def sha256(self) -> str:
        """SHA-256 over the bytes of `json`: the identity of this receipt."""
        return sha256(self.json.encode()).hexdigest()

    @property
    def claim(self) -> dict[str, Any]:
        """Everything that another run must reproduce."""
        return self.data["claim"]

    @property
    def observed(self) -> dict[str, Any]:
        """What belongs to this one execution: times in seconds, counts, trace digest."""
        return self.data["observed"]

    @property
    def claim_sha256(self) -> str:
        """Digest of the claim; equal for two identical runs."""
        return self.data["digests"]["claim"]

    @property
    def output_sha256(self) -> str:
        """Digest of the output tokens; equal whether or not speculation, caching or batching was in play."""
        return self.claim["output"]["sha256"]

    def check_tokens(self, prompt: Iterable[int] | None = None, output: Iterable[int] | None = None) -> None:
        """Compare token ids with the claim. Raises EvidenceError naming `claim.prompt` or `claim.output`."""
        for part, tokens in (("prompt", prompt), ("output", output)):
            if tokens is None:
                continue
            ids = tuple(tokens)
            if len(ids) != self.claim[part]["tokens"] or token_digest(f"{part}/1", ids) != self.claim[part]["sha256"]:
                raise EvidenceError(f"claim.{part}", f"these {len(ids)} tokens are not the ones that the receipt binds")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Receipt) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        claim = self.claim
        return (
            f"Receipt({claim['model']['name']}, {claim['engine']['mode']}, {claim['output']['tokens']} tokens, "
            f"claim {self.claim_sha256[:12]}, sha256 {self.sha256[:12]})"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self), "text/html": receipt_html(self), MIME: self.data}


def trace_digest(record: RunRecord) -> str:
    """Domain-tagged SHA-256 over the MessagePack form of rounds and steps, timings with all their bits."""
    return digest("trace/1", msgspec.msgpack.encode((record.rounds, record.steps)))


def _draft(facts: DraftFacts) -> dict[str, str]:
    """What the engine could draft with; empty where that is nothing but the tokens."""
    return {"kind": facts.kind, "name": PurePath(facts.name).name, "sha256": facts.sha256} if facts.kind else {}


def _section_digest(name: str, section: Any) -> str:
    return digest(f"receipt/1/{name}", canonical(section, name))


def _check(data: Any) -> None:
    """Shape first, so that a missing or foreign field is named exactly; then the digests."""
    _keys("receipt", data, {"schema": str, "claim": dict, "observed": dict, "digests": dict})
    if data["schema"] != SCHEMA:
        raise EvidenceError(
            "schema", f"{data['schema']!r} is not {SCHEMA!r}", "Verify it with the version that made it."
        )
    _keys("claim", data["claim"], {name.removeprefix("claim."): dict for name in _SECTIONS if name != "observed"})
    sections = {
        name: data["observed"] if name == "observed" else data["claim"][name.removeprefix("claim.")]
        for name in _SECTIONS
    }
    _keys("digests", data["digests"], dict.fromkeys([*_SECTIONS, "claim"], str))
    for name, section in sections.items():
        if _SECTIONS[name]:
            _keys(name, section, _SECTIONS[name])
        if _section_digest(name, section) != data["digests"][name]:
            raise EvidenceError(
                name, "its contents do not fit its digest", "The receipt was changed after it was made."
            )
    if _section_digest("claim", data["claim"]) != data["digests"]["claim"]:
        raise EvidenceError("digests.claim", "does not fit the claim", "The receipt was changed after it was made.")


def _keys(name: str, value: Any, known: dict[str, type]) -> None:
    if not isinstance(value, dict):
        raise EvidenceError(name, "is not an object")
    for key in value:
        if key not in known:
            raise EvidenceError(f"{name}.{key}", "unknown field")
    for key, kind in known.items():
        if key in _LATER and key not in value:
            continue
        if key not in value:
            raise EvidenceError(f"{name}.{key}", "missing")
        # Canonical JSON writes 2.0 as 2, so a number of seconds may come back as an integer.
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(value[key], kinds) or (isinstance(value[key], bool) and kind is not bool):
            raise EvidenceError(f"{name}.{key}", f"is not of type {kind.__name__}")
        if kind is int and value[key] < 0:
            raise EvidenceError(f"{name}.{key}", f"{value[key]} is negative")
        if key.endswith("sha256") and not (_HEX.fullmatch(value[key]) or (name == "claim.model" and not value[key])):
            raise EvidenceError(f"{name}.{key}", "is not a SHA-256 in hex")


def _plain(value: Any) -> Any:
    """Sampling parameters as JSON values; the keys of a logit bias are token ids."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
