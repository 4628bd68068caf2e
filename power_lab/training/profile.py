"""Where a training step's time goes: milliseconds per phase, launches and the operators that take longest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from power_lab.training.train import Trainer

_WARM = 5
"""Steps before anything is measured: kernels are loaded, memory is taken."""
_TRACED = 3
"""Steps under the profiler, which costs time and memory for every operator."""


def report(trainer: Trainer, steps: int, top: int = 20) -> str:
    """Run 3 * `steps` steps and a few more; says how long they take as they are, unrecorded, by phase and by operator.

    Phases wait for the device on both sides, so together they may take longer than a step does. All texts have one length, so that few
    steps are spent on recording.
    """
    texts = next(trainer.texts())

    def run(count: int) -> float:
        """Milliseconds a step."""
        start = time.perf_counter()
        for _ in range(count):
            trainer.train(texts, 0.0)
        _wait(trainer)
        return (time.perf_counter() - start) * 1000 / count

    run(_WARM)
    lines = [f"texts {list(texts.tokens.shape)}, {trainer.recipe.rows} rows of {trainer.recipe.drafts} logits a kind"]
    lines.append(f"{run(steps):8.2f} ms a step as it is (recorded: {trainer.graphs.enabled}; {steps} steps)")
    trainer.graphs.enabled = False
    run(2)
    lines.append(f"{run(steps):8.2f} ms a step unrecorded")
    clock = _Clock(trainer)
    trainer.phase = clock.phase
    try:
        lines.append(f"{run(steps):8.2f} ms a step with a wait between phases:")
    finally:
        trainer.phase = nullcontext
    lines += [f"  {1000 * seconds / steps:8.2f} ms {name}" for name, seconds in clock.seconds.items()]
    if trainer.target.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        lines.append(f"{peak:8.2f} GiB at most")
    lines += _operators(trainer, run, top)
    return "\n".join(lines)


class _Clock:
    """Seconds of each phase, the device's work included."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        _wait(self._trainer)
        start = time.perf_counter()
        yield
        _wait(self._trainer)
        self.seconds[name] += time.perf_counter() - start


def _operators(trainer: Trainer, run: Callable[[int], float], top: int) -> list[str]:
    cuda = trainer.target.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as traced:
        run(_TRACED)
    averages = traced.key_averages()
    launches = sum(
        entry.count for entry in averages if entry.key in ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC")
    )
    calls = sum(entry.count for entry in averages if entry.key.startswith("aten::"))
    table = averages.table(
        sort_by="self_device_time_total" if cuda else "self_cpu_time_total", row_limit=top, max_name_column_width=60
    )
    return [f"{calls / _TRACED:8.0f} operators and {launches / _TRACED:.0f} launches a step", table]


def _wait(trainer: Trainer) -> None:
    if trainer.target.device.type == "cuda":
        torch.cuda.synchronize()
