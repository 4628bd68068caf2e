"""Which device it is and what it can do at best, measured: copy bandwidth and matrix rate; and the clock that its work is timed with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def card(device: str) -> str:
    """The device with what runs its kernels, for records."""
    if device == "cpu":
        return "cpu"
    import torch
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def seconds(device: str, work: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of `work` called back to back, on the device's own clock."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - start) / repeats
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a copy of 2 GiB (CPU: 256 MiB), best of 7."""
    import torch

    source = torch.ones(1 << (29 if device == "cuda" else 26), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(device, lambda: target.copy_(source), 1) for _ in range(8))


def matrix_rate(device: str) -> float:
    """Floating-point operations a second of torch's bf16 product of two random 8192 x 8192 matrices (CPU: 512), best of 7."""
    import torch

    size = 8192 if device == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / min(seconds(device, lambda: torch.matmul(a, b, out=out), 4) for _ in range(8))
