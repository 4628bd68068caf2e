"""`TritonOps`: the operations on torch tensors of an NVIDIA GPU, exact."""

from __future__ import annotations

import gc
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from weakref import WeakSet

import numpy as np
import torch
import triton

from power_lab.errors import CapacityError, ModelFileError
from power_lab.kernels.ops import (
    Activation,
    Array,
    Batch,
    Draw,
    Fetched,
    Graph,
    KVCache,
    Moved,
    Onward,
    Progress,
    SampleRows,
    Staging,
    Weight,
)
from power_lab.kernels.positions import rope_table
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import (
    attention,
    conv,
    embed,
    host,
    keys,
    linear,
    logprobs,
    middle,
    moves,
    norm,
    planes,
    recall,
    resume,
    rope,
    sample,
)
from power_lab.kernels.triton.host import Arriving, Pinned, carry, tensor_of
from power_lab.kernels.triton.operand import LARGEST, WHOLE, narrow
from power_lab.kernels.triton.parts import Parts

DOMAIN = "power-lab/arithmetic/triton/1"
PINNED = 1 << 20  # bytes of an array up to which its copy to the device is not waited for
LANDED = 8  # pieces of page-locked memory that wait for their next fetch
CAPTURING = threading.Lock()  # a process' captures: torch has one random generator for all, Python one collector


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Captured:
    """A CUDA graph. nbytes: of device memory, as much less as was free when it had been captured."""

    graph: torch.cuda.CUDAGraph
    nbytes: int


