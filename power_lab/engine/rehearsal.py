"""A rehearsal of a model: every shape of step that its engine may run, on an operation table that computes nothing.

Where kernels are compiled at their first launch, it tells which variants will be launched, and a process of its own compiles its share of
them: `python -m power_lab.engine.rehearsal ASKED FOLDER`, with what `Asked` says, in JSON. `compilers` starts it.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from power_lab.engine.compilers import Asked
from power_lab.engine.config import EngineConfig
from power_lab.engine.graphs import coverage_of
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder
from power_lab.engine.models.describe import describe
from power_lab.engine.models.probed import probed_shapes
from power_lab.engine.plan import UNKNOWN, Span, StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.engine.runner import Runner, Sizes
from power_lab.engine.scheduler import Limits
from power_lab.engine.speculation.drafters import DraftAsk
from power_lab.engine.speculation.drafters.neural import Companion, Resuming, Room, Trained, hybrid, native
from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Target
from power_lab.engine.speculation.drafters.neural.kinds import bind as bind_drafter
from power_lab.engine.speculation.drafters.neural.ranking import said_of
from power_lab.engine.speculation.drafters.neural.steps import PLACES
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.kernels.ops import BLOCK, Ops, Weight
from power_lab.kernels.probe import probe
from power_lab.kernels.quants import QuantType

DRAWS = (
    SamplingParams(seed=0),
    SamplingParams(seed=0, temperature=1.0),
    SamplingParams(seed=0, temperature=1.0, top_k=40),
)
"""Greedy, random and limited."""

REPORTED = (0, 1, 5)
"""Log-probabilities: a kernel may differ for none, for one, and for numbers that 16 divides or does not."""

WIDTHS = (1, 2, 3, 7, 15, 63)
"""Drafts that are asked for: up to the default's most, and the most of all."""


def bounds(config: EngineConfig, context: int) -> Sizes:
    """What steps of such an engine never exceed."""
    limits = Limits.of(config)
    rows = min(limits.step_tokens, limits.max_batch * context)
    return Sizes(rows, min(rows, limits.sampled_rows), limits.max_batch, context)


def rehearse(
    model: Decoder, sizes: Sizes, graphs: bool = True, trained: Trained | None = None, buckets: tuple[int, ...] = ()
) -> None:
    """Run the operations of all steps within these bounds, and the exactness probe's, on a model whose table computes nothing.

    graphs: whether steps are padded as where they are captured, to these buckets, if there are some. trained: a drafter that rides along,
        whose launches are run, too.
    """
    companion: Companion | None = None
    if trained is not None:
        rows = coverage_of(model.ops, buckets).cover(sizes.rows) or sizes.rows
        room = Room(
            rows=rows, batch=sizes.spans, context=sizes.context, clock=time.monotonic, graph_bytes=0, graphs=graphs
        )
        companion = hybrid.beside(trained.companion(room), model.ops, room)
    runner = Runner(
        model, sizes, clock=time.monotonic, graph_bytes=0, graphs=graphs, buckets=buckets, companion=companion
    )
    runner.make_pool(2)
    for step in steps(sizes, runner.graphs.coverage.rows):
        runner.launch(*step)
    if companion is not None:
        places = row_counts(min(sizes.spans, PLACES), runner.graphs.coverage.rows)
        rehearse_drafts(companion, places, sizes.context)
        if runner.resumes:
            rehearse_rounds(runner, companion, places, sizes)
    for shapes in (probed_shapes(model.spec, model.weights), *([trained.shapes] if trained else [])):
        probe(model.ops, shapes, _unread)


def rehearse_drafts(companion: Companion, places: Sequence[int], context: int) -> None:
    """Run a drafter's launches for so many requests at once, under each of its names."""
    for name in companion.serves:
        drafter = companion.drafter(name)
        for id in range(places[-1]):
            drafter.begin(id, (0, 0), "")
        for count, width, params in itertools.product(places, WIDTHS, DRAWS):
            biased = msgspec.structs.replace(params, logit_bias={0: 1.0})
            for one in (params, biased) if count in (places[0], places[-1]) else (params,):
                asked = min(width, context - 1)
                drafter.propose([DraftAsk(id, (0, 0), asked, one, (1,), 1) for id in range(count)])
        for id in range(places[-1]):
            drafter.end(id)


