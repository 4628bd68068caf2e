"""Whether a model fits this machine's memory now."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from power_lab.engine.config import CPU_KV_TOKENS
from power_lab.models.facts import Facts

Verdict = Literal["fits", "tight", "too large", "unknown"]

_EASY = 0.8  # of the free memory: the notebook and the kernels' workspace want some too


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a model would take, beside what is free.

    Attributes:
        weights: of all tensors; pool: of a KV pool of the default size; free: what this process can still get.
    """

    verdict: Verdict
    weights: int
    pool: int
    free: int


def fit_of(facts: Facts, free: int) -> Fit:
    """How the model would sit in `free` bytes."""
    weights = sum(facts.bytes_by_type.values())
    pool = CPU_KV_TOKENS * facts.kv_bytes
    need = weights + pool
    verdict: Verdict = "fits" if need <= _EASY * free else "tight" if need <= free else "too large"
    known = weights and not facts.problem
    return Fit(verdict=verdict if known else "unknown", weights=weights, pool=pool, free=free)


def free_memory() -> int:
    """Bytes that this process can still get, the container's limit minded."""
    import psutil

    free, limit = psutil.virtual_memory().available, container_limit()
    return free if limit is None else min(free, limit)


def machine_memory() -> int:
    """Bytes of memory that this machine has, or this container may use."""
    import psutil

    total, limit = psutil.virtual_memory().total, container_limit()
    return total if limit is None else min(total, limit)


def container_limit() -> int | None:
    """Memory limit of this container in bytes, if it has one."""
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
