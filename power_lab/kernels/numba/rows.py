"""The compiled functions that read rows of one storage type, and the table of their addresses that `linear` and `embed` call through.

A type is compiled when a model needs it: sixteen types in one function would take long to compile and serve nobody.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import types

from power_lab.kernels.numba import machine, objects
from power_lab.kernels.numba import vector as v
from power_lab.kernels.numba.formats import FORMATS
from power_lab.kernels.numba.formats.base import Format
from power_lab.kernels.numba.tiles import Tile, Unpack
from power_lab.kernels.quants import QuantType

DIRECT_ROWS = 8  # activation rows that tiles of stored values take at most
PANEL_ROWS = 4  # weight rows that are interleaved in a panel
ROW, PANELS, WORDS = 0, DIRECT_ROWS + 1, DIRECT_ROWS + 2
"""Words of a table: `ROW` unpacks one row, 1..`DIRECT_ROWS` is the tile for so many activation rows, `PANELS` unpacks many rows."""

call_tile = v.routine("call_tile", types.void, [types.int64] * (1 + Tile.arguments), v.call_at)
call_unpack = v.routine("call_unpack", types.void, [types.int64] * (1 + Unpack.arguments), v.call_at)


def emitters(format: Format) -> dict[str, Tile | Unpack]:
    """Functions of a type, by name."""
    tiles = {f"tile_{rows}": Tile(format, rows, cols) for rows, cols in ((1, 4), (2, 4), (4, 4), (8, 2))}
    return {"row": Unpack(format, 1), "panels": Unpack(format, PANEL_ROWS), **tiles}


def build(type: QuantType, target: machine.Machine) -> ir.Module:
    """The module of a type's functions."""
    module = ir.Module(type.name)
    module.triple = target.triple
    for name, emitter in emitters(FORMATS[type](target)).items():
        v.define(module, name, [v.I64] * emitter.arguments, ir.VoidType(), emitter.emit)
    return module


class RowFunctions:
    """A type's functions in this process.

    Attributes:
        table: int64 [WORDS], addresses.
        problem: why the code could not be kept on disk; empty if it was, or was not to be.
    """

    def __init__(self, type: QuantType, folder: Path | None) -> None:
        self.problem = ""
        path = folder / f"{type.name}.object" if folder is not None else None
        names = list(emitters(FORMATS[type](machine.host())))
        self._linked = _from_file(type, path, names) or self._compiled(type, path, names)
        self.table = np.zeros(WORDS, np.int64)
        for name in names:
            address = self._linked.address(name)
            if name.startswith("tile_"):
                rows = int(name.removeprefix("tile_"))
                self.table[rows // 2 + 1 : rows + 1] = address
            else:
                self.table[ROW if name == "row" else PANELS] = address

    def _compiled(self, type: QuantType, path: Path | None, names: list[str]) -> objects.Linked:
        target = machine.host()
        code = objects.compile_module(build(type, target), target)
        if path is not None:
            try:
                objects.write(path, code)
            except OSError as error:
                self.problem = f"the kernels of {type.name} cannot be kept in {path}: {error}"
        return objects.Linked(type.name, code, names)


def _from_file(type: QuantType, path: Path | None, names: list[str]) -> objects.Linked | None:
    code = objects.read(path) if path is not None else None
    try:
        return None if code is None else objects.Linked(type.name, code, names)
    except RuntimeError:  # whole, but not what this LLVM links
        return None


@cache
def functions(type: QuantType, folder: Path | None) -> RowFunctions:
    """The functions of a type, from the cache in `folder` where there is one; made once a process."""
    return RowFunctions(type, folder)
