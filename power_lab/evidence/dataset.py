"""The trace of a run as an xarray.Dataset: named dimensions, units, a schema version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.engine.speculation.metrics import Metrics
from power_lab.engine.trace import Round, RunRecord
from power_lab.errors import EvidenceError

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.trace/1"
KINDS = ("accepted", "correction", "bonus", "plain")

_Columns = dict[str, tuple[str, str, Callable[[Any], Any]]]  # name -> unit, title, value of one entry

_ROUND_COUNTS: _Columns = {
    "round_step": ("1", "engine step that ran the round", lambda entry: entry.step),
    "start": ("1", "absolute position of the first emitted token", lambda entry: entry.start),
    "drafted": ("token", "draft tokens verified", lambda entry: len(entry.drafted)),
    "accepted": ("token", "draft tokens that matched", lambda entry: entry.accepted),
    "emitted": ("token", "tokens emitted", lambda entry: len(entry.emitted)),
    "rows": ("row", "rows of all requests in the step", lambda entry: entry.rows),
    "requests": ("request", "requests that shared the step", lambda entry: entry.requests),
    "allowed": (
        "token",
        "most drafts that the controller allowed, -1 where it was not asked",
        lambda entry: entry.width,
    ),
    "reachable": (
        "token",
        "emitted tokens in the drafter's part of the vocabulary, -1 where it has all of it or was not asked",
        lambda entry: entry.reachable,
    ),
    "resumed": (
        "1",
        "whether the drafts were made on the device, as a part of the step",
        lambda entry: int(entry.resumed),
    ),
    "light": ("1", "whether no network took part in that", lambda entry: int(entry.light)),
    "replays": ("1", "passes run again after refused drafts", lambda entry: entry.replays),
}
_ROUND_TIMES: _Columns = {
    "draft_s": ("s", "time spent proposing", lambda entry: entry.draft_s),
    "forward_s": ("s", "time spent in the model", lambda entry: entry.forward_s),
    "sample_s": ("s", "time spent sampling", lambda entry: entry.sample_s),
    "commit_s": ("s", "time spent committing", lambda entry: entry.commit_s),
    "replay_s": ("s", "time spent running passes again", lambda entry: entry.replay_s),
    "at_s": ("s", "end of the round since submission", lambda entry: entry.at),
}
_STEP_COUNTS: _Columns = {
    "prefill_rows": ("row", "prompt rows of all requests", lambda entry: entry.prefill_rows),
    "decode_rows": ("row", "decode rows of all requests", lambda entry: entry.decode_rows),
    "verify_rows": ("row", "draft rows of all requests", lambda entry: entry.verify_rows),
    "own_rows": ("row", "rows of this request", lambda entry: entry.own_rows),
    "running": ("request", "requests running after planning", lambda entry: entry.running),
    "waiting": ("request", "requests waiting after planning", lambda entry: entry.waiting),
    "preempted": ("request", "requests preempted by the plan", lambda entry: entry.preempted),
    "free_blocks": ("block", "free blocks after planning", lambda entry: entry.free_blocks),
    "cached_blocks": ("block", "cached blocks after planning", lambda entry: entry.cached_blocks),
    "used_blocks": ("block", "used blocks after planning", lambda entry: entry.used_blocks),
}
_STEP_TIMES: _Columns = {
    "wall_s": ("s", "duration of the step", lambda entry: entry.wall_s),
    "step_at_s": ("s", "end of the step since submission", lambda entry: entry.at),
}


def kinds_of(entry: Round) -> tuple[str, ...]:
    """What each emitted token of a round is: `accepted`, then one `correction` or `bonus`; `plain` where nothing was drafted."""
    if not entry.drafted:
        return ("plain",) * len(entry.emitted)
    last = "correction" if entry.accepted < len(entry.drafted) else "bonus"
    return tuple("accepted" if index < entry.accepted else last for index in range(len(entry.emitted)))


def check(record: RunRecord) -> None:
    """Raise EvidenceError, naming the field, unless rounds, tokens and pieces of a record fit each other."""
    position = len(record.prompt_tokens)
    emitted: list[int] = []
    for index, entry in enumerate(record.rounds):
        name = f"rounds[{index}]"
        if entry.start != position:
            raise EvidenceError(f"{name}.start", f"{entry.start}, but the round before ended at {position}")
        if not 0 <= entry.accepted <= len(entry.drafted):
            raise EvidenceError(f"{name}.accepted", f"{entry.accepted} of {len(entry.drafted)} drafted")
        if entry.drafted and len(entry.emitted) > entry.accepted + 1:
            raise EvidenceError(
                f"{name}.emitted", f"{len(entry.emitted)} tokens after {entry.accepted} accepted drafts"
            )
        if entry.logprobs and len(entry.logprobs) != len(entry.emitted):
            raise EvidenceError(f"{name}.logprobs", f"{len(entry.logprobs)} for {len(entry.emitted)} tokens")
        position += len(entry.emitted)
        emitted.extend(entry.emitted)
    if tuple(emitted) != record.tokens:
        raise EvidenceError(
            "tokens", f"{len(record.tokens)} tokens, but the rounds emitted {len(emitted)} that are not the same"
        )
    if len(record.pieces) != len(record.tokens):
        raise EvidenceError("pieces", f"{len(record.pieces)} for {len(record.tokens)} tokens")


def trace_dataset(record: RunRecord) -> xarray.Dataset:
    """The trace of a run. Raises EvidenceError if the record contradicts itself.

    Dimensions: `position` (output tokens, by absolute position), `round`, `slot` (draft tokens of a round; short rounds are padded
    with -1), `length` (so many draft tokens), `step` (by engine step number); of a run recorded for replay also `drafter`, `known` (how
    many tokens its drafts are behind, which is the position of the first of them) and `place` (in such a draft). Totals of speculation
    are attributes. Strings hold U+2400 in place of NUL, which NetCDF cannot store.
    """
    import xarray

    check(record)
    rounds, steps = record.rounds, record.steps
    metrics = Metrics.of([record])
    widest = max(metrics.widths, default=0)
    variables: dict[str, Any] = {
        "token": _variable("position", _ints(record.tokens, np.int32), "1", "token id"),
        "piece": _variable("position", _strings(record.pieces), "1", "text of the token alone"),
        "kind": _variable(
            "position",
            _strings(kind for entry in rounds for kind in kinds_of(entry)),
            "1",
            f"one of {', '.join(KINDS)}",
        ),
        "round_of": _variable(
            "position",
            _ints(i for i, entry in enumerate(rounds) for _ in entry.emitted),
            "1",
            "round that emitted the token",
        ),
        "logprob": _variable(
            "position", _logprobs(rounds), "nat", "log-probability under the model's raw distribution"
        ),
        "draft_token": _variable(
            ("round", "slot"), _padded([entry.drafted for entry in rounds], widest), "1", "drafted token ids"
        ),
        "rejected_token": _variable(
            ("round", "slot"),
            _padded([entry.rejected for entry in rounds], widest),
            "1",
            "drafted token ids that were not kept",
        ),
        "drafted_by": _variable(
            "round",
            _strings(entry.drafter for entry in rounds),
            "1",
            "who drafted, of a drafter of several parts which",
        ),
        "note": _variable("round", _strings(entry.note for entry in rounds), "1", "why the round had no draft"),
        "why": _variable(
            "round", _strings(entry.why for entry in rounds), "1", "why the controller allowed as many drafts"
        ),
        "accepted_rounds": _variable(
            "length",
            _ints(metrics.accepted_lengths[length] for length in range(widest + 1)),
            "1",
            "rounds with drafts of which so many were accepted",
        ),
        "width_rounds": _variable(
            "length",
            _ints(metrics.widths[length] for length in range(widest + 1)),
            "1",
            "rounds that verified so many drafts",
        ),
    }
    variables |= _columns("round", rounds, _ROUND_COUNTS, np.int64) | _columns(
        "round", rounds, _ROUND_TIMES, np.float64
    )
    variables |= _columns("step", steps, _STEP_COUNTS, np.int64) | _columns("step", steps, _STEP_TIMES, np.float64)
    first = len(record.prompt_tokens)
    coordinates = {
        "position": _variable(
            "position", np.arange(first, first + len(record.tokens), dtype=np.int64), "1", "absolute position"
        ),
        "round": _variable("round", np.arange(len(rounds), dtype=np.int64), "1", "round of this request"),
        "slot": _variable("slot", np.arange(widest, dtype=np.int64), "1", "place in the draft"),
        "length": _variable("length", np.arange(widest + 1, dtype=np.int64), "token", "draft tokens"),
        "step": _variable("step", _ints(entry.step for entry in steps), "1", "engine step"),
    }
    return xarray.Dataset(
        variables | _recorded(record), coordinates | _recorded_at(record), _attributes(record) | _totals(metrics)
    )


def _attributes(record: RunRecord) -> dict[str, str | int | float]:
    facts, params = record.engine, record.params
    attributes: dict[str, str | int | float] = {
        "schema": SCHEMA,
        "title": "Trace of one Power Lab run",
        "model": facts.model,
        "model_sha256": facts.sha256,
        "mode": facts.mode,
        "device": facts.device,
        "arithmetic_digest": facts.digest,
        "revision": facts.revision,
        "drafter": str(params.get("speculate", "off")),
        "seed": str(params.get("seed")),  # up to 63 bits, and None for a greedy run without one
        "prompt_tokens": len(record.prompt_tokens),
        "cached_tokens": record.cached,
        "preemptions": record.preemptions,
        "finish": str(record.finish),
        "queue_s": record.queue_s,
        "prefill_s": record.prefill_s,
        "decode_s": record.decode_s,
    }
    for key in ("width", "temperature"):
        value = params.get(key)
        if isinstance(value, (int, float)):
            attributes[key] = value
    return attributes


def _recorded(record: RunRecord) -> dict[str, Any]:
    """What drafters say behind each token, where that was recorded."""
    if not record.drafts:
        return {}
    known, widest = _recorded_range(record)
    shape = len(record.drafts), len(known), widest
    tokens, sure = np.full(shape, -1, np.int32), np.full(shape, np.nan)
    for at, table in enumerate(record.drafts.values()):
        for row, (draft, confidence) in enumerate(
            zip(table.drafts, table.confidence, strict=True), table.first - known.start
        ):
            tokens[at, row, : len(draft)] = draft
            sure[at, row, : len(confidence)] = confidence
    dims = "drafter", "known", "place"
    return {
        "recorded_token": (dims, tokens, {"units": "1", "long_name": "token ids that would have been drafted"}),
        "recorded_confidence": (
            dims,
            sure,
            {"units": "1", "long_name": "probability of the token as its drafter saw it, if those before were said"},
        ),
    }


def _recorded_at(record: RunRecord) -> dict[str, Any]:
    if not record.drafts:
        return {}
    known, widest = _recorded_range(record)
    return {
        "drafter": _variable("drafter", _strings(record.drafts), "1", "who drafts"),
        "known": _variable("known", _ints(known), "token", "tokens that are known, the prompt's among them"),
        "place": _variable("place", np.arange(widest, dtype=np.int64), "1", "place in the draft"),
    }


def _recorded_range(record: RunRecord) -> tuple[range, int]:
    """Known tokens of all tables' entries, and the most drafts of one."""
    tables = record.drafts.values()
    first = min(table.first for table in tables)
    end = max(table.first + len(table.drafts) for table in tables)
    return range(first, end), max((len(draft) for table in tables for draft in table.drafts), default=0)


