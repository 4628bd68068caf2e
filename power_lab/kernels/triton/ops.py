"""`TritonOps`: the operations on torch tensors of an NVIDIA GPU, exact."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import triton

from power_lab.errors import ModelFileError
from power_lab.kernels.ops import Activation, Array, Batch, Graph, KVCache, Progress, SampleRows, Weight
from power_lab.kernels.positions import rope_table
from power_lab.kernels.quants import QuantType
from power_lab.kernels.triton import attention, embed, linear, logprobs, norm, planes, rope, sample

DOMAIN = "power-lab/arithmetic/triton/1"


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A CUDA graph. nbytes: device memory that was reserved while it was captured."""

    graph: torch.cuda.CUDAGraph
    nbytes: int


class TritonOps:
    """Exact operations on one GPU, on torch's current stream. One engine thread uses an instance.

    Args:
        device: a CUDA device in torch's words.
    """

    name = "triton"
    mode = "exact"
    activation = "bfloat16"
    kv_dtype = "bfloat16"

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self._products = linear.Workspace.on(self.device)
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._retired: list[torch.Tensor] = []  # scratch that captured graphs may still name
        self._sampling: sample.Scratch | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._digest = _digest(self.device)

    def digest(self) -> str:
        return self._digest

    def reasons(self) -> tuple[str, ...]:
        return (f"Triton {triton.__version__} on {torch.cuda.get_device_name(self.device)}",)

    @property
    def nbytes(self) -> int:
        sampling = 0 if self._sampling is None else self._sampling.nbytes
        return self._products.nbytes + sum(part.nbytes for part in (self._scratch, *self._retired)) + sampling

    def warm_up(self, progress: Progress | None = None) -> None:
        """Kernels are compiled at their first launch, by Triton, which keeps them on disk."""

    def prepare(self, types: Iterable[QuantType], progress: Progress | None = None) -> None:
        """As `warm_up`."""

    def close(self) -> None:
        """Give scratch back."""
        self._retired.clear()
        self._scratch = torch.empty(0, dtype=torch.float32, device=self.device)
        self._sampling = None

    # --- arrays -------------------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def asarray(self, host: np.ndarray) -> Array:
        return torch.from_numpy(np.array(host)).to(self.device)

    def tohost(self, array: Array) -> np.ndarray:
        return (array.float() if array.dtype == torch.bfloat16 else array).cpu().numpy()

    def upload(self, host: np.ndarray, out: Array) -> None:
        out.copy_(torch.from_numpy(np.ascontiguousarray(host)))

    def weight(self, type: QuantType, rows: int, cols: int, host: np.ndarray) -> Weight:
        """The matrix as planes on the device; plain values are rounded to bf16."""
        try:
            type = QuantType(type)
            parts = planes.repack(type, rows, cols, host)
        except ValueError as error:
            message = f"Weights of type {type!r} and shape [{rows}, {cols}] cannot be computed on: {error}."
            raise ModelFileError(message) from error
        tensors = {name: torch.from_numpy(np.ascontiguousarray(part)).to(self.device) for name, part in parts.items()}
        if "values" in tensors:
            values = tensors["values"]
            tensors["values"] = values.view(torch.bfloat16) if type == QuantType.BF16 else values.to(torch.bfloat16)
        return Weight(type, rows, cols, planes.DeviceWeight(type, rows, cols, tensors))

    def vector(self, type: QuantType, host: np.ndarray) -> Array:
        """Norms and biases keep every bit: they are read as f32."""
        if type == QuantType.BF16:
            return self.asarray((np.asarray(host).view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32))
        if type not in (QuantType.F32, QuantType.F16):
            raise ModelFileError(f"A vector stored as {type.name} cannot be computed on.")
        return self.asarray(np.asarray(host).astype(np.float32))

    def kv_cache(self, pages: int, heads: int, head_dim: int) -> KVCache:
        keys, values = rope.kv_cache(pages, heads, head_dim, self.device)
        return KVCache(keys, values, heads, head_dim)

    def rope_tables(self, positions: int, frequencies: Sequence[float], magnitude: float) -> Array:
        return self.asarray(rope_table(positions, frequencies, magnitude))

    # --- operations of a step -----------------------------------------------------------------------------------------------------

    def embed(self, table: Weight, ids: Array, out: Array, scale: float = 1.0) -> None:
        embed.embed(table.data, ids, out, scale)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        norm.norm(x, None, None, weight, eps, out)

    def add_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        norm.norm(x, delta, post, weight, eps, out)

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array, bias: Array | None = None) -> None:
        linear.linear(_narrow(x), tuple(w.data for w in weights), out, self._products, bias)

    def gate_up(self, x: Array, gate: Weight, up: Weight, out: Array, activation: Activation = "silu") -> None:
        linear.gate_up(_narrow(x), gate.data, up.data, out, self._products, activation)

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
    ) -> None:
        pages = batch.tables.shape[1]
        self._reserve(attention.scratch_floats(qkv.shape[0], q_heads, cache.heads, cache.head_dim, pages))
        attention.attention(
            qkv, batch, q_heads, scale, cache.keys, cache.values, out, window, softcap, temperature, self._scratch
        )

    def softcap(self, x: Array, cap: float) -> None:
        norm.softcap(x, cap)

    def gather(self, x: Array, rows: Array, out: Array) -> None:
        embed.gather(x, rows, out)

    def sample(self, logits: Array, rows: SampleRows, tokens: Array) -> None:
        count, vocabulary = logits.shape
        if self._sampling is None or self._sampling.z.shape[0] < count or self._sampling.z.shape[1] != vocabulary:
            self._sampling = sample.Scratch.allocate(max(16, triton.next_power_of_2(count)), vocabulary, self.device)
        values = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.repetition, rows.presence)
        controls = sample.Controls(
            values=self.asarray(np.stack(values, axis=1, dtype=np.float32, casting="unsafe")),
            keys=self.asarray(np.stack([rows.seeds.view(np.int64), rows.positions], axis=1)),
            spans=self.asarray(np.concatenate([rows.history_span, rows.bias_span], axis=1)),
            history=self._list(rows.history),
            bias_ids=self._list(rows.bias_ids),
            bias_values=self._list(rows.bias_values),
        )
        sample.sample(logits, controls, tokens, self._sampling)

    def logprobs(self, logits: Array, tokens: Array, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        chosen, ids, values = logprobs.logprobs(logits, tokens, min(top, logits.shape[1]))
        return self.tohost(chosen), self.tohost(ids), self.tohost(values)

    # --- graphs -------------------------------------------------------------------------------------------------------------------

    def capture(self, forward: Callable[[], Array]) -> tuple[Graph, Array] | None:
        """Capture a CUDA graph of `forward`, which runs once beforehand, so that its kernels are compiled and its scratch is there."""
        forward()
        torch.cuda.synchronize(self.device)
        before, graph = torch.cuda.memory_reserved(self.device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = forward()
        return Captured(graph, torch.cuda.memory_reserved(self.device) - before), result

    def replay(self, graph: Graph) -> None:
        assert isinstance(graph, Captured)
        graph.graph.replay()

    def _reserve(self, floats: int) -> None:
        if floats > self._scratch.numel():
            self._retired.append(self._scratch)
            self._scratch = torch.empty(triton.next_power_of_2(floats), dtype=torch.float32, device=self.device)

    def _list(self, host: np.ndarray) -> Array:
        """A list on the device; one value where it is empty, since a kernel's pointer must lead somewhere."""
        return self.asarray(host if len(host) else np.zeros(1, host.dtype))


def _narrow(x: Array) -> Array:
    """What linears read. Models without a norm before a part hand on the residual stream itself."""
    return x.to(torch.bfloat16) if x.dtype == torch.float32 else x


_write = rope.rope_write


def _digest(device: torch.device) -> str:
    """Hex SHA-256 over architecture, compiler versions, reduction plans and kernel sources."""
    folder = Path(__file__).parent
    parts = [
        DOMAIN,
        "sm_" + "".join(map(str, torch.cuda.get_device_capability(device))),
        torch.__version__,
        triton.__version__,
        *(module.PLAN for module in (attention, embed, linear, norm, rope, sample)),
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
