"""`NumbaOps`: the operations on numpy arrays, exact on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.errors import ModelFileError
from power_lab.kernels.numba import (
    attention,
    catalogue,
    conv,
    embed,
    identity,
    linear,
    logprobs,
    moves,
    norm,
    recall,
    resume,
    rows,
    sample,
)
from power_lab.kernels.numba import rope as rope_kernels
from power_lab.kernels.numba.host import Copied, InPlace
from power_lab.kernels.numba.program import Job, Program, address, same, within, words
from power_lab.kernels.numba.team import PITCH, SCRATCH, Team, run
from power_lab.kernels.ops import (
    BLOCK,
    Activation,
    Array,
    Batch,
    Draw,
    Fetched,
    Graph,
    KVCache,
    Moved,
    Onward,
    SampleRows,
    Staging,
    Weight,
)
from power_lab.kernels.positions import rope_table
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

FEW_ROWS = 32  # scratch for gated products of these is there from the first use of a weight; for more when they come


class NumbaOps:
    """Exact operations on the CPU. One engine thread uses an instance: its team and scratch serve one call at a time.

    Args:
        cache_dir: where compiled kernels are kept, in a folder named by their digest.
        threads: members of the team that shares a kernel's work; results do not depend on it.

    Attributes:
        threading_layer, threading_reason: how kernels use several cores, and why so.
        cache_reason: why kernels are not kept on disk; empty when they are.
    """

    name = "numba"
    mode = "exact"
    kv_dtype = "float32"
    asynchronous = False
    row_buckets: tuple[int, ...] = ()
    compiles_for = 0
    threading_layer = "team"
    threading_reason = "own threads that share chunks: no OpenMP barrier, which stalls on a busy machine"

    def __init__(self, cache_dir: Path, threads: int) -> None:
        self.threads = threads
        self._digest = identity.digest()
        self._cache = cache_dir / self._digest[:16]
        self.cache_reason = catalogue.open_cache(self._cache)
        self._team = Team(threads)
        self._block = self._team.block
        self._loop: Any = None  # keeps the machine code of the compiled loop alive
        self._row_functions: dict[QuantType, rows.RowFunctions] = {}
        self._plans: dict[tuple[Weight, ...], tuple[np.ndarray, int, int]] = {}
        self._scratch = np.zeros((threads, 0), np.float32)
        self._sample_scratch: tuple[np.ndarray, ...] = ()
        self._one = words([()])
        self._recorded: list[Job] | None = None
        self._arrays: list[Any] = []

    def digest(self) -> str:
        return self._digest

    def reasons(self) -> tuple[str, ...]:
        return tuple(filter(None, (f"{self.threading_layer} threads: {self.threading_reason}", self.cache_reason)))

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile or load all but `prepare`'s part and start the team; without this, the first operation does it."""
        if self._loop is not None:
            return
        loop, dispatcher = catalogue.compile_all(self._folder(), progress)
        self._team.start(loop.ctypes, loop.address, dispatcher.address)
        self._loop = loop, dispatcher

    def prepare(self, types: Iterable[QuantType], progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compile or load what reads weights of these types; without this, the first weight of a type does it."""
        wanted = [type for type in dict.fromkeys(types) if type not in self._row_functions]
        for done, type in enumerate(wanted, start=1):
            loaded = self._row_functions[type] = catalogue.compile_type(type, self._folder())
            self.cache_reason = self.cache_reason or loaded.problem
            if progress is not None:
                progress(done, len(wanted), f"{type.name} weights")

    def _folder(self) -> Path | None:
        return None if self.cache_reason else self._cache

    @property
    def nbytes(self) -> int:
        return self._scratch.nbytes + sum(array.nbytes for array in self._sample_scratch)

    def close(self) -> None:
        """End the worker threads."""
        self._team.close()

    # --- arrays -------------------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return np.empty(shape, dtype)

    def asarray(self, host: np.ndarray) -> Array:
        return np.ascontiguousarray(host)

    def tohost(self, array: Array) -> np.ndarray:
        return array

    def view(self, raw: Array, first: int, shape: tuple[int, ...], dtype: str) -> Array:
        return raw[first : first + prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    def staging(self, raw: Array) -> Staging:
        return InPlace(raw)

    def fetch(self, *arrays: Array) -> Fetched:
        return Copied(tuple(array.copy() for array in arrays))

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserve(
        self, rows: int, sampled: int, vocabulary: int, attentions: Iterable[tuple[int, int, int]], pages: int
    ) -> None:
        """Scratch does not grow with rows here."""

    def wait(self) -> None:
        """Nothing is left to run."""

    def free_bytes(self) -> int | None:
        return None

    def operand(self, types: Iterable[QuantType]) -> str:
        return "float32"

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        """A view of `host` as bytes [rows, bytes per row]; nothing is copied if `host` is contiguous, as rows of a larger matrix are."""
        try:
            type = QuantType(type)
            data = np.ascontiguousarray(host).view(np.uint8).reshape(rows, row_bytes(type, cols))
        except ValueError as error:
            message = f"Weights of type {type!r} and shape [{rows}, {cols}] cannot be computed on: {error}."
            raise ModelFileError(message) from error
        self.prepare((type,))
        return Weight(type, rows, cols, data)

    def vector(self, type: QuantType, host: np.ndarray) -> Array:
        if type == QuantType.F32:
            return np.array(host).view(np.float32).reshape(-1)
        values, size = GEOMETRY[type]
        cols = host.nbytes // size * values
        out = np.empty((1, cols), np.float32)
        self.embed(self.weight(type, 1, cols, host), np.zeros(1, np.int32), out)
        return out[0]

    def kv_cache(self, pages: int, heads: int, head_dim: int) -> KVCache:
        keys = np.zeros((pages, heads, head_dim, BLOCK), np.float32)
        return KVCache(keys, np.zeros((pages, heads, BLOCK, head_dim), np.float32), heads, head_dim)

    def rope_tables(self, positions: int, frequencies: Sequence[float], magnitude: float) -> Array:
        return rope_table(positions, frequencies, magnitude)

    # --- operations of a step -----------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, ids: Array, out: Array, scale: float = 1.0, drawn: Array | None = None) -> None:
        plan, cols, _ = self._plan((table,))
        same(out.shape, (*ids.shape, cols), "shape of the embedded rows")
        if self._recorded is None:
            within(ids, table.rows, "token id", first=0 if drawn is None else -len(drawn))
        self._do(embed.job(plan, ids, out, scale, drawn), plan, ids, out, drawn)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        self._norm(x, None, None, weight, eps, out)

    def add_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        same(delta.shape, x.shape, "shape of what is added")
        self._norm(x, delta, post, weight, eps, out)

    def _norm(
        self, x: Array, delta: Array | None, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        same(out.shape, x.shape, "shape of the result")
        for vector in (post, weight):
            if vector is not None:
                same(vector.shape[0], x.shape[1], "norm width")
        self._do(norm.job(x, delta, post, weight, eps, out), x, delta, post, weight, out)

    def gather_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array, eps: float, rows: Array, out: Array
    ) -> None:
        same(out.shape, (rows.shape[0], x.shape[1]), "shape of the result")
        if self._recorded is None:
            within(rows, x.shape[0], "row")
        self._norm(x, delta, post, weight, eps, x)
        self._do(embed.gather_job(x, rows, out), x, rows, out)

    def parts(self, out: Array) -> Array:
        return out

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        plan, cols, width = self._plan(weights)
        same(x.shape[1], cols, "input width")
        same(out.shape, (x.shape[0], width), "shape of the result")
        if bias is not None:
            same(bias.shape[0], width, "bias width")
        self._do(linear.job(x, plan, out, bias, linear.NONE, self.threads), x, plan, out, bias)

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        plan, cols, width = self._plan((gate, up))
        same(x.shape[1], cols, "input width")
        same((x.shape[0], width), (out.shape[0], 2 * out.shape[1]), "shape of the result")
        if x.shape[0] > FEW_ROWS:
            self._reserve(linear.scratch_floats(cols, x.shape[0]))
        self._do(linear.job(x, plan, out, None, linear.ACTIVATIONS[activation], self.threads), x, plan, out)

    def rope_write(
        self,
        qkv: Array,
        batch: Batch,
        rope: Array | None,
        interleaved: bool,
        q_heads: int,
        cache: KVCache,
        norms: tuple[Array, Array] | None = None,
        eps: float = 0.0,
    ) -> None:
        if qkv.shape[1] != q_heads * cache.head_dim:
            same(qkv.shape[1], (q_heads + 2 * cache.heads) * cache.head_dim, "width of queries, keys and values")
        for part, heads, what in zip(norms or (), (q_heads, cache.heads), ("query norm", "key norm"), strict=False):
            if heads and part.shape[0] != cache.head_dim:
                same(part.shape[0], heads * cache.head_dim, what)
        job = rope_kernels.job(qkv, batch, rope, interleaved, q_heads, cache, norms, eps)
        self._do(job, qkv, batch, rope, cache, norms)

    def group(self, batch: Batch, attentions: Iterable[tuple[int, int, int]], room: Array) -> Batch:
        """Rows attend one by one."""
        return batch

    def attention(
        self,
        qkv: Array,
        batch: Batch,
        q_heads: int,
        scale: float,
        cache: KVCache,
        out: Array,
        window: int = 0,
        softcap: float = 0.0,
        temperature: Array | None = None,
        sinks: Array | None = None,
    ) -> None:
        same(out.shape, (qkv.shape[0], q_heads * cache.head_dim), "shape of the result")
        if qkv.shape[1] < q_heads * cache.head_dim:
            raise ValueError(f"{q_heads} query heads of {cache.head_dim} are not in {qkv.shape[1]} values")
        self._reserve(attention.scratch_floats(q_heads // cache.heads, cache.head_dim))
        if sinks is not None:
            same(sinks.shape, (q_heads,), "one sink for each query head")
        job = attention.job(qkv, batch, q_heads, scale, cache, out, window, softcap, temperature, sinks, self.threads)
        self._do(job, qkv, batch, cache, out, temperature, sinks)

    def softcap(self, x: Array, cap: float) -> None:
        self._do(attention.softcap_job(x, cap), x)

    def tap(
        self,
        x: Array,
        delta: Array | None,
        post: Array | None,
        eps: float,
        out: Array,
        column: int,
        slots: Array | None,
    ) -> None:
        self._reserve(x.shape[1])
        self._do(moves.tap_job(x, delta, post, eps, out, column, slots), x, delta, post, out, slots)

    def take(self, table: Array, index: Array, out: Array) -> None:
        self._do(moves.take_job(table, index, out), table, index, out)

    def merge(
        self,
        table: Weight,
        ids: Array,
        scale: float,
        drawn: Array | None,
        first: Array,
        states: Array,
        index: Array | None,
        second: Array,
        eps: float,
        out: Array,
    ) -> None:
        plan, cols, _ = self._plan((table,))
        same(states.shape[1], cols, "width of the states")
        job = embed.merge_job(plan, ids, scale, drawn, first, states, index, second, eps, out)
        self._do(job, plan, ids, drawn, first, states, index, second, out)

    def scatter_columns(self, values: Array, ids: Array, out: Array) -> None:
        self._do(moves.scatter_job(values, ids, out), values, ids, out)

    def dynamic_conv(self, x: Array, coef: Array, base: Array, side: int, previous: Array, out: Array) -> None:
        self._do(conv.job(x, coef, base, side, previous, out), x, coef, base, previous, out)

    def mark(self, batch: Batch, onward: Onward, drawn: Array, marks: Array) -> None:
        resume.mark(batch, onward, drawn, marks)

    def resume(
        self,
        batch: Batch,
        onward: Onward,
        marks: Array,
        drafts: Array,
        draws: Array,
        moved: Moved,
        last: Array | None = None,
        anchors: Array | None = None,
    ) -> None:
        resume.resume(batch, onward, marks, drafts, draws, moved, last, anchors)

    def note(self, ids: Array, drawn: Array | None, slots: Array, told: Array) -> None:
        recall.note(ids, drawn, slots, told)

    def recall(
        self,
        told: Array,
        tables: Array,
        came: Array,
        marks: Array,
        least: int,
        source: Array,
        drafts: Array,
        out: Array,
    ) -> None:
        recall.recall(told, tables, came, marks, least, source, drafts, out)

    def sample(
        self, logits: Array, rows: SampleRows, tokens: Array, draw: Draw = "limited", ids: Array | None = None
    ) -> None:
        if self._recorded is not None:
            raise RuntimeError("draws read their controls when they are called: they cannot be recorded")
        if ids is not None:
            values, logits = logits, np.empty((len(logits), int(ids[-1]) + 1), np.float32)
            self.scatter_columns(values, ids, logits)
        controls = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence)
        packed = np.stack(controls, axis=1, dtype=np.float32, casting="unsafe")
        keys = np.stack([rows.seeds.view(np.int64), rows.positions], axis=1)
        spans = np.concatenate([rows.history_span, rows.bias_span], axis=1)
        self._wake()
        scratch = self._sampling(logits.shape[1])
        sample.sample(
            self._block, logits, packed, keys, rows.history, spans, rows.bias_ids, rows.bias_values, tokens, *scratch
        )

    def logprobs(self, logits: Array, tokens: Array, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        count, top = logits.shape[0], min(top, logits.shape[1])
        same(tokens.shape, (count,), "one token for each row")
        chosen, ids = np.empty(count, np.float32), np.empty((count, top), np.int32)
        values = np.empty((count, top), np.float32)
        self._do(logprobs.job(logits, tokens, chosen, ids, values), logits, tokens, chosen, ids, values)
        return chosen, ids, values

    # --- jobs ---------------------------------------------------------------------------------------------------------------------

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        self._recorded, self._arrays = [], []
        try:
            result = forward()
            return Program(words(self._recorded), tuple(self._arrays)), result
        finally:
            self._recorded, self._arrays = None, []

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, Program)
        self._wake()
        run(self._block, graph.words, len(graph.words))

    def _do(self, job: Job, *arrays: Any) -> None:
        """Run a job, or record it with the arrays that it points into."""
        if self._recorded is not None:
            self._recorded.append(job)
            self._arrays += arrays
        elif job[0]:
            self._one[0, : len(job)] = job
            self._wake()
            run(self._block, self._one, 1)

    # --- plans and scratch --------------------------------------------------------------------------------------------------------

    def _plan(self, weights: tuple[Weight, ...]) -> tuple[np.ndarray, int, int]:
        """Descriptors for the kernel, input width and total output width of stacked weights."""
        plan = self._plans.get(weights)
        if plan is None:
            plan = self._plans[weights] = self._describe(weights)
            self._reserve(linear.scratch_floats(plan[1], FEW_ROWS))
        return plan

    def _describe(self, weights: tuple[Weight, ...]) -> tuple[np.ndarray, int, int]:
        self.prepare(weight.type for weight in weights)
        described, start = [], 0
        for weight in weights:
            same(weight.cols, weights[0].cols, "input width of stacked weights")
            table, shape = self._row_functions[weight.type].table, (weight.rows, weight.cols, weight.data.shape[1])
            described.append([address(table), address(weight.data), *shape, start])
            start += weight.rows
        return np.array(described, np.int64), weights[0].cols, start

    def _reserve(self, floats: int) -> None:
        """Grow every thread's scratch to at least `floats`, in whole cache lines."""
        if floats > self._scratch.shape[1]:
            self._scratch = np.zeros((self.threads, (floats + 15) // 16 * 16), np.float32)
            self._block[SCRATCH], self._block[PITCH] = address(self._scratch), self._scratch.strides[0]

    def _sampling(self, vocabulary: int) -> tuple[np.ndarray, ...]:
        if not self._sample_scratch or self._sample_scratch[0].shape[2] != vocabulary:
            shape = (self.threads, vocabulary)
            bins = (self.threads, sample.BINS)
            z = np.zeros((self.threads, 2, vocabulary), np.float32)
            self._sample_scratch = (z, np.zeros(shape, np.int32), np.zeros(bins, np.int64), np.zeros(bins, np.float64))
        return self._sample_scratch

    def _wake(self) -> None:
        """See that everything is compiled and the team awake."""
        if self._loop is None:
            self.warm_up()
        self._team.wake()
