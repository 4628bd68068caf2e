"""What the machine says of itself: memory, utilisation, and of a GPU temperature and power where a library for that is installed."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING

from power_lab.engine.vitals import DeviceVitals

if TYPE_CHECKING:
    import psutil


@dataclass(frozen=True, slots=True)
class Reading:
    """The device, and bytes of memory of this process."""

    device: DeviceVitals = field(default_factory=lambda: DeviceVitals(name="cpu"))
    resident: int = 0


class Gauges:
    """Reads them. Calls may block and are made one at a time, off the event loop and off the engines' threads."""

    def __init__(self) -> None:
        self._process: psutil.Process | None = None
        self._driver = find_spec("pynvml") is not None  # torch asks it for all but memory

    def read(self, cuda: bool) -> Reading:
        """cuda: whether an engine runs on a GPU; without one torch is not imported."""
        import psutil

        if self._process is None:
            self._process = psutil.Process()
            psutil.cpu_percent(None)  # counts from here
        resident = self._process.memory_info().rss
        if cuda:
            return Reading(self._gpu(), resident)
        memory = psutil.virtual_memory()
        used, busy = memory.total - memory.available, min(1.0, psutil.cpu_percent(None) / 100)
        return Reading(
            DeviceVitals(name="cpu", memory_used=used, memory_total=memory.total, utilisation=busy), resident
        )

    def _gpu(self) -> DeviceVitals:
        import torch

        free, total = torch.cuda.mem_get_info()
        utilisation = temperature = power = None
        if self._driver:
            try:
                utilisation = torch.cuda.utilization() / 100
                temperature = float(torch.cuda.temperature())
                power = torch.cuda.power_draw() / 1000  # milliwatts
            except Exception:  # noqa: BLE001  # whatever a driver without that raises: it is not asked again
                self._driver = False
        return DeviceVitals(
            name=torch.cuda.get_device_name(),
            memory_used=total - free,
            memory_total=total,
            utilisation=utilisation,
            temperature_c=temperature,
            power_w=power,
        )
