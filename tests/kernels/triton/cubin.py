"""What a compiled kernel needs of a multiprocessor, read without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends import nvidia
from triton.compiler import CompiledKernel


def resources(kernel: CompiledKernel) -> tuple[int, int, int]:
    """(shared bytes, registers, stack bytes)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return kernel.metadata.shared, int(found[1]), int(found[2])