class TritonOps:
    """Exact operations on one GPU, on torch's current stream. One engine thread uses an instance.

    Args:
        device: a CUDA device in torch's words.

    Attributes:
        apart: whether sums of splits are left to their readers; None: as `linear.left` says. For comparisons.
    """

    name = "triton"
    mode = "exact"
    kv_dtype = "bfloat16"
    asynchronous = True
    apart: bool | None = None
    row_buckets: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

    def __init__(self, device: str = "cuda", priority: int = 0) -> None:
        settle()
        self.device = torch.device(device)
        self._stream = torch.cuda.Stream(self.device, priority)
        self._products: linear.Workspace | None = None
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._retired: list[torch.Tensor | sample.Scratch] = []  # scratch that captured graphs may still name
        self._sampling: dict[int, sample.Scratch] = {}
        self._recalling: dict[tuple[int, int], recall.Scratch] = {}
        self._began = torch.cuda.Event(enable_timing=True)
        self._landed: deque[torch.Tensor] = deque(maxlen=LANDED)
        self._graphs: WeakSet[Captured] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        major, minor = torch.cuda.get_device_capability(self.device)
        self.compiles_for = 10 * major + minor
        self._digest = _digest(self.device)

    def digest(self) -> str:
        return self._digest

    def reasons(self) -> tuple[str, ...]:
        return (f"Triton {triton.__version__} on {torch.cuda.get_device_name(self.device)}",)

    @property
    def nbytes(self) -> int:
        parts = (self._products, *self._sampling.values(), *self._recalling.values(), self._scratch, *self._retired)
        return sum(part.nbytes for part in parts if part is not None)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Kernels are compiled at their first launch, by Triton, which keeps them on disk, unless `engine.compilers` was there before."""

    def prepare(self, types: Iterable[QuantType], progress: Progress | None = None) -> None:
        """As `warm_up`."""

    def close(self) -> None:
        """Give scratch back, when what runs has ended."""
        self.wait()
        self._retired.clear()
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._sampling.clear()
        self._recalling.clear()
        self._products = None
        torch.cuda.empty_cache()

    # --- arrays -------------------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        with self._allocating(f"{dtype} values {list(shape)}"):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def asarray(self, host: np.ndarray) -> Array:
        values = torch.from_numpy(np.array(host))
        with self._allocating(f"an array of shape {list(values.shape)}"):
            if values.nbytes > PINNED:
                return values.to(self.device)
            return values.pin_memory().to(self.device, non_blocking=True)

    def tohost(self, array: Array) -> np.ndarray:
        if array.dtype == torch.float16:
            return (array.float() * WHOLE.value).cpu().numpy()
        return (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()

    def view(self, raw: Array, first: int, shape: tuple[int, ...], dtype: str) -> Array:
        kind = getattr(torch, dtype)
        return raw[first : first + prod(shape) * kind.itemsize].view(kind).view(shape)

    def staging(self, raw: Array) -> Staging:
        return Pinned(raw)

    def fetch(self, *arrays: Array) -> Fetched:
        hosts = tuple(self._host(array) for array in arrays)
        for to, array in zip(hosts, arrays, strict=True):
            if array.itemsize == 4 and array.is_contiguous():
                carry(array.view(torch.int32), to.view(torch.int32), array.numel())
            else:
                to.copy_(array, non_blocking=True)
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        return Arriving(hosts, self._began, ended, self._landed)

    @contextmanager
    def step(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record()
            yield

    def _host(self, array: torch.Tensor) -> torch.Tensor:
        """Page-locked memory for an array, such as a step has left behind whose values were taken: to ask for it takes 40 us."""
        for place, held in enumerate(self._landed):
            if held.shape == array.shape and held.dtype == array.dtype:
                del self._landed[place]
                return held
        return torch.empty(array.shape, dtype=array.dtype, pin_memory=True)

    def reserve(
        self, rows: int, sampled: int, vocabulary: int, attentions: Iterable[tuple[int, int, int]], pages: int
    ) -> None:
        with self._allocating("scratch for steps"):
            self._reserve(max((attention.scratch_floats(rows, *shape, pages) for shape in set(attentions)), default=0))
            self._reserve_sampling(sampled, vocabulary)
        self._workspace()

    def wait(self) -> None:
        """For the streams of loads and of steps: to wait for the whole device would break another engine's capture."""
        torch.cuda.default_stream(self.device).synchronize()
        self._stream.synchronize()

    def free_bytes(self) -> int | None:
        """What the driver has, and what torch holds of it for nobody."""
        held = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + held

    @contextmanager
    def _allocating(self, what: str) -> Iterator[None]:
        """Raises CapacityError with the numbers when the device has no memory for it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            message = f"No room for {what} on {self.device}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free."
            raise CapacityError(
                message, "Close other engines, or lower kv_tokens, max_batch, step_tokens or graph_mb."
            ) from error

    def operand(self, types: Iterable[QuantType]) -> str:
        """f16 where codes are stored, which become f16; else bf16, whose range plain values may need."""
        return "float16" if any(type in planes.FORMS for type in types) else "bfloat16"

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray, operand: str = "") -> Weight:
        """The matrix as planes on the device; plain values, and those of small matrices, are rounded to what they are multiplied by."""
        try:
            type = QuantType(type)
            operand = operand or self.operand((type,))
            held, parts = planes.at_load(type, rows, cols, host, operand)
        except ValueError as error:
            message = f"Weights of type {type!r} and shape [{rows}, {cols}] cannot be computed on: {error}."
            raise ModelFileError(message) from error
        with self._allocating(f"weights of shape [{rows}, {cols}]"):
            tensors = {name: tensor_of(np.ascontiguousarray(part)).to(self.device) for name, part in parts.items()}
            if (values := tensors.get("values")) is not None:
                values = values.view(torch.bfloat16) if held == QuantType.BF16 else values
                tensors["values"] = values.to(getattr(torch, operand))
                held = planes.PLAIN_OF[operand]
                if operand == "float16" and bool((tensors["values"].isinf() & values.isfinite()).any()):
                    raise _too_large(type, rows, cols)
            elif planes.bound(held, parts) > LARGEST.value:
                raise _too_large(type, rows, cols)
        return Weight(type, rows, cols, planes.DeviceWeight(held, rows, cols, tensors), operand)

    def vector(self, type: QuantType, host: np.ndarray) -> Array:
        """Norms and biases keep every bit: they are read as f32."""
        if type == QuantType.BF16:
            return self.asarray((np.asarray(host).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))
        if type not in (QuantType.F32, QuantType.F16):
            raise ModelFileError(f"A vector stored as {type.name} cannot be computed on.")
        return self.asarray(np.asarray(host).astype(np.float32))

    def kv_cache(self, pages: int, heads: int, head_dim: int) -> KVCache:
        with self._allocating(f"{pages} KV pages of a layer"):
            keys, values = rope.kv_cache(pages, heads, head_dim, self.device)
        return KVCache(keys, values, heads, head_dim)

    def rope_tables(self, positions: int, frequencies: Sequence[float], magnitude: float) -> Array:
        return self.asarray(rope_table(positions, frequencies, magnitude))

    # --- operations of a step -----------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, ids: Array, out: Array, scale: float = 1.0, drawn: Array | None = None) -> None:
        embed.embed(table.data, ids, out, scale, drawn)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        norm.norm(x, None, None, weight, eps, out)

    def add_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        norm.norm(x, delta, post, weight, eps, out)

    def gather_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array, eps: float, rows: Array, out: Array
    ) -> None:
        norm.norm(x, delta, post, weight, eps, out, rows)

    def parts(self, out: Array) -> Array:
        return Parts(out, self._workspace().partials, self.apart)

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        linear.linear(_narrow(x, weights[0]), tuple(w.data for w in weights), out, self._workspace(), bias)

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        linear.gate_up(_narrow(x, gate), gate.data, up.data, out, self._workspace(), activation)

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
        _write(qkv, batch, rope, interleaved, q_heads, cache.keys, cache.values, norms, eps)

    def group(self, batch: Batch, attentions: Iterable[tuple[int, int, int]], room: Array) -> Batch:
        return attention.group(batch, attentions, room)

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
        pages = batch.tables.shape[1]
        self._reserve(attention.scratch_floats(qkv.shape[0], q_heads, cache.heads, cache.head_dim, pages))
        attention.attention(
            qkv, batch, q_heads, scale, cache.keys, cache.values, out, window, softcap, temperature, self._scratch, sinks=sinks
        )  # fmt: skip

    def softcap(self, x: Array, cap: float) -> None:
        norm.softcap(x, cap)

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
        moves.tap(x, delta, post, eps, out, column, slots)

    def take(self, table: Array, index: Array, out: Array) -> None:
        moves.take(table, index, out)

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
        embed.merge(table.data, ids, scale, drawn, first, states, index, second, eps, out)

    def scatter_columns(self, values: Array, ids: Array, out: Array) -> None:
        moves.scatter_columns(values, ids, out)

    def dynamic_conv(self, x: Array, coef: Array, base: Array, side: int, previous: Array, out: Array) -> None:
        conv.dynamic_conv(x, coef, base, side, previous, out)

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
        key = tables.shape
        if key not in self._recalling:
            self._recalling[key] = recall.Scratch(*key, self.device)
        recall.recall(told, tables, came, marks, least, source, drafts, out, self._recalling[key])

    def sample(
        self, logits: Array, rows: SampleRows, tokens: Array, draw: Draw = "limited", ids: Array | None = None
    ) -> None:
        scratch = self._reserve_sampling(*logits.shape)
        passes = {"random": draw != "greedy", "limited": draw == "limited", "penalised": ids is None}
        sample.sample(logits, rows, tokens, scratch, **passes, ids=ids)

    def logprobs(self, logits: Array, tokens: Array, top: int) -> tuple[Array, Array, Array]:
        return logprobs.logprobs(logits, tokens, min(top, logits.shape[1]))

    # --- graphs -------------------------------------------------------------------------------------------------------------------

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        """Capture a CUDA graph on the current stream, of which nothing runs. Other threads' work with the device goes on meanwhile.

        Raises CapacityError when the device has no memory left for it.
        """
        self.wait()
        if not self._graphs:  # torch ends a pool with the last of its graphs, and takes no other into it
            self._pool = torch.cuda.graph_pool_handle()
        before, graph = torch.cuda.mem_get_info(self.device)[0], torch.cuda.CUDAGraph()
        try:
            with _alone():
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = forward()
                finally:
                    graph.capture_end()
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if "out of memory" not in str(error).lower():
                raise
            message = f"A graph could not be captured with {before} bytes of {self.device} left."
            raise CapacityError(message, "Lower kv_tokens or graph_mb.") from error
        captured = Captured(graph, max(0, before - torch.cuda.mem_get_info(self.device)[0]))
        self._graphs.add(captured)
        return captured, result

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, Captured)
        graph.graph.replay()

    def _reserve(self, floats: int) -> None:
        if floats > self._scratch.numel():
            self._retired.append(self._scratch)
            self._scratch = torch.empty(floats, dtype=torch.float32, device=self.device)

    def _workspace(self) -> linear.Workspace:
        if self._products is None:
            with self._allocating("scratch of products"):
                self._products = linear.Workspace.on(self.device)
        return self._products

    def _reserve_sampling(self, rows: int, vocabulary: int) -> sample.Scratch:
        held = self._sampling.get(vocabulary)
        if held is None or held.z.shape[0] < rows:
            if held is not None:
                self._retired.append(held)
            held = sample.Scratch.allocate(triton.next_power_of_2(rows), vocabulary, self.device)
            self._sampling[vocabulary] = held
        return held


def settle() -> None:
    """Names of kernels in Triton's cache are the same in every process from here on."""
    keys.settle(attention, conv, embed, host, linear, logprobs, middle, moves, norm, recall, resume, rope, sample)


