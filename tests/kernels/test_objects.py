"""Object code on disk: loaded when it is whole, made again when it is not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from power_lab.kernels.numba import objects, rows
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.quants import QuantType
from tests.kernels import data

TYPE = QuantType.Q4_0


def product(functions: rows.RowFunctions) -> bytes:
    """A product by the type's functions, called as the kernels call them."""
    stored = data.weight(TYPE, 37, 64)[0].data
    ops = NumbaOps(data.CACHE, 1)
    ops._row_functions[TYPE] = functions
    out = data.poison(3, 37)
    ops.linear(data.normal(3, 64), (ops.weight(TYPE, 37, 64, stored),), out)
    return out.tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows.RowFunctions(TYPE, tmp_path)
    return tmp_path


def test_code_is_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path.name for path in folder.iterdir()] == ["Q4_0.object"], "one whole file, no temporary one"
    want = product(rows.RowFunctions(TYPE, None))
    monkeypatch.setattr(objects, "compile_module", lambda *_: pytest.fail("compiled again"))
    again = rows.RowFunctions(TYPE, folder)
    assert (product(again), again.problem) == (want, "")


def checked(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: b"",
        lambda whole: whole[:-1],
        lambda whole: whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        lambda whole: checked(b"no object code"),
        lambda whole: checked(whole[objects.CHECK :][:200]),
    ],
    ids=["empty", "short", "a flipped bit", "text", "short but checked"],
)
def test_spoilt_files_are_made_again(folder: Path, spoil) -> None:
    path = folder / "Q4_0.object"
    whole, want = path.read_bytes(), product(rows.RowFunctions(TYPE, None))
    path.write_bytes(spoil(whole))
    assert product(rows.RowFunctions(TYPE, folder)) == want
    assert objects.read(path) == whole[objects.CHECK :]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    functions = rows.RowFunctions(TYPE, tmp_path / "absent")
    assert "Q4_0 cannot be kept" in functions.problem
    assert product(functions) == product(rows.RowFunctions(TYPE, None))


def test_types_are_prepared_once_and_named(tmp_path: Path) -> None:
    ops, seen = NumbaOps(data.CACHE, 1), []
    kinds = (QuantType.F16, QuantType.Q4_0, QuantType.F16)
    ops.prepare(kinds, lambda *step: seen.append(step))
    assert seen == [(1, 2, "F16 weights"), (2, 2, "Q4_0 weights")]
    ops.prepare(kinds, lambda *_: pytest.fail("prepared again"))
    assert ops._row_functions[QuantType.F16] is rows.functions(QuantType.F16, ops._cache), "shared by the process"
    other = NumbaOps(data.CACHE, 1)
    other.linear(data.normal(1, 64), (data.weight(TYPE, 37, 64)[0],), data.poison(1, 37))
    assert np.array_equal(other._row_functions[TYPE].table, ops._row_functions[TYPE].table)


FAR = """
import ctypes
from power_lab.kernels.numba import machine, objects
from power_lab.kernels.numba.rows import FORMATS, build, emitters
from power_lab.kernels.quants import QuantType

PAGE, FAR, NOTHING, MAPPED, FIXED = 4096, 3 << 30, 0, 0x4022, 0x100000
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
target, type = machine.host(), QuantType.Q2_K
code, names = objects.compile_module(build(type, target), target), list(emitters(FORMATS[type](target)))
for pages in (4096, 256, 16, 1):
    for _ in range(400):
        libc.mmap(None, pages * PAGE, NOTHING, MAPPED, -1, 0)
linked = []
for pages in range(3, 9):
    gaps = []
    for _ in range(4):
        gaps.append(libc.mmap(None, pages * PAGE, NOTHING, MAPPED, -1, 0))
        assert libc.mmap(gaps[-1] - FAR, FAR, NOTHING, MAPPED | FIXED, -1, 0) == gaps[-1] - FAR, ctypes.get_errno()
    for gap in gaps:
        libc.munmap(gap, pages * PAGE)
    linked.append(objects.Linked(type.name, code, names))
print(len(linked))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="address space is taken as Linux gives it")
def test_code_is_linked_where_only_small_gaps_of_the_address_space_are_near_each_other() -> None:
    """As in a process that a GPU's driver has mapped much into."""
    done = subprocess.run([sys.executable, "-c", FAR], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr[-2000:]
