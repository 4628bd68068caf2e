from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

import power_lab
from tests import hosting
from tests.jupyter.kernels import Kernel


@pytest.fixture
def home(tmp_path: Path) -> Iterator[hosting.Home]:
    with hosting.home(tmp_path / "h") as made:
        yield made


@pytest.fixture(scope="session")
def specs(tmp_path_factory: pytest.TempPathFactory) -> KernelSpecManager:
    """Our kernelspec as the wheel ships it, and a stock IPython one, in a folder of their own."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(Path(power_lab.__file__).parent / "jupyter" / "kernelspec", folder / "power_lab")
    stock = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "s",
        "language": "python",
    }
    (folder / "stock").mkdir()
    (folder / "stock" / "kernel.json").write_text(json.dumps(stock))
    return KernelSpecManager(kernel_dirs=[str(folder)], ensure_native_kernel=False)


@pytest.fixture
def start(home: hosting.Home, specs: KernelSpecManager, tmp_path: Path) -> Iterator[object]:
    """Start a kernel by name; all end with the test."""
    kernels: list[Kernel] = []

    def make(name: str = "power_lab", environment: dict[str, str] | None = None) -> Kernel:
        manager = KernelManager(kernel_name=name, kernel_spec_manager=specs)
        kernel = Kernel(manager, home, tmp_path, environment)
        kernels.append(kernel)
        return kernel

    yield make
    for kernel in kernels:
        kernel.close()


@pytest.fixture
def kernel(start) -> Kernel:
    """A Power Lab kernel whose `lab` is on this test's host with the fake engine."""
    made = start()
    made.use_fake()
    return made
