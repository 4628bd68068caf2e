"""The device where none is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from power_lab.engine import device
from power_lab.engine.config import EngineConfig


def test_a_named_device_is_taken() -> None:
    assert device.choose(EngineConfig(device="cpu")) == ("cpu", "as asked")
    assert device.choose(EngineConfig(device="cuda")) == ("cuda", "as asked")


def test_without_a_driver_it_is_the_cpu_and_torch_is_not_imported(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from power_lab.engine import device
from power_lab.engine.config import EngineConfig
device.DRIVER = Path({str(tmp_path / "nothing")!r})
chosen, why = device.choose(EngineConfig())
assert chosen == "cpu" and "driver" in why, why
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


@pytest.mark.parametrize(
    ("there", "capability", "chosen", "why"),
    [(False, (9, 0), "cpu", "sees no GPU"), (True, (8, 6), "cpu", "8.6"), (True, (9, 0), "cuda", "A card")],
)
def test_with_a_driver_torch_decides(
    there: bool, capability: tuple[int, int], chosen: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(device, "DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    got, told = device.choose(EngineConfig())
    assert got == chosen and why in told


def test_the_fast_mode_has_no_gpu_kernels() -> None:
    chosen, why = device.choose(EngineConfig(mode="fast"))
    assert chosen == "cpu" and "fast" in why