def rehearse_rounds(runner: Runner, companion: Companion, places: Sequence[int], sizes: Sizes) -> None:
    """Run steps that go on from one another, for so many requests at once, with drafts under each of its names that stay on the device."""
    drafters = [drafter for name in companion.serves if isinstance(drafter := companion.drafter(name), Resuming)]
    for drafter, count, width, params in itertools.product(drafters, places, (0, *WIDTHS), DRAWS):
        room = min(sizes.context, sizes.rows // count, sizes.sampled // count) - 1
        drafts = min(width, room, drafter.most)
        if drafts >= 0:
            requests = {id: _request(id, params, sizes.context) for id in range(count)}
            rows = (UNKNOWN,) * (drafts + 1)
            spans = (Span(id, 0, rows, drafts, len(rows), (1,), id) for id in range(count))
            runner.launch(StepPlan(0, tuple(spans)), requests, drafter)


def steps(sizes: Sizes, buckets: Sequence[int]) -> Iterator[tuple[StepPlan, dict[int, Request]]]:
    """Steps that launch whatever steps within these bounds may launch."""
    for rows in row_counts(sizes.rows, buckets):
        logits = min(rows, sizes.sampled)
        yield _step(rows, 1, DRAWS[0], sizes.context)
        for params in DRAWS:
            yield _step(rows, logits, params, sizes.context)
            biased = msgspec.structs.replace(params, logit_bias={0: 1.0})  # drawn apart from the step, without padding
            yield _step(rows, logits, biased, sizes.context)
    for top in REPORTED:
        for sampled in sorted({1, min(2, sizes.sampled), sizes.sampled}):
            yield _step(sampled, sampled, msgspec.structs.replace(DRAWS[0], logprobs=top), sizes.context)


def row_counts(most: int, buckets: Sequence[int]) -> list[int]:
    """Rows of steps that stand for all of up to `most` rows: the buckets that steps are padded to, and of the larger ones, which are not,
    some between powers of two, multiples of 16 and others."""
    counts = {min(rows, most) for rows in buckets}
    for power in itertools.takewhile(lambda rows: rows < most, (1 << n for n in range(20))):
        counts |= {rows for rows in (power, power + 1, power + 16) if buckets[-1] < rows <= most}
    return sorted(counts | {most})


def _step(rows: int, sampled: int, params: SamplingParams, context: int) -> tuple[StepPlan, dict[int, Request]]:
    """A step of so many rows, of as few requests as may have them, the last `sampled` of all sampled."""
    spans, requests = [], {}
    while rows:
        count, id = min(rows, context), len(spans)
        logits = max(0, sampled - rows + count)
        requests[id] = _request(id, params, context)
        spans.append(Span(id, 0, (0,) * count, max(0, logits - 1), logits, (1,) * -(-count // BLOCK)))
        rows, sampled = rows - count, min(sampled, rows - count)
    return StepPlan(0, tuple(spans)), requests


def _request(id: int, params: SamplingParams, context: int) -> Request:
    return Request(id=id, prompt_len=1, params=params, tokens=[0], limit=context, end_tokens=frozenset())


def _unread(ops: Ops, type: QuantType, rows: int, cols: int, rng: np.random.Generator, operand: str) -> Weight:
    """A weight whose values nobody asks for."""
    return ops.weight(type, rows, cols, np.empty(0, np.uint8), operand)


def read(
    path: Path,
    ops: Ops,
    context: int,
    vocab: int | None = None,
    drafter: Path | None = None,
    own: bool = False,
    config: EngineConfig | None = None,
) -> tuple[Decoder, Trained | None]:
    """The model of a checkpoint, with a tokenizer of `vocab` tokens, and a drafter that was trained for it, or (`own`) that it has
    itself, on a table that does not read values. config: what limits the drafter's tokens."""
    with open_checkpoint(path) as checkpoint:
        described = describe(checkpoint, vocab)
        model = Decoder(described.spec, bind(described.spec, described.source, ops), ops, context)
        said = said_of(config or EngineConfig(), described.spec.vocab)
        if own and described.nextn is not None:
            target = Target(described.spec, model.weights, ops, described.source, "", *said)
            return model, native.bind(described.nextn, target, context)[0]
        if drafter is None:
            return model, None
        with Artifact.open(drafter) as artifact:
            made_for = (
                artifact.header.target.sha256
            )  # whether it was made for this model is asked where values are read
            target = Target(described.spec, model.weights, ops, described.source, made_for, *said)
            return model, bind_drafter(artifact, target, context)


def claims(names: Sequence[str], folder: Path) -> Iterator[str]:
    """Those of the names that no other process has taken from this folder, one at a time; each is marked as done when the next is asked
    for. The number of all is left in the file `all`."""
    (folder / f"all.{os.getpid()}").write_text(str(len(names)))
    (folder / f"all.{os.getpid()}").replace(folder / "all")
    for name in names:
        try:
            (folder / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield name
        (folder / name).rename(folder / f"{name}.done")


def main(asked: Asked, folder: Path) -> int:
    """Compile this process' share of a model's kernels. Returns the exit status."""
    from power_lab.kernels.triton.variants import DryOps, Variants

    with Variants(asked.capability) if asked.launchers else Variants(asked.capability, None) as variants:
        drafter = Path(asked.drafter) if asked.drafter else None
        config = asked.config
        model, trained = read(Path(asked.model), DryOps(), asked.context, asked.vocab, drafter, asked.native, config)
        rehearse(model, bounds(config, asked.context), config.graph_mb > 0, trained, config.buckets)
    return compile_share({variant.key: variant.compile for variant in variants}, folder)


def compile_share(found: Mapping[str, Callable[[], object]], folder: Path) -> int:
    """Make those of the variants that no other process has taken. One that fails is left for its first launch; the status is then 1."""
    status = 0
    for key in claims(list(found), folder):
        try:
            found[key]()
        except Exception:  # noqa: BLE001  # whatever Triton or its assembler says; the first launch says it again
            traceback.print_exc()
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=Asked), Path(sys.argv[2])))
