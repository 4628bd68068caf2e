"""From a configuration to a runnable model: files, tokenizer, operation table, weights, memory."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from power_lab.engine.compilers import Asked, Compilers
from power_lab.engine.config import CPU_KV_TOKENS, EngineConfig, Paths, names_model, usable_cores
from power_lab.engine.device import choose
from power_lab.engine.hostprofile import HostProfile
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.describe import Described, describe
from power_lab.engine.models.probed import probed_shapes
from power_lab.engine.models.spec import ModelSpec, ModelWeights
from power_lab.engine.revision import code_digest, versions
from power_lab.engine.speculation.drafters.binding import check_reach, check_vocabulary
from power_lab.engine.speculation.drafters.neural import Trained, native
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Target
from power_lab.engine.speculation.drafters.neural.choice import NATIVE, artifact_of, native_of
from power_lab.engine.speculation.drafters.neural.kinds import bind as bind_drafter
from power_lab.engine.speculation.drafters.neural.ranking import said_of
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.trace import DraftFacts, EngineFacts
from power_lab.engine.weights.checkpoint import Checkpoint, open_checkpoint
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.errors import ConfigError
from power_lab.kernels.ops import BLOCK, Ops
from power_lab.kernels.probe import Shapes, probe
from power_lab.kernels.quants import QuantType
from power_lab.kernels.table import select
from power_lab.models import ModelEntry, Report, ensure
from power_lab.models.fit import machine_memory


@dataclass(frozen=True, slots=True, eq=False)
class LoadedDraft:
    """A draft model that fits its target.

    Attributes:
        model: the decoder, on the target's operation table; name, sha256: of its file; weights: bytes of its tensors.
    """

    model: Decoder
    name: str
    sha256: str
    weights: int


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A model ready to run.

    Attributes:
        model: the decoder on its device; tokenizer: its text side; facts: what receipts say; context: longest request in tokens.
        reasons: setting -> why it has the value it has; "rope" and "parts", where there was a choice, as "value: why".
        turn: held during a step: the operation table serves one at a time, also where several engines share the model.
        draft: the draft model, trained: the trained drafter, if one is configured.
        native: whether the model has layers for multi-token prediction of its own that can draft, be they loaded or not.
    """

    model: Decoder
    tokenizer: Tokenizer
    facts: EngineFacts
    context: int
    reasons: dict[str, str]
    turn: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    draft: LoadedDraft | None = None
    trained: Trained | None = None
    native: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """What rides along in a model's passes.

    Attributes:
        file: of a trained drafter, if it is one; native: whether it is the layers for multi-token prediction that the model has itself.
        why: this one, or none.
    """

    file: Path | None = None
    native: bool = False
    why: str = ""

    @classmethod
    def of(cls, config: EngineConfig, entry: ModelEntry, described: Described) -> Beside:
        """By the setting `draft`. Raises ConfigError for that key where it names what the model does not have."""
        if names_model(config.draft):
            return cls(why="a draft model says all of its tokens").limited(config)
        own = described.nextn is not None
        file, why = artifact_of(config.draft, entry.name, entry.sha256, own)
        return cls(file, own and native_of(config.draft, entry.sha256), why).limited(config)

    def limited(self, config: EngineConfig) -> Self:
        """Itself. Raises ConfigError for what limits a drafter's tokens where nothing is there that it could limit."""
        key = "draft_vocabulary" if config.draft_vocabulary else "draft_ranking" if config.draft_ranking else ""
        if key and self.file is None and not self.native:
            raise ConfigError(key, f"no trained drafter is loaded: {self.why}", "Leave it out, or load one.")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where model and draft model are loaded to."""

    config: EngineConfig
    paths: Paths
    progress: Report
    ops: Ops
    device: str
    threads: int


def load(config: EngineConfig, paths: Paths, progress: Report) -> Loaded:
    """Load the configured model.

    Raises ConfigError, ModelFileError, TokenizerError or DownloadError (the model is not on this machine); nothing stays half-loaded.
    """
    threads = config.threads or usable_cores()
    device, why_device = choose(config)
    kv_tokens = config.kv_tokens or (0 if device == "cuda" else CPU_KV_TOKENS)
    priority = HostProfile.of(config.host_profile).stream_priority
    ops = _operations(device, config.mode, threads, paths, progress, priority)
    to = _Place(config, paths, progress, ops, device, threads)
    entry = ensure(config.model, paths, progress)
    progress("model file", 0, 1)
    with open_checkpoint(entry.path) as checkpoint:
        tokenizer = _tokenizer(checkpoint)
        described = describe(checkpoint, tokenizer.vocab_size)
        spec = described.spec
        license = entry.license or checkpoint.license
        context, why = _context(config.context, kv_tokens, spec)
        if device == "cpu":  # a GPU's pool is planned once the weights are there
            _check_pool(kv_tokens, spec.kv_bytes_per_token)
        progress("model file", 1, 1)
        beside = Beside.of(config, entry, described)
        weights, fault = _weights(to, checkpoint, described, entry, context, beside)
        trained, why_draft = _trained(to, beside, described, weights, entry, context)
    if config.mode == "exact":
        _prove(to, probed_shapes(spec, weights))
        if trained is not None:
            _prove(to, trained.shapes)
    draft = _draft(to, tokenizer, spec, context) if names_model(config.draft) else None
    if draft is not None:
        why_draft = f"{draft.name} ({draft.sha256[:8]}) has the target's vocabulary"
    facts = EngineFacts(
        model=entry.name,
        file=entry.path.name,
        sha256=entry.sha256,
        license=license,
        architecture=spec.architecture,
        parameters=weights.parameters,
        context=context,
        vocab=spec.vocab,
        quantisation=weights.bytes_by_type,
        config=config.told(),
        mode=config.mode,
        device=device,
        threads=threads,
        digest=ops.digest(),
        revision=code_digest(),
        versions=versions(),
        draft=_draft_facts(draft, trained),
    )
    reasons = {
        "device": why_device,
        "threads": f"{threads} of {os.cpu_count()} cores"
        + ("" if config.threads else " (all that this process may use)"),
        "context": why,
        **_rope_reason(spec, context),
        **({"parts": f"text: {', '.join(described.left_out)} left out"} if described.left_out else {}),
        "kernels": "; ".join((*ops.reasons(), *([fault] if fault else []))),
        "draft": why_draft,
    }
    model = Decoder(spec, weights, ops, context)
    has = described.nextn is not None and not described.nextn.fault and (trained is not None or not beside.native)
    return Loaded(model, tokenizer, facts, context, reasons, draft=draft, trained=trained, native=has)


def _trained(
    to: _Place, beside: Beside, described: Described, weights: ModelWeights, entry: ModelEntry, context: int
) -> tuple[Trained | None, str]:
    """The drafter that rides along, if one is configured, and why this one or none.

    Raises ConfigError for key `draft` where it is not sound or was trained for another model.
    """
    if beside.file is None and not beside.native:
        return None, beside.why
    to.progress("drafter file", 0, 1)
    target = Target(
        described.spec, weights, to.ops, described.source, entry.sha256, *said_of(to.config, described.spec.vocab)
    )
    if beside.file is None:
        assert described.nextn is not None
        trained, why = native.bind(described.nextn, target, context)
        if trained is None and to.config.draft == NATIVE:
            raise ConfigError("draft", why, 'Use draft="" for none, or the path of a drafter (.safetensors).')
    else:
        with Artifact.open(beside.file) as artifact:
            trained, why = bind_drafter(artifact, target, context), beside.why
    to.progress("drafter file", 1, 1)
    if trained is None:
        return None, replace(beside, native=False, why=why).limited(to.config).why
    return trained, f"{trained.name} ({trained.sha256[:8]}) {why}; it serves {', '.join(trained.serves)}"


def _draft(to: _Place, target: Tokenizer, target_spec: ModelSpec, context: int) -> LoadedDraft:
    """Load the draft model beside its target. Raises as `load` does, ConfigError for key `draft` where the two do not fit.

    Its rows are proved to be independent, too: not for the tokens' sake, but so that what it drafts can be replayed.
    """
    entry = _named_by("draft", to.config.draft, to)
    to.progress("draft model file", 0, 1)
    with open_checkpoint(entry.path) as checkpoint:
        tokenizer = _tokenizer(checkpoint)
        check_vocabulary(tokenizer, target)
        described = describe(checkpoint, tokenizer.vocab_size)
        spec = described.spec
        check_reach(entry.name, spec.vocab, spec.context, target_spec.vocab, context)
        if to.device == "cpu":
            both = target_spec.kv_bytes_per_token + spec.kv_bytes_per_token
            _check_pool(to.config.kv_tokens or CPU_KV_TOKENS, both)
        to.progress("draft model file", 1, 1)
        weights, _ = _weights(to, checkpoint, described, entry, context)
    if to.config.mode == "exact":
        _prove(to, probed_shapes(spec, weights))
    nbytes = sum(weights.bytes_by_type.values())
    return LoadedDraft(Decoder(spec, weights, to.ops, context), entry.name, entry.sha256, nbytes)


def _draft_facts(draft: LoadedDraft | None, trained: Trained | None) -> DraftFacts:
    if draft is not None:
        return DraftFacts(kind="model", name=draft.name, sha256=draft.sha256)
    return DraftFacts() if trained is None else DraftFacts(kind=trained.kind, name=trained.name, sha256=trained.sha256)


def _named_by(key: str, model: str, to: _Place) -> ModelEntry:
    """The model that a setting names. Raises what `ensure` raises, ConfigError naming that setting."""
    try:
        return ensure(model, to.paths, to.progress)
    except ConfigError as error:
        if error.key != "model":
            raise
        raise ConfigError(key, error.message.removeprefix("model: "), error.remedy) from None


def _weights(
    to: _Place,
    checkpoint: Checkpoint,
    described: Described,
    entry: ModelEntry,
    context: int,
    beside: Beside = Beside(),
) -> tuple[ModelWeights, str]:
    """A model's weights on the device, and why its kernels were not compiled beforehand although they should have been, or nothing.

    beside: the drafter that rides along, whose kernels are compiled with them.
    """
    types = [QuantType[name] for name in checkpoint.bytes_by_type() if name in QuantType.__members__]
    to.ops.prepare(types, lambda done, total, name: to.progress(f"kernels: {name}", done, total))
    with _compilers(entry, to.config, context, described.spec.vocab, to.ops, beside) as compilers:
        weights = bind(described.spec, described.source, to.ops)
        to.ops.wait()
        return weights, compilers.wait(to.progress)


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    metadata = checkpoint.metadata
    return (
        Tokenizer.from_folder(checkpoint.path)
        if isinstance(metadata, JsonConfig)
        else Tokenizer.from_gguf(metadata.metadata)
    )


def _operations(device: str, mode: str, threads: int, paths: Paths, progress: Report, priority: int = 0) -> Ops:
    """An operation table, compiled."""
    ops = select(device, mode, threads, paths.kernels, priority)
    ops.warm_up(lambda done, total, name: progress(f"kernels: {name}", done, total))
    return ops


def _compilers(
    entry: ModelEntry, config: EngineConfig, context: int, vocab: int, ops: Ops, beside: Beside
) -> Compilers:
    """Of the kernels that would be compiled one by one at their first launches."""
    if not ops.compiles_for:
        return Compilers()
    file = beside.file
    drafter = (file, file.stat().st_size, file.stat().st_mtime_ns) if file and file.is_file() else ()
    asked = Asked(
        model=str(entry.path),
        drafter=str(file) if drafter else "",
        native=beside.native,
        digest=f"{ops.digest()} {entry.sha256} {entry.path} {drafter} {beside.native}",
        config=config,
        context=min(context, config.context or context),
        vocab=vocab,
        capability=ops.compiles_for,
    )
    return Compilers.of(asked)


def _prove(to: _Place, shapes: Shapes) -> None:
    """The load-time probe of DESIGN section 1: raises ExactnessError unless rows are independent on these shapes, a model's own or its
    drafter's: what that drafts must not depend on who else is drafted for, or recorded rounds could not be replayed.

    A pass is remembered per arithmetic digest and set of shapes. A table keeps the weights that it has seen, so the probe, whose
    own are as large as the model's largest, runs on one that is dropped afterwards.
    """
    gates = None if shapes.gates is None else sorted(shapes.gates)
    parts = (
        to.ops.digest(),
        sorted(shapes.linears),
        sorted(shapes.attentions),
        sorted(shapes.activations),
        gates,
        shapes.operand,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    proved = to.paths.kernels / "proved" / key
    if proved.exists():
        return
    to.progress("exactness probe", 0, 1)
    table = _operations(to.device, "exact", to.threads, to.paths, lambda *_: None)
    try:
        probe(table, shapes)
    finally:
        table.close()
    to.progress("exactness probe", 1, 1)
    with suppress(OSError):  # an unwritable cache costs the probe each time
        proved.parent.mkdir(parents=True, exist_ok=True)
        proved.touch()


def _rope_reason(spec: ModelSpec, context: int) -> dict[str, str]:
    """Which of two rotary tables runs, where a model has two."""
    for rope in (layer.attention.rope for layer in spec.layers):
        if rope is not None and rope.extended is not None:
            which, relation = ("long", "exceeds") if rope.within(context) is rope.extended else ("short", "is within")
            return {"rope": f"{which} factors: the context of {context} {relation} {rope.original}"}
    return {}


def _check_pool(kv_tokens: int, token: int) -> None:
    """Raises ConfigError for a KV pool, of `token` bytes each, that this machine could never fill; one page is always there besides."""
    memory = machine_memory()
    if (kv_tokens + BLOCK) * token > memory:
        raise ConfigError(
            "kv_tokens",
            f"a KV pool of {kv_tokens:,} tokens needs {kv_tokens * token / 2**30:,.1f} GiB,"
            f" but this machine has {memory / 2**30:,.1f} GiB",
            f"Use at most {memory // token // 2 // BLOCK * BLOCK}, half of it, or less.",
        )


def _context(wanted: int, kv_tokens: int, spec: ModelSpec) -> tuple[int, str]:
    """Longest request, and why; `kv_tokens` is 0 where the pool is not planned yet."""
    if wanted > spec.context:
        raise ConfigError(
            "context", f"{wanted} exceeds the model's {spec.context} positions", f"Use at most {spec.context}."
        )
    asked = wanted or spec.context
    if asked <= kv_tokens or not kv_tokens:
        return asked, "as asked" if wanted else "the model's own limit"
    if wanted:
        raise ConfigError(
            "context",
            f"{asked} tokens do not fit the KV pool of {kv_tokens}",
            f"Raise kv_tokens to {-(-asked // 64) * 64}.",
        )
    return kv_tokens, f"the KV pool (kv_tokens); the model itself reaches {spec.context}"
