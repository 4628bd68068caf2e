"""Data for kernel tests."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from power_lab.engine.config import Paths
from power_lab.kernels import reference
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import BLOCK, Batch, KVCache, SampleRows, Weight
from power_lab.kernels.probe import random_blocks
from power_lab.kernels.quants import GEOMETRY, QuantType

CACHE = Paths.default().kernels
BLOCKS_OF_32 = ((96, 576), (37, 64), (1, 32), (130, 96))
BLOCKS_OF_256 = ((96, 768), (37, 256), (1, 512))
SHAPES = {  # real ones, edges of tiles and strips, and rows that are no whole number of vectors
    **{type: BLOCKS_OF_32 if values == 32 else BLOCKS_OF_256 for type, (values, _) in GEOMETRY.items()},
    QuantType.F32: ((70, 64), (5, 24), (2, 1)),
    QuantType.F16: ((70, 64), (5, 40), (33, 17)),
    QuantType.BF16: ((70, 64), (5, 24), (33, 31)),
}


@lru_cache(maxsize=1)
def two_threads() -> NumbaOps:
    return NumbaOps(CACHE, 2)


@lru_cache(maxsize=1)
def one_thread() -> NumbaOps:
    return NumbaOps(CACHE, 1)


@lru_cache(maxsize=128)
def weight(type: QuantType, rows: int, cols: int) -> tuple[Weight, torch.Tensor]:
    """A stored random matrix, and its values."""
    stored = random_blocks(type, rows, cols, np.random.default_rng(rows * 10007 + cols))
    return two_threads().weight(type, rows, cols, stored), reference.dequantize(type, stored, rows, cols)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def poison(*shape: int) -> np.ndarray:
    """An output in which a missed write shows."""
    return np.full(shape, np.nan, np.float32)


def poisoned_cache(ops: NumbaOps, pages: int, heads: int, head_dim: int) -> KVCache:
    cache = ops.kv_cache(pages, heads, head_dim)
    cache.keys[:], cache.values[:] = np.nan, np.nan
    return cache


def batch(positions: np.ndarray, tables: np.ndarray, table_of: np.ndarray | None = None) -> Batch:
    """Rows at these positions of the sequences that own the pages of `tables`."""
    rows = len(positions)
    table_of = np.zeros(rows, np.int32) if table_of is None else table_of.astype(np.int32)
    positions = positions.astype(np.int32)
    slots = tables[table_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    none = np.zeros(0, np.int32)
    return Batch(ids=none, positions=positions, slots=slots, table_of=table_of, tables=tables, sampled=none)


def sampling(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    seed: int = 7,
    first: int = 0,
    history: tuple[list[int], list[int]] = ([], []),
    bias: dict[int, float] | None = None,
) -> SampleRows:
    """The same controls for every row; positions count up from `first`. `history` is (before, generated)."""
    bias = bias or {}
    before, generated = history
    span = [0, len(before), len(before) + len(generated)]
    return SampleRows(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        min_p=np.full(rows, min_p, np.float32),
        repetition=np.full(rows, repetition, np.float32),
        presence=np.full(rows, presence, np.float32),
        seeds=np.full(rows, seed, np.uint64),
        positions=np.arange(first, first + rows, dtype=np.int64),
        history=np.array(before + generated, np.int32),
        history_span=np.tile(np.array(span, np.int64), (rows, 1)),
        bias_ids=np.array(list(bias), np.int32),
        bias_values=np.array(list(bias.values()), np.float32),
        bias_span=np.tile(np.array([0, len(bias)], np.int64), (rows, 1)),
    )
