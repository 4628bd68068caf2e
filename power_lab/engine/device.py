"""Which device an engine runs on where none is named."""

from __future__ import annotations

from pathlib import Path

from power_lab.engine.config import EngineConfig
from power_lab.kernels.ops import Ops

DRIVER = Path("/dev/nvidiactl")
LEAST = (9, 0)  # compute capability that the kernels are tested on


def choose(config: EngineConfig) -> tuple[str, str]:
    """("cpu" or "cuda", why). Without an NVIDIA driver torch is not imported."""
    if config.device != "auto":
        return config.device, "as asked"
    if config.mode != "exact":
        return "cpu", f"the CPU: mode {config.mode} has no GPU kernels"
    if not DRIVER.exists():
        return "cpu", "the CPU: this machine has no NVIDIA driver"
    import torch

    if not torch.cuda.is_available():
        return "cpu", f"the CPU: torch {torch.__version__} sees no GPU beside the NVIDIA driver"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < LEAST:
        told, least = (".".join(map(str, c)) for c in (capability, LEAST))
        return "cpu", f"the CPU: {name} has compute capability {told}, and the kernels are tested from {least} on"
    return "cuda", f"{name}, because it is there"


def stream_priority(ops: Ops) -> int | None:
    """Priority of the stream that steps run on, read back from the device; None on a CPU, which has no streams."""
    if not ops.compiles_for:
        return None
    import torch

    with ops.step():
        return torch.cuda.current_stream().priority