def _totals(metrics: Metrics) -> dict[str, int | float]:
    """Attributes; what there is no number for, such as the acceptance without drafts, is NaN."""
    return {f"total_{key}": float("nan") if value is None else value for key, value in metrics.row().items()}


def _columns(dim: str, entries: tuple[Any, ...], columns: _Columns, dtype: Any) -> dict[str, Any]:
    return {
        name: _variable(dim, np.array([value(entry) for entry in entries], dtype=dtype), unit, title)
        for name, (unit, title, value) in columns.items()
    }


def _variable(
    dims: str | tuple[str, ...], values: np.ndarray, units: str, title: str
) -> tuple[Any, np.ndarray, dict[str, str]]:
    return dims, values, {"units": units, "long_name": title}


def _ints(values: Iterable[int], dtype: Any = np.int64) -> np.ndarray:
    return np.array(list(values), dtype=dtype)


def _floats(values: Iterable[float]) -> np.ndarray:
    return np.array(list(values), dtype=np.float64)


def _strings(values: Iterable[str]) -> np.ndarray:
    return np.array([value.replace("\0", "␀") for value in values], dtype=object)


def _padded(rows: list[tuple[int, ...]], width: int) -> np.ndarray:
    table = np.full((len(rows), width), -1, dtype=np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def _logprobs(rounds: tuple[Round, ...]) -> np.ndarray:
    missing = float("nan")
    return _floats(
        value
        for entry in rounds
        for value in ([item.value for item in entry.logprobs] or [missing] * len(entry.emitted))
    )
