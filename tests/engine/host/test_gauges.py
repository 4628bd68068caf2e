"""What the machine says of itself."""

from __future__ import annotations

import subprocess
import sys

import psutil

from power_lab.engine.host.gauges import Gauges


def test_a_machine_without_a_gpu_tells_memory_and_load() -> None:
    gauges = Gauges()
    for _ in range(2):
        reading = gauges.read(cuda=False)
        device = reading.device
        assert device.name == "cpu" and device.memory_total == psutil.virtual_memory().total
        assert device.memory_used is not None and 0 < device.memory_used < device.memory_total
        assert device.utilisation is not None and 0 <= device.utilisation <= 1
        assert (device.temperature_c, device.power_w) == (None, None)
        assert reading.resident > 1 << 20


def test_torch_is_not_imported_for_it() -> None:
    code = (
        "import sys; from power_lab.engine.host.pulse import Pulse; from power_lab.engine.host.gauges import Gauges;"
        "Gauges().read(False); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
