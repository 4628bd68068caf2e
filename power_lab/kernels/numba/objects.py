"""Object code of whole LLVM modules: compiled, kept in a file, linked into the process.

Numba compiles and caches functions that it has typed; code that is written as LLVM IR from end to end needs neither, and takes a
fraction of the time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from power_lab.kernels.numba.machine import Machine

CHECK = 32  # bytes of the SHA-256 that a file starts with


def compile_module(module: ir.Module, machine: Machine) -> bytes:
    """Object code of a module for a machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(machine.triple).create_target_machine(
        cpu=machine.cpu, features=machine.features, opt=3, reloc="pic", codemodel="default"
    )
    parsed = llvm.parse_assembly(str(module), llvm.create_context())
    parsed.data_layout = str(target.target_data)
    parsed.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    # Loops are as wide and as long as they should be.
    tuning.loop_unrolling = tuning.loop_vectorization = tuning.slp_vectorization = False
    passes = llvm.create_pass_builder(target, tuning)
    passes.getModulePassManager().run(parsed, passes)
    return target.emit_object(parsed)


class Linked:
    """Object code in the process, for as long as this lives.

    Raises RuntimeError if LLVM cannot link it.
    """

    def __init__(self, name: str, code: bytes, functions: Iterable[str]) -> None:
        # JITLink puts code and constants into one piece of memory. LLVM's older linker takes what is free for each: where a GPU's driver
        # has left small gaps alone, they come to lie beyond what an instruction reaches, and the process is aborted.
        self._linker = llvm.create_lljit_compiler(use_jit_link=True)
        library = llvm.JITLibraryBuilder().add_object_img(code)
        for function in functions:
            library.export_symbol(function)
        self._library: Any = library.link(self._linker, name)

    def address(self, function: str) -> int:
        return self._library[function]


def read(path: Path) -> bytes | None:
    """The code in a file, or None if there is none or it is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code = data[CHECK:]
    return code if code and hashlib.sha256(code).digest() == data[:CHECK] else None


def write(path: Path, code: bytes) -> None:
    """Keep code in a file, which appears whole or not at all. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink()
        raise
