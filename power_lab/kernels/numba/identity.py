"""What decides the bits of these kernels, as one digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import llvmlite
import numba

from power_lab.kernels.numba import attention, conv, linear, machine, norm, rope, tiles

DOMAIN = b"power-lab/arithmetic/numba/1"


def instruction_path() -> str:
    """Target triple, processor name and features that Numba compiles for."""
    host = machine.host()
    return f"{host.triple}|{host.cpu}|{host.features}"


def sources() -> list[Path]:
    """Every file whose text can change a kernel."""
    here = Path(__file__).parent
    return sorted(here.rglob("*.py")) + [
        here.parent / name for name in ("ops.py", "quants.py", "layouts.py", "positions.py")
    ]


def digest() -> str:
    """Hex SHA-256 over instruction path, compiler versions, reduction plans and kernel sources. Threads do not change bits: not in it."""
    h = hashlib.sha256(DOMAIN)
    parts = [
        instruction_path(),
        numba.__version__,
        llvmlite.__version__,
        tiles.PLAN,
        linear.PLAN,
        norm.PLAN,
        rope.PLAN,
        attention.PLAN,
        conv.PLAN,
    ]
    for path in sources():
        parts += [path.relative_to(Path(__file__).parents[1]).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()]
    for part in parts:
        data = part.encode()
        h.update(len(data).to_bytes(8, "little") + data)
    return h.hexdigest()