@contextmanager
def _alone() -> Iterator[None]:
    """One capture at a time, and no garbage collection in it: what it finds of old engines, graphs and page-locked memory, is given back
    by calls that break a capture, and with it every later one of the process."""
    with CAPTURING:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


_write = rope.rope_write


def _narrow(x: Array, weight: Weight) -> Array:
    """What linears read. Models without a norm before a part hand on the residual stream itself."""
    return narrow(x, getattr(torch, weight.operand)) if x.dtype == torch.float32 else x


def _too_large(type: QuantType, rows: int, cols: int) -> ModelFileError:
    message = f"Weights of type {type.name} and shape [{rows}, {cols}] may exceed 65,504."
    return ModelFileError(message, 'Quantised weights, and those beside them, are f16 on a GPU. Use device="cpu".')


def _digest(device: torch.device) -> str:
    """Hex SHA-256 over architecture, compiler versions, reduction plans and kernel sources."""
    folder = Path(__file__).parent
    parts = [
        DOMAIN,
        "sm_" + "".join(map(str, torch.cuda.get_device_capability(device))),
        torch.__version__,
        triton.__version__,
        *(
            module.PLAN
            for module in (attention, conv, embed, linear, logprobs, moves, norm, recall, resume, rope, sample)
        ),
    ]
    for path in [
        *sorted(folder.glob("*.py")),
        *(folder.parent / name for name in ("ops.py", "quants.py", "layouts.py")),
    ]:
        parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
    digest = hashlib.sha256()
    for data in map(str.encode, parts):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
