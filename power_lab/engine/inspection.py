"""What inspectors are told of an engine: steps, shapes, prefixes, lookups, a position under the lens; plain structs."""

from __future__ import annotations

from typing import Self

import msgspec

from power_lab.engine.request import SamplingParams
from power_lab.engine.trace import RunRecord


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all reports."""


# --- step by step ---------------------------------------------------------------------------------------------------------------------


class StepRecord(_Report, frozen=True, kw_only=True):
    """One engine step.

    Attributes:
        number: of the step, from 0; it is `Step.step` and `Round.step` of the run records.
        begin, end: planning to commit, monotonic seconds of the engine's clock; steps may overlap where the device works by itself.
        prefill_rows, decode_rows, verify_rows: token rows by what they were for.
        running, waiting: requests after the step's planning; preempted: requests that gave their blocks up in it.
        shape: (token rows, logit rows) of the shape that it ran in, None where that is not known.
        how: `replay` (a recorded graph), `capture` (recorded for this step, then replayed), `eager` (operation by operation), "" unknown.
        why: why it ran eagerly; padded_rows: rows that were added for the shape.
        busy_s: seconds of device work, None where not measured.
        free_blocks, cached_blocks, used_blocks: of the pool after the step's planning.
        tokens: emitted; drafted, accepted: draft tokens.
    """

    number: int
    begin: float
    end: float
    prefill_rows: int
    decode_rows: int
    verify_rows: int
    running: int
    waiting: int
    preempted: int
    shape: tuple[int, int] | None
    how: str
    why: str
    padded_rows: int
    busy_s: float | None
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    tokens: int
    drafted: int = 0
    accepted: int = 0

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows + self.verify_rows


# --- graph shapes ---------------------------------------------------------------------------------------------------------------------


class ShapeRow(_Report, frozen=True, kw_only=True):
    """What became of one padded shape since the engine began.

    Attributes:
        rows: token rows (0 stands for all that have no line of their own); logits: logit rows; sampling: how they are drawn.
        captures, replays, eager: steps whose graph was recorded for them, that replayed one, and that ran operation by operation; each step
            is one of these. evictions: how often its graph was given up.
        why: reason -> eager steps; apart: reason -> steps whose sampling ran after the graph.
        real_rows, padding_rows: token rows asked for, and added to them.
        nbytes: of its graph, 0 when none is held; held: whether one is; last_step: when it was last used, in steps counted from 1.
    """

    rows: int
    logits: int
    sampling: str
    captures: int
    replays: int
    eager: int
    evictions: int
    why: dict[str, int]
    apart: dict[str, int]
    real_rows: int
    padding_rows: int
    nbytes: int
    held: bool
    last_step: int

    @property
    def waste(self) -> float:
        """Share of the computed token rows that was padding, 0 to 1."""
        return self.padding_rows / max(1, self.real_rows + self.padding_rows)


class BucketReport(_Report, frozen=True, kw_only=True):
    """A set of row buckets for the demand that was recorded, beside the declared ones.

    Attributes:
        buckets: ascending token rows; declared: those in force.
        padding_rows, declared_padding_rows: rows that each would have added to the recorded steps.
        uncovered, declared_uncovered: steps longer than each set's largest bucket; these run operation by operation.
        saved: share of the declared buckets' cost that the set would have saved, below 0 where it holds more steps with as many buckets.
            A cost is a step's seconds by its padded rows, on the line through `costs`, or where these are empty its padded rows themselves.
        saved_s: that share in seconds, None where costs are not known.
        costs: (rows, seconds) as measured, ascending.
        text: the same in a sentence.
    """

    buckets: tuple[int, ...]
    declared: tuple[int, ...]
    padding_rows: int
    declared_padding_rows: int
    uncovered: int = 0
    declared_uncovered: int = 0
    saved: float = 0.0
    saved_s: float | None = None
    costs: tuple[tuple[int, float], ...] = ()
    text: str = ""


class ShapesReport(_Report, frozen=True, kw_only=True):
    """Graph shapes of an engine.

    Attributes:
        enabled: whether graphs are in use; why: why not.
        shapes: in order of rows, logits, sampling.
        steps: captures, replays and eager ones together. captures, replays, eager, evictions, graphs, nbytes: sums over all shapes.
        budget: bytes that graphs may occupy.
        hit_rate: share of the last `window` steps that replayed a graph that was there, None before the first.
        history: (step number, 1 where a graph that was there was replayed) of the steps in the ring, oldest first.
        demand: token rows -> steps that asked for so many (as JSON: keys are strings).
        planned: better buckets for that demand, None before there is any.
    """

    enabled: bool
    why: str
    shapes: tuple[ShapeRow, ...]
    steps: int
    captures: int
    replays: int
    eager: int
    evictions: int
    graphs: int
    nbytes: int
    budget: int
    hit_rate: float | None
    window: int
    history: tuple[tuple[int, int], ...]
    demand: dict[int, int]
    planned: BucketReport | None


# --- prefixes -------------------------------------------------------------------------------------------------------------------------


class PrefixNode(_Report, frozen=True, kw_only=True):
    """One node of the prefix tree: a block that is named by its content.

    Attributes:
        kind: `block` (64 tokens of KV); state checkpoints and tiers will be further kinds.
        block: its id in the pool; hash, parent: hex digests of it and of the block before it ("" at a root).
        depth: blocks before it in its prefix, from 0.
        namespace: the cache key under which it was computed; tokens: ids in it; piece: their text ("" where they are not known any more).
        hits: how often it served a request; tokens_saved, seconds_saved: by those, with the engine's measured seconds a prompt token
            (None before there is a measurement).
        age_s: seconds since it was computed; last_hit_s: since it last served, None where never.
        refs: requests that hold it now; eviction: place in the order of eviction, 0 is next, -1 while it is held.
        nbytes: of the block over all layers.
    """

    block: int
    hash: str
    parent: str
    depth: int
    namespace: str
    tokens: tuple[int, ...]
    piece: str
    hits: int
    tokens_saved: int
    seconds_saved: float | None
    age_s: float
    last_hit_s: float | None
    refs: int
    eviction: int
    nbytes: int
    kind: str = "block"


class PrefixTree(_Report, frozen=True, kw_only=True):
    """All prefixes that are held now, parents before children.

    Attributes:
        nodes: blocks; block_tokens: tokens of a block (64).
        lookups, hits: requests that asked the cache, and that it served; tokens, hit_tokens: prompt tokens of those, and served ones.
        seconds_saved: by all hits since the engine began, None before a measurement; seconds_a_token: of prefill, measured, or None.
        evictions: blocks since the engine began; free_blocks: that are taken before any cached block is evicted.
        nbytes: of all nodes. left_out: nodes that are held and not told of, those farthest from the roots, as a report is bounded.
    """

    nodes: tuple[PrefixNode, ...]
    block_tokens: int
    lookups: int
    hits: int
    tokens: int
    hit_tokens: int
    seconds_saved: float | None
    seconds_a_token: float | None
    evictions: int
    free_blocks: int
    nbytes: int
    left_out: int = 0


class LookupReport(_Report, frozen=True, kw_only=True):
    """Where a prompt would hit the prefix cache now, and where and why it stops. Asking changes nothing.

    Attributes:
        namespace: the cache key asked under; tokens, pieces: the prompt's ids with their text.
        blocks: ids of the blocks that it hits, from the first; hashes: of all its full blocks, hex.
        served: prompt tokens that would not be computed; computed: that would.
        stop: index of the first token that would be computed.
        reason: `off`, `short`, `miss`, `end`, `differs`, `namespace`, `last-block`, `last-token`; why: the same in a sentence.
        differs_at: index of the first token that differs from the cached prefix that comes closest, where reason is `differs`.
        nearest: block id of that closest continuation, -1 where there is none.
        seconds_saved: by it, None before the engine has measured a prompt.
    """

    namespace: str
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    blocks: tuple[int, ...]
    hashes: tuple[str, ...]
    served: int
    computed: int
    stop: int
    reason: str
    why: str
    differs_at: int | None = None
    nearest: int = -1
    seconds_saved: float | None = None


# --- lens -----------------------------------------------------------------------------------------------------------------------------


class LensAsk(_Report, frozen=True, kw_only=True):
    """Which position of which run to look at.

    Attributes:
        tokens: of the run, prompt and output, at least those before the position; prompt: how many of them are the prompt's.
        position: absolute index of the token to explain, from 1; that token itself may be in `tokens` or not.
        params: of the run, with its seed; namespace: its cache key; top: how many candidates to report (1..64).
        known: tokens that the drafter had at the beginning of the round; -1: all before the position.
        drafted: the draft at this position, -1 where there was none; accepted: whether it was kept.
    """

    tokens: tuple[int, ...]
    prompt: int
    position: int
    params: SamplingParams
    namespace: str = ""
    top: int = 10
    known: int = -1
    drafted: int = -1
    accepted: bool = False

    @classmethod
    def of(cls, record: RunRecord, position: int, top: int = 10) -> Self:
        """Of a finished run. position: absolute, of one of its output tokens, or of the one behind them."""
        known, drafted, accepted = -1, -1, False
        for round_ in record.rounds:
            row = position - round_.start
            if 0 <= row < len(round_.emitted):
                known = round_.start
                if row < len(round_.drafted):
                    drafted, accepted = round_.drafted[row], row < round_.accepted
        return cls(
            tokens=(*record.prompt_tokens, *record.tokens)[: position + 1],
            prompt=len(record.prompt_tokens),
            position=position,
            params=msgspec.convert(record.params, SamplingParams, strict=False),
            namespace=record.namespace,
            top=top,
            known=known,
            drafted=drafted,
            accepted=accepted,
        )


class LensToken(_Report, frozen=True, kw_only=True):
    """One candidate at one position.

    Attributes:
        token: id; piece: its text.
        raw: probability by the model's logits alone; probability: after the sampler chain (penalties, bias, temperature, top-k, top-p,
            min-p), 0 where the chain removed it.
        noise: the Gumbel noise of the draw, None where the choice is greedy; score: what the largest of is chosen (the log of `probability`
            plus `noise`, or the processed logit where greedy; None where removed).
    """

    token: int
    piece: str
    raw: float
    probability: float
    noise: float | None
    score: float | None


class LensDraft(_Report, frozen=True, kw_only=True):
    """What one drafter says of the same position.

    Attributes:
        drafter: its name; candidates: (token id, piece, probability), the likeliest first; empty where `why` says why not.
        chosen, piece: its draft, -1 where it had none.
        kept: whether the target chose the same token; why: in a sentence, why it was kept or not, or why there is no distribution.
        probability: of the target's choice under the drafter, None where not known.
    """

    drafter: str
    candidates: tuple[tuple[int, str, float], ...]
    chosen: int
    piece: str
    kept: bool
    why: str
    probability: float | None = None


class LensReport(_Report, frozen=True, kw_only=True):
    """Target and draft at one position of a run.

    Attributes:
        position: absolute index of the token in prompt and output; index: in the output.
        seed, temperature: of the draw.
        candidates: the target's, likeliest raw ones first; the chosen and the drafted tokens are always among them.
        chosen, piece: what the target says here; said: what the run emitted there (-1 beyond its end); exact: whether they are equal.
        context: text before the position, its last 200 characters.
        draft: what the drafter said, None where the run had none or none is loaded; why: why `draft` is missing.
        noise: how the noise comes about, in a sentence.
    """

    position: int
    index: int
    seed: int
    temperature: float
    candidates: tuple[LensToken, ...]
    chosen: int
    piece: str
    said: int
    exact: bool
    context: str
    draft: LensDraft | None
    why: str
    noise: str
