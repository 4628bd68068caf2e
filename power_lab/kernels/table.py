"""Which operations run where: the one table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from power_lab.errors import ConfigError
from power_lab.kernels.ops import Ops


def _exact_cpu(threads: int, cache_dir: Path, priority: int) -> Ops:
    from power_lab.kernels.numba.ops import NumbaOps

    return NumbaOps(cache_dir, threads)


def _fast_cpu(threads: int, cache_dir: Path, priority: int) -> Ops:
    from power_lab.kernels.torch_fast import TorchFastOps

    return TorchFastOps(cache_dir, threads)


def _exact_cuda(threads: int, cache_dir: Path, priority: int) -> Ops:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("device", "torch sees no NVIDIA GPU on this machine.", "Use cpu, or see power-lab doctor.")
    from power_lab.kernels.triton.ops import TritonOps

    return TritonOps(priority=priority)


TABLE: dict[tuple[str, str], Callable[[int, Path, int], Ops]] = {
    ("cpu", "exact"): _exact_cpu,
    ("cpu", "fast"): _fast_cpu,
    ("cuda", "exact"): _exact_cuda,
}
"""(device, mode) -> maker. Makers import their library, so that naming a device loads nothing."""


def select(device: str, mode: str, threads: int, cache_dir: Path, priority: int = 0) -> Ops:
    """The operations for a device and mode.

    Args:
        device: "cpu" or "cuda".
        mode: "exact" (row invariant, the default everywhere) or "fast".
        threads: worker threads of CPU kernels, at least 1.
        cache_dir: folder for compiled kernels.
        priority: of a GPU's stream; negative is served first.

    Raises:
        ConfigError: naming `device`, `mode` or `threads`.
    """
    for key, value, known in (
        ("device", device, {d for d, _ in TABLE}),
        ("mode", mode, {m for d, m in TABLE if d == device}),
    ):
        if value not in known:
            raise ConfigError(key, f"{value!r} has no kernels.", f"Use one of {', '.join(sorted(known))}.")
    if threads < 1:
        raise ConfigError(
            "threads", f"{threads} is not a thread count.", "Use 1 or more; the number of cores is a good start."
        )
    return TABLE[device, mode](threads, cache_dir, priority)
