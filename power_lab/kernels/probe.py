"""The row-invariance probe: does this machine's arithmetic keep the promise, on the shapes of the model at hand?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from power_lab.errors import ExactnessError
from power_lab.kernels.ops import BLOCK, SPLIT, Activation, Array, Batch, Ops, Weight
from power_lab.kernels.quants import GEOMETRY, QuantType, row_bytes

ROWS = (1, 2, 3, 5, 8, 9, 33)
"""Row counts on both sides of every change of tile."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """One kind of attention; attributes as in `Ops.attention`. qk_norm: values of a query and of a key norm, 0 for none."""

    q_heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    softcap: float = 0.0
    qk_norm: tuple[int, int] = (0, 0)


LinearShape = tuple[QuantType, int, int]
"""Type, N and K of a matrix."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a model computes with.

    Attributes:
        linears: of its matrices.
        attentions: the kinds of its layers.
        activations: of its gates.
        gates: those of `linears` that are gates; None: any may be.
        operand: `Weight.operand` of the matrices.
    """

    linears: frozenset[LinearShape]
    attentions: frozenset[AttentionShape]
    activations: frozenset[Activation] = frozenset({"silu"})
    gates: frozenset[LinearShape] | None = None
    operand: str = ""


Weigh = Callable[[Ops, QuantType, int, int, np.random.Generator, str], Weight]
"""Makes a weight of a type, N and K, and for an operand."""


def probe(ops: Ops, shapes: Shapes, weigh: Weigh | None = None) -> None:
    """Compare rows computed alone with the same rows computed together, bit by bit, on random data.

    weigh: makes the weights; None is `random_weight`.

    Raises ExactnessError naming the first kernel and shape that differ. Takes well under a second for small models.
    """
    rng = np.random.default_rng(0)
    widths = {cols for _, _, cols in shapes.linears}
    for shape in sorted(shapes.linears):
        weight = (weigh or random_weight)(ops, *shape, rng, shapes.operand)
        gates = shapes.gates is None or shape in shapes.gates
        _probe_linear(ops, weight, sorted(shapes.activations) if gates else [], shape[1] in widths, rng)
    for width in sorted(widths):
        _probe_norm(ops, width, rng)
    for shape in sorted(shapes.attentions):
        _probe_attention(ops, shape, rng)


def random_weight(
    ops: Ops, type: QuantType, rows: int, cols: int, rng: np.random.Generator, operand: str = ""
) -> Weight:
    """A weight of random stored values of ordinary size."""
    return ops.weight(type, rows, cols, random_blocks(type, rows, cols, rng), operand)


def random_blocks(type: QuantType, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, bytes per row]: any codes, and scales that make values of ordinary size."""
    if type in (QuantType.F32, QuantType.F16, QuantType.BF16):
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        if type == QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if type == QuantType.F16 else np.float32).view(np.uint8)
    size, pitch = GEOMETRY[type][1], row_bytes(type, cols)
    blocks = rng.integers(0, 256, (rows * pitch // size, size), dtype=np.uint8)
    if type == QuantType.MXFP4:
        blocks[:, 0] = rng.integers(118, 126, len(blocks))
    else:
        largest, places = _SCALES[type]
        for at in places:
            scales = rng.uniform(-2.0 / largest, 2.0 / largest, len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, pitch)


_SCALES: dict[QuantType, tuple[int, tuple[int, ...]]] = {
    QuantType.Q4_0: (8, (0,)),
    QuantType.Q4_1: (15, (0, 2)),
    QuantType.Q5_0: (16, (0,)),
    QuantType.Q5_1: (31, (0, 2)),
    QuantType.Q8_0: (128, (0,)),
    QuantType.Q2_K: (15 * 3, (80, 82)),
    QuantType.Q3_K: (32 * 4, (108,)),
    QuantType.Q4_K: (63 * 15, (0, 2)),
    QuantType.Q5_K: (63 * 31, (0, 2)),
    QuantType.Q6_K: (128 * 32, (208,)),
    QuantType.IQ4_NL: (127, (0,)),
    QuantType.IQ4_XS: (32 * 127, (0,)),
}
"""type -> (largest number that a block's scale multiplies, byte offsets of its f16 scales)."""


def _check(kernel: str, count: int, together: np.ndarray, alone: Iterable[tuple[int, np.ndarray]]) -> None:
    for row, bits in alone:
        if together[row].tobytes() != bits.tobytes():
            raise ExactnessError(
                f"{kernel}: row {row} computed alone differs from the same row among {count}.",
                'Exact mode is refused on this machine; use mode="fast" or report the machine and this message.',
            )


def _probe_linear(
    ops: Ops, weight: Weight, activations: list[Activation], normed: bool, rng: np.random.Generator
) -> None:
    """normed: a norm reads the result, and adds up what the product leaves to it."""
    type, rows, cols = weight.type, weight.rows, weight.cols
    x = rng.standard_normal((max(ROWS), cols), dtype=np.float32)

    def linear(first: int, last: int) -> np.ndarray:
        out = ops.empty((last - first, rows), "float32")
        ops.linear(ops.asarray(x[first:last]), (weight,), out)
        return ops.tohost(out)

    def gate_up(first: int, last: int, activation: Activation) -> np.ndarray:
        out = ops.empty((last - first, rows), "float32")
        ops.gate_up(ops.asarray(x[first:last]), weight, weight, out, activation)
        return ops.tohost(out)

    def added(first: int, last: int) -> np.ndarray:
        hidden = ops.asarray(np.zeros((last - first, rows), np.float32))
        delta, out = (ops.empty((last - first, rows), "float32") for _ in range(2))
        left = ops.parts(delta)
        ops.linear(ops.asarray(x[first:last]), (weight,), left)
        ops.add_rms_norm(hidden, left, None, ones, 1e-5, out)
        return np.concatenate([ops.tohost(hidden), ops.tohost(out)], axis=1)

    ones = ops.asarray(np.ones(rows, np.float32))
    reader = [("linear and norm", added)] if normed else []
    gates = [(f"gate_up {name}", partial(gate_up, activation=name)) for name in activations]
    for name, kernel in (("linear", linear), *reader, *gates):
        alone = [(r, kernel(r, r + 1)[0]) for r in (0, 1, 7, 32)]
        for count in ROWS:
            _check(f"{name} {type.name} [{rows}, {cols}]", count, kernel(0, count), [a for a in alone if a[0] < count])


def _probe_norm(ops: Ops, width: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((max(ROWS), width), dtype=np.float32)
    weight = ops.asarray(np.ones(width, np.float32))

    def norm(first: int, last: int) -> np.ndarray:
        out = ops.empty((last - first, width), "float32")
        ops.rms_norm(ops.asarray(x[first:last]), weight, 1e-5, out)
        return ops.tohost(out)

    _check(f"rms_norm [{width}]", len(x), norm(0, len(x)), [(r, norm(r, r + 1)[0]) for r in (0, 17, 32)])


def _probe_attention(ops: Ops, shape: AttentionShape, rng: np.random.Generator) -> None:
    tokens = SPLIT + BLOCK + 3
    pages = -(-tokens // BLOCK)
    heads, kv_heads, dim = shape.q_heads, shape.kv_heads, shape.head_dim
    cache = ops.kv_cache(pages + 1, kv_heads, dim)
    rope = ops.rope_tables(tokens, [10000.0 ** (-2 * i / dim) for i in range(dim // 2)], 1.0)
    qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim), dtype=np.float32)
    sizes = shape.qk_norm
    norms = tuple(ops.asarray(np.ones(size, np.float32)) for size in sizes) if sizes[0] else None
    window = min(shape.window, tokens - BLOCK // 2)  # so that it cuts something off

    def attention(first: int, last: int) -> np.ndarray:
        batch = _batch(ops, first, last, pages)
        batch = ops.group(batch, [(heads, kv_heads, dim)], ops.empty((last - first + 1,), "int32"))
        rows, out = ops.asarray(qkv[first:last].copy()), ops.empty((last - first, heads * dim), "float32")
        ops.rope_write(rows, batch, rope, False, heads, cache, norms, 1e-5)  # type: ignore[arg-type]
        ops.attention(rows, batch, heads, dim**-0.5, cache, out, window, shape.softcap)
        return ops.tohost(out)

    together = attention(0, tokens)
    alone = [(r, attention(r, r + 1)[0]) for r in (0, BLOCK - 1, BLOCK, SPLIT - 1, SPLIT, tokens - 1)]
    _check(f"attention {heads}/{kv_heads} heads of {dim}", tokens, together, alone)


def _batch(ops: Ops, first: int, last: int, pages: int) -> Batch:
    """Rows first..last - 1 of one sequence that owns pages 1, 2, ..."""
    positions = np.arange(first, last)
    none: Array = ops.asarray(np.zeros(0, np.int32))
    return Batch(
        ids=none,
        positions=ops.asarray(positions.astype(np.int32)),
        slots=ops.asarray(positions.astype(np.int64) + BLOCK),
        table_of=ops.asarray(np.zeros(last - first, np.int32)),
        tables=ops.asarray(np.arange(1, pages + 1, dtype=np.int32)[None]),
        sampled=none,
    )
