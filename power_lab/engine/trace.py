"""Trace events: the one record that widgets, receipts and benchmarks read. Nothing is measured twice.

Events are plain msgspec structs, so they cross the engine socket unchanged. Times are seconds; `at` counts from the submission of the
request. Positions are absolute: the first prompt token is position 0. Events are made for every token, so the garbage collector is
spared them.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one emitted token under the model's raw distribution, and the best alternatives."""

    value: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


class Round(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled round of one request: what was drafted, what the target said, what was emitted.

    Attributes:
        step: engine step that ran it.
        start: absolute position of the first emitted token.
        drafted: draft tokens that were verified.
        drafter: who drafted them, "" where nobody did. Of `hybrid` it is the part that did: `copy` or its network's name; `hybrid` itself
            where the device chose between these and told nobody.
        accepted: how many of them matched.
        emitted: tokens emitted: the accepted ones, then one correction or bonus token unless a stop came first.
        rejected: the target's own token where a draft was first refused is the last of `emitted`; these are the drafts not kept.
        rows: rows of all requests in the step; requests: how many requests shared it.
        draft_s, forward_s, sample_s, commit_s: time spent proposing, in the model, sampling, committing.
        at: seconds from submission to the end of the round.
        logprobs: one per emitted token, when asked for.
        note: why this round had no draft although speculation is on, or "".
        width: most drafts that the controller allowed, -1 where it was not asked; why: its reason.
        reachable: how many of `emitted` are in the drafter's part of the vocabulary, -1 where it has all of it or was not asked, and where
            `hybrid` copied, which it does with any token.
        resumed: whether its drafts were made on the device, as a part of the step: what that took is in `forward_s`. light: whether no
            network took part in that.
        replays, replay_s: passes that were run again since the last round to bring state to its committed length, and their time.
    """

    step: int
    start: int
    drafted: tuple[int, ...]
    accepted: int
    emitted: tuple[int, ...]
    rows: int
    requests: int
    draft_s: float
    forward_s: float
    sample_s: float
    commit_s: float
    at: float
    logprobs: tuple[Logprob, ...] = ()
    note: str = ""
    width: int = -1
    why: str = ""
    reachable: int = -1
    replays: int = 0
    replay_s: float = 0.0
    resumed: bool = False
    light: bool = False
    drafter: str = ""

    @property
    def rejected(self) -> tuple[int, ...]:
        return self.drafted[self.accepted :]


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One engine step as the request saw it.

    Attributes:
        step: number since the engine started.
        prefill_rows, decode_rows, verify_rows: rows of all requests by phase; own_rows: of this request.
        running, waiting: requests after planning.
        preempted: requests preempted by the plan.
        free_blocks, cached_blocks, used_blocks: the pool after planning.
        wall_s: the step's duration; at: its end since submission.
    """

    step: int
    prefill_rows: int
    decode_rows: int
    verify_rows: int
    own_rows: int
    running: int
    waiting: int
    preempted: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    wall_s: float
    at: float


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine drafts with beside its model.

    Attributes:
        kind: "model" for a second model, else what a trained drafter is; "" where there is none.
        name: as it is known; sha256: of its file.
    """

    kind: str = ""
    name: str = ""
    sha256: str = ""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is, for receipts and `explain()`.

    Attributes:
        model: resolved name; file: file name; sha256: of the model file; license: its licence as the file states it.
        architecture, parameters, context: topology; quantisation: type name -> bytes stored in it.
        config: the resolved settings; mode, device, threads, digest: arithmetic in force; versions: library name -> version.
        revision: code digest of the engine that ran. draft: what it could draft with.
    """

    model: str
    file: str
    sha256: str
    license: str
    architecture: str
    parameters: int
    context: int
    vocab: int
    quantisation: dict[str, int]
    config: dict[str, str | int | float | bool]
    mode: str
    device: str
    threads: int
    digest: str
    revision: str
    versions: dict[str, str]
    draft: DraftFacts = DraftFacts()


class DraftTable(msgspec.Struct, frozen=True, kw_only=True):
    """What one drafter says behind each token of a finished run (`record="replay"`).

    Attributes:
        first: how many tokens are known before the first entry; each entry knows one more.
        width: most drafts that it was asked for; fewer where the request's limit is near.
        drafts, confidence, notes: of each entry, as in `drafters.Draft`.
        reads: rows of tokens that the drafter catches up with in one call; 0 where it reads them with the target.
        calls: (drafted tokens, seconds) of the calls that were for this request alone; 0 tokens where the drafter only read.
        most: drafts that it makes at once on the device, behind a step whose outcome the host does not know; 0 where it makes none there.
        cut: why there are fewer entries than the run has tokens to draft behind, or "".
    """

    first: int
    width: int
    drafts: tuple[tuple[int, ...], ...]
    confidence: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...]
    reads: int = 0
    calls: tuple[tuple[int, float], ...] = ()
    most: int = 0
    cut: str = ""


class CorpusTexts(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What `ngram` would draft from beside a run's own tokens when that began: what earlier n-gram requests of its namespace knew
    (`record="replay"`). Two generations of at most 32,768 tokens, and 65,536 that wait to be searched.

    Attributes:
        generations: token ids of the younger one, then of the older one; -1 before each text.
        waiting: the same of texts that are not all searched yet; begun: how many tokens of the first one are, in the younger generation.
    """

    generations: tuple[tuple[int, ...], ...] = ()
    waiting: tuple[int, ...] = ()
    begun: int = 0


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of one finished request.

    Attributes:
        id: request number in its engine.
        prompt_tokens, tokens: token ids in and out; text: the output text, cut at a stop string.
        pieces: text of each output token as it decodes alone (for display); draft_pieces: the same for rejected drafts, by token id.
        finish: `stop`, `length`, `cancelled`, `deadline` or `error`; finish_detail: the stop string, token or error message.
        params: the sampling parameters with the seed that was used, as plain values; namespace: the cache key given.
        cached: prompt tokens served by the prefix cache; preemptions: how often the request was preempted.
        queue_s: submission to first step; prefill_s: first step to first token; decode_s: first to last token.
        rounds, steps: the trace.
        engine: what ran it.
        drafts: drafter -> what it says behind each token, where that was recorded (`record="replay"`); corpus: what earlier requests of the
            namespace said, where that was, else None.
    """

    id: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    pieces: tuple[str, ...]
    finish: str
    finish_detail: str
    params: dict[str, object]
    namespace: str
    cached: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float
    rounds: tuple[Round, ...]
    steps: tuple[Step, ...]
    engine: EngineFacts
    draft_pieces: dict[int, str] = {}
    drafts: dict[str, DraftTable] = {}
    corpus: CorpusTexts | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of output as it comes: text that is safe to print (whole characters, no half stop string), and counts so far."""

    id: int
    text: str
    tokens: int
    drafted: int
    accepted: int
    cached: int
    at: float


OnDelta = Callable[[Delta], None]
OnDone = Callable[[RunRecord], None]


class BlockState(msgspec.Struct, frozen=True, kw_only=True):
    """One KV block for the inspector: `free`, `used`, `shared` (several tables), `cached` (hashed, unreferenced) or `dummy`."""

    id: int
    state: str
    refs: int
    hash: str
    owners: tuple[int, ...]
    tokens: int
    parent: int
    depth: int
