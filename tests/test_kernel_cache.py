"""Compiled kernels as a file: what is carried, where it lands, and by which names."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import sysconfig
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import triton
from triton.runtime.cache import triton_key

from bench import kernel_cache
from bench.kernel_cache import Facts, Launchers


def test_tritons_own_name_is_computed_from_its_files() -> None:
    assert kernel_cache.triton_key(Path(triton.__file__).parent) == triton_key()


def test_facts_survive_their_file(tmp_path: Path) -> None:
    Facts.here().write(tmp_path / "facts")
    assert Facts.read(tmp_path / "facts") == Facts.here()


def test_a_machine_with_other_options_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"options: here .* there 'other'"):
        replace(Facts.here(), options="other").assume()
    with pytest.raises(SystemExit, match="environment"):
        replace(Facts.here(), environment={"DISABLE_LLVM_OPT": "1"}).assume()


def test_a_cache_keeps_what_a_load_reads_and_nothing_else(tmp_path: Path) -> None:
    kernel = tmp_path / "here" / "ABC"
    kernel.mkdir(parents=True)
    for name in ("f.cubin", "f.json", "f.ptx", "f.ttir"):
        (kernel / name).write_text(name)
    group = {name: str(kernel / name) for name in ("f.cubin", "f.json", "f.ptx", "f.ttir")}
    (kernel / "__grp__f.json").write_text(json.dumps({"child_paths": group}))
    assert kernel_cache.pack(tmp_path / "here", tmp_path / "file.tar.xz") == 3
    assert kernel_cache.unpack(tmp_path / "file.tar.xz", tmp_path / "there") == 3
    landed = tmp_path / "there" / "ABC"
    assert sorted(path.name for path in landed.iterdir()) == ["__grp__f.json", "f.cubin", "f.json"]
    assert (landed / "f.cubin").read_text() == "f.cubin"
    read = json.loads((landed / "__grp__f.json").read_text())["child_paths"]
    assert read == {name: str(landed / name) for name in ("f.cubin", "f.json")}


@pytest.mark.parametrize("name", ["../x", "a/../../x", "x", "a/b/c"])
def test_a_file_that_is_no_cache_is_refused(name: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "file.tar.xz", "w:xz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ValueError, match="is no file of a cache"):
        kernel_cache.unpack(tmp_path / "file.tar.xz", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_a_launcher_is_a_module_that_asks_for_the_driver(tmp_path: Path) -> None:
    code = """
    #include "cuda.h"
    #include <Python.h>
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "empty", NULL, -1, NULL};
    PyMODINIT_FUNC PyInit_empty(void) { cuInit(0); return PyModule_Create(&module); }
    """
    Launchers(Facts.here(), Path(sysconfig.get_path("include")), tmp_path).build("empty", code)
    (made,) = tmp_path.glob("*/*")
    assert made.name == f"empty{sysconfig.get_config_var('EXT_SUFFIX')}"
    load = f"import importlib.util as u; u.module_from_spec(u.spec_from_file_location('empty', {str(made)!r}))"
    said = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert said.returncode == 0 or "libcuda.so.1" in said.stderr, said.stderr
