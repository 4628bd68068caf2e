"""Speed of an engine, from its own traces: decoding in batches, verify steps, prompts; and the same steps' graphs without the host."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from bench.blind import Blind
from bench.spy import Spy
from power_lab.engine.config import EngineConfig
from power_lab.engine.engine import Engine
from power_lab.engine.loader import Loaded
from power_lab.engine.models.spec import ModelSpec, ModelWeights
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters import Draft, DraftAsk
from power_lab.engine.ticket import Ticket
from power_lab.engine.trace import RunRecord
from power_lab.errors import PowerLabError
from power_lab.kernels.ops import Graph

RUNS = 5
QUARTERS = (0.25, 0.75)  # of a request's steps

Record = dict[str, Any]


class Wrong:
    """A drafter that always fills its width, almost never rightly: every step verifies a whole window and emits one token."""

    name = "wrong"

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab

    def begin(self, request_id: int, prompt: Sequence[int], namespace: str) -> None: ...

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft(tuple((ask.tokens[-1] + 7 * i + 1) % self._vocab for i in range(ask.width))) for ask in asks]

    def commit(self, request_id: int, emitted: Sequence[int]) -> None: ...

    def end(self, request_id: int) -> None: ...


class Bench:
    """One model's measurements.

    Args:
        loaded: the model, whose operation table is a `Spy`.
        device: "cuda" or "cpu".
        copy_rate, matrix_rate: bytes and floating-point operations a second that the device reaches at best.
        prompt, count: tokens of a request.
        batch, prefill: of the largest measurement.
        long: tokens of the prompt of one request of each batch that decodes; 0: as all others.
        context: longest request that the engine takes; 0: the model's, as far as the pool holds it.
    """

    def __init__(
        self,
        loaded: Loaded,
        device: str,
        copy_rate: float,
        matrix_rate: float,
        *,
        prompt: int = 128,
        count: int = 256,
        batch: int = 128,
        prefill: int = 4096,
        long: int = 0,
        context: int = 0,
    ) -> None:
        assert isinstance(loaded.model.ops, Spy)
        self.spy: Spy = loaded.model.ops
        self.loaded, self.device = loaded, device
        self._copy_rate, self._matrix_rate = copy_rate, matrix_rate
        self._prompt, self._count, self._prefill, self._long = prompt, count, prefill, long
        pages = batch * -(-(prompt + count) // 64) + (-(-(long + count) // 64) if long else 0)
        config = EngineConfig(
            device=device,  # type: ignore[arg-type]
            kv_tokens=max(pages * 64, prefill + 64, -(-context // 64) * 64),
            context=context,
            step_tokens=prefill,
            max_batch=batch,
            prefix_cache=False,
        )
        self.engine = Engine(config, loaded=loaded, threaded=False)
        self.engine._proposer._make = lambda _: Wrong(self.engine.facts.vocab)  # whatever drafter a request names
        self.stored = sum(self.engine.facts.quantisation.values())

    def decode(self, batch: int) -> Record:
        """`batch` requests at once, end to end and in the steps in which all of them decode."""
        self._requests(batch, 0, self._long)  # compiles and captures
        rates, steps, device = [], [], []
        before = self._eager_steps()
        for _ in range(RUNS):
            start = time.perf_counter()
            records = self._requests(batch, 0, self._long)
            rates.append(batch * self._count / (time.perf_counter() - start))
            steps.append(step_seconds(records))
            device.append(statistics.median(round_.forward_s for round_ in records[0].rounds))
        step = statistics.median(steps)
        made = {"phase": "decode", "batch": batch, "end_to_end_tokens_per_s": round(statistics.median(rates), 1)}
        made |= {"long": self._long} if self._long else {}
        made |= self._step(batch, step, 0, self._long) | {"device_ms": round(statistics.median(device) * 1e3, 4)}
        eager = {f"{rows} rows: {why}": n for (rows, why), n in (self._eager_steps() - before).items()}
        return made | {"eager_steps": eager, "best_ms": round(min(steps) * 1e3, 4), "runs": RUNS}

    def verify(self, rows: int) -> Record:
        """One request whose every step verifies rows - 1 drafts."""
        self._requests(1, rows - 1)
        steps, device = [], []
        for _ in range(RUNS):
            records = self._requests(1, rows - 1)
            steps.append(step_seconds(records))
            device.append(statistics.median(round_.forward_s for round_ in records[0].rounds))
        made = {"phase": "verify", "rows": rows} | self._step(1, statistics.median(steps), rows - 1)
        return made | {"device_ms": round(statistics.median(device) * 1e3, 4), "runs": RUNS}

    def rounds(self, rows: Sequence[int]) -> Record:
        """As `verify`, in rounds that stay on the device, as those of trained drafters do; by rows, each beside a step of one row."""
        pages = -(-(self._prompt + self._count) // 64) + 1
        config = msgspec.structs.replace(self.engine.config, max_batch=1, kv_tokens=64 * pages)
        trained = Blind(self.loaded.model.ops)
        engine = Engine(config, loaded=replace(self.loaded, trained=trained), threaded=False)
        tokens, seconds = self._tokens(0, self._prompt), {}
        try:
            for count in (1, *(count for count in rows if count > 1)):
                speculation = {"speculate": "mtp", "width": count - 1, "controller": "fixed"} if count > 1 else {}
                params = SamplingParams(max_tokens=self._count, ignore_eos=True, **speculation)
                runs = [step_seconds([engine.submit(tokens, params).result()]) for _ in range(RUNS + 1)]
                seconds[count] = statistics.median(runs[1:])
        finally:
            engine.close()
        ms = {str(count): round(spent * 1e3, 4) for count, spent in seconds.items()}
        of_one = {str(count): round(spent / seconds[1], 4) for count, spent in seconds.items()}
        return {"phase": "rounds", "ms": ms, "of_one_row": of_one, "runs": RUNS}

    def prefill(self) -> Record:
        """One long prompt in one step, to its first token."""
        tokens = self._tokens(0, self._prefill)
        times, device = [], []
        for _ in range(RUNS + 2):
            start = time.perf_counter()
            record = self.engine.submit(tokens, SamplingParams(max_tokens=1)).result()
            times.append(time.perf_counter() - start)
            device.append(record.rounds[0].forward_s)
        spent = statistics.median(times[2:])
        work = prefill_work(self.loaded.model.spec, self.loaded.model.weights, self._prefill)
        return {
            "phase": "prefill",
            "tokens": self._prefill,
            "tokens_per_s": round(self._prefill / spent, 1),
            "ms": round(spent * 1e3, 3),
            "best_ms": round(min(times) * 1e3, 3),
            "device_ms": round(statistics.median(device[2:]) * 1e3, 3),
            "tflop_per_s": round(work / spent / 1e12, 2),
            "floor_fraction": round(work / spent / self._matrix_rate, 4),
            "runs": RUNS,
        }

    def where(self, batch: int) -> Record:
        """A decode step by operation: each kind's own graph beside the whole."""
        self._requests(batch, 0)  # compiles and captures
        made: Record = {}

        def look(graph: Graph) -> None:
            whole = self.spy.graph_seconds(self.device, graph)
            shares = self.spy.shares(self.device, graph)
            made.update(
                graph_us=round(whole * 1e6, 2),
                sum_us=round(sum(share.seconds for share in shares) * 1e6, 2),
                operations=[
                    {
                        "operation": share.label,
                        "calls": share.calls,
                        "us": round(share.seconds * 1e6, 2),
                        "gb_per_s": round(share.weight_bytes / share.seconds / 1e9, 1),
                    }
                    for share in shares
                ],
            )

        self._in_a_step(batch, 0, look)
        return {"phase": "where", "batch": batch} | made

    def close(self) -> None:
        self.engine.close()

    def _eager_steps(self) -> Counter[tuple[int, str]]:
        """(rows, why) -> steps so far that ran operation by operation; rows 0 is a prompt's, of no declared shape."""
        steps: Counter[tuple[int, str]] = Counter()
        for shape in self.engine.shape_stats():
            for why, count in shape.eager.items():
                steps[shape.shape.rows, why] += count
        return steps

    def _requests(self, batch: int, drafts: int, long: int = 0) -> list[RunRecord]:
        return [ticket.result() for ticket in self._submit(batch, drafts, long)]

    def _submit(self, batch: int, drafts: int, long: int = 0) -> list[Ticket]:
        speculation = {"speculate": "ngram", "width": drafts, "controller": "fixed"} if drafts else {}
        params = SamplingParams(max_tokens=self._count, ignore_eos=True, **speculation)
        lengths = [long or self._prompt, *(self._prompt for _ in range(batch - 1))]
        return [self.engine.submit(self._tokens(i, length), params) for i, length in enumerate(lengths)]

    def _tokens(self, seed: int, count: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, min(256, self.engine.facts.vocab), count).tolist()

    def _step(self, batch: int, step: float, drafts: int, long: int = 0) -> Record:
        """What a step's seconds amount to, and its graph's alone."""
        halfway = self._count // 2
        contexts = [(long or self._prompt) + halfway, *(self._prompt + halfway for _ in range(batch - 1))]
        read = step_bytes(self.loaded.model.spec, self.loaded.model.weights, contexts)
        launch = statistics.median(self.spy.launches)
        alone: list[float] = []

        def look(graph: Graph) -> None:
            alone.append(self.spy.graph_seconds(self.device, graph))

        # Attention takes a step up with each split of the keys, so that no single step stands for all.
        for place in (0.5,) if drafts else QUARTERS:
            self._in_a_step(batch, drafts, look, long, place)
        graph = statistics.mean(alone)
        return {
            "tokens_per_s": round(batch / step, 1),
            "ms": round(step * 1e3, 4),
            "gb_per_s": round(read / step / 1e9, 1),
            "read_fraction": round(read / step / self._copy_rate, 4),
            "floor_fraction": round(self.stored / step / self._copy_rate, 4),
            "graph_ms": round(graph * 1e3, 4),
            "busy": round(graph / step, 4),
            "launch_ms": round(launch * 1e3, 4),
        }

    def _in_a_step(
        self, batch: int, drafts: int, look: Callable[[Graph], None], long: int = 0, place: float = 0.5
    ) -> None:
        """Run requests and call `look` once with the graph of a step at this part of the way. It may leave nonsense behind, so what they
        say, or whether they fail from there on, means nothing."""
        faults: list[Exception | None] = []

        def once(graph: Graph) -> None:
            try:
                look(graph)
                faults.append(None)
            except Exception as error:
                faults.append(error)
                raise

        self.spy.on_replay(int(self._count * place), once)
        for ticket in self._submit(batch, drafts, long):
            with suppress(PowerLabError):
                ticket.result()
        if not faults:
            raise SystemExit(f"steps of {batch} requests with {drafts} drafts run eagerly: {self._eager_steps()}")
        if faults[0] is not None:
            raise faults[0]


def step_seconds(records: Sequence[RunRecord]) -> float:
    """Mean seconds of the steps in which every one of these requests decoded, from the time its tokens came."""
    first = max(record.rounds[0].step for record in records) + 2  # the step after a prompt is not steady yet
    last = min(record.rounds[-1].step for record in records)
    at = {round_.step: round_.at for round_ in records[0].rounds}
    return (at[last] - at[first]) / (last - first)


def step_bytes(spec: ModelSpec, weights: ModelWeights, contexts: Sequence[int]) -> int:
    """Bytes that a decode step must read: every matrix that is multiplied with, and the keys and values of the requests in bf16."""
    seen = sum(
        2 * 2 * layer.attention.kv_width * min(context, layer.attention.window or context)
        for context in contexts
        for layer in spec.layers
    )
    return sum(weight.data.nbytes for weight in weights.matrices()) + seen


def prefill_work(spec: ModelSpec, weights: ModelWeights, tokens: int) -> float:
    """Floating-point operations of a prompt: its matrices (the head for one row) and causal attention, two a multiply-add."""
    *layers, head = weights.matrices()
    linear = 2.0 * tokens * sum(w.rows * w.cols for w in layers) + 2.0 * head.rows * head.cols
    keys = (sum(min(at + 1, layer.attention.window or tokens) for at in range(tokens)) for layer in spec.layers)
    return linear + sum(4.0 * layer.attention.q_width * n for layer, n in zip(spec.layers, keys, strict=True))
