"""Triton's cache of compiled kernels as one file that another machine reads: names as that machine makes them, and only what a load reads.

A folder's name in the cache is a hash over the kernel's source, arguments and options, over Triton's own files (`triton_key`), its
assembler's version and a few variables of the environment. `Facts` holds what of it belongs to a machine.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import pkgutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

READ = (".cubin", ".json", ".so")
"""Of the files of a compiled kernel: its code, what is said of it, and what launches it."""


@dataclass(frozen=True)
class Facts:
    """What a machine's Python and Triton add to the names in the cache.

    Attributes:
        triton: `triton_key()`; backend: the hash of the compiler's backend for sm_90; options: that of its options where none is given.
        environment: variables that decide about code.
        platform, suffix: of compiled Python modules.
    """

    triton: str
    backend: str
    options: str
    environment: dict[str, str]
    platform: str
    suffix: str

    @classmethod
    def here(cls) -> Facts:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
        from triton.runtime.build import platform_key
        from triton.runtime.cache import triton_key

        backend = make_backend(GPUTarget("cuda", 90, 32))
        return cls(
            triton=triton_key(),
            backend=str(backend.hash()),
            options=str(backend.parse_options({}).hash()),  # type: ignore[attr-defined]
            environment=dict(get_cache_invalidating_env_vars()),
            platform=platform_key(),
            suffix=str(sysconfig.get_config_var("EXT_SUFFIX")),
        )

    @classmethod
    def read(cls, path: Path) -> Facts:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def assume(self) -> None:
        """From here on this process names what it compiles as the other machine does. Raises SystemExit where its code would differ."""
        import triton.runtime.cache
        from triton.backends.nvidia.compiler import CUDABackend

        own = Facts.here()
        for name in ("options", "environment"):
            if getattr(own, name) != getattr(self, name):
                raise SystemExit(f"{name}: here {getattr(own, name)!r}, there {getattr(self, name)!r}")
        triton.runtime.cache.triton_key = lambda: self.triton
        CUDABackend.hash = lambda backend: self.backend  # type: ignore[method-assign]


def triton_key(package: Path) -> str:
    """What `triton.runtime.cache.triton_key()` is for a Triton that lies in this folder, of whatever Python."""
    code = [package / "runtime" / "cache.py"]
    for part in ("compiler", "backends"):
        code += _modules(package / part)
    code += [package / "_C" / "libtriton.so", *_modules(package / "language")]
    version = next(
        line.split("'")[1]
        for line in (package / "__init__.py").read_text().splitlines()
        if line.startswith("__version__")
    )
    return version + "-".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in code)


def _modules(folder: Path) -> list[Path]:
    """The modules below a folder, packages before what they hold."""
    found = []
    for module in pkgutil.iter_modules([str(folder)]):
        if module.ispkg:
            found += [folder / module.name / "__init__.py", *_modules(folder / module.name)]
        else:
            found.append(folder / f"{module.name}.py")
    return found


class Launchers:
    """Compiles the C code that launches kernels for another Python, without a GPU's driver.

    Args:
        facts: the other machine's. headers: folder of its Python's headers. cache: Triton's.
    """

    def __init__(self, facts: Facts, headers: Path, cache: Path) -> None:
        self._facts, self._headers, self._cache = facts, headers, cache

    def __call__(self, source: Any, metadata: Any) -> None:
        from triton.backends.nvidia.driver import make_launcher

        constants = {
            (source.fn.arg_names.index(i),) if isinstance(i, str) else i: v for i, v in source.constants.items()
        }
        code = make_launcher(constants, dict(source.signature), getattr(metadata, "tensordesc_meta", None))
        self.build("__triton_launcher", code)

    def utilities(self) -> None:
        """What Triton compiles before its first kernel."""
        from triton.backends.nvidia import driver

        self.build("cuda_utils", (Path(driver.__file__).parent / "driver.c").read_text())

    def build(self, name: str, code: str) -> None:
        from triton.backends.nvidia import driver

        key = hashlib.sha256((code + self._facts.platform).encode()).digest()
        made = self._cache / base64.b32encode(key).decode().rstrip("=") / f"{name}{self._facts.suffix}"
        if made.exists():
            return
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            here = Path(folder)
            (here / "empty.c").write_text("")
            (here / "main.c").write_text(code)
            stub = [
                here / "empty.c",
                "-Wl,-soname,libcuda.so.1",
                "-o",
                here / "libcuda.so.1",
            ]  # what is linked is there, not here
            subprocess.run(["gcc", "-shared", *stub], check=True)
            include = [f"-I{path}" for path in (*driver.include_dirs, self._headers)]
            link = [f"-L{here}", "-Wl,--no-as-needed", "-l:libcuda.so.1", "-Wno-psabi", "-o", here / "made.so"]
            subprocess.run(["gcc", here / "main.c", "-O3", "-shared", "-fPIC", *include, *link], check=True)
            (here / "made.so").replace(made)


def pack(cache: Path, file: Path) -> int:
    """Write what a load reads of a cache to a .tar.xz. Returns how many files those are."""
    count = 0
    with tarfile.open(file, "w:xz") as archive:
        for path in sorted(cache.glob("*/*")):
            if path.suffix not in READ or path.parent.name == "power-lab":
                continue
            data = path.read_bytes()
            if path.name.startswith("__grp__"):
                children = json.loads(data)["child_paths"]
                data = json.dumps({"child_paths": [name for name in children if Path(name).suffix in READ]}).encode()
            entry = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
            count += 1
    return count


def unpack(file: Path, cache: Path) -> int:
    """Add such a file to a cache. Returns how many files it holds. Raises ValueError for names that are none of a cache."""
    count = 0
    with tarfile.open(file) as archive:
        for entry in archive:
            parts = PurePosixPath(entry.name).parts
            data = archive.extractfile(entry)
            if len(parts) != 2 or ".." in parts or data is None:
                raise ValueError(f"{file}: {entry.name!r} is no file of a cache")
            path, content = cache.absolute() / entry.name, data.read()
            if path.name.startswith("__grp__"):
                places = {name: str(path.parent / name) for name in json.loads(content)["child_paths"]}
                content = json.dumps({"child_paths": places}).encode()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            count += 1
    return count


def default_cache() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, told in (
        ("facts", "write this machine's"),
        ("pack", "write Triton's cache"),
        ("unpack", "add to Triton's cache"),
    ):
        verbs.add_parser(verb, help=told).add_argument("file", type=Path)
    expected = verbs.choices["facts"]
    expected.add_argument(
        "--triton", type=Path, help="an unpacked package of another Python: what a machine with it is expected to say"
    )
    expected.add_argument("--python", default="312", help="that Python's version")
    args = parser.parse_args()
    if args.verb == "facts":
        facts = Facts.here()
        if args.triton:
            suffix = sysconfig.get_config_var("EXT_SUFFIX").replace(
                f"-{sys.version_info[0]}{sys.version_info[1]}-", f"-{args.python}-"
            )
            facts = replace(facts, triton=triton_key(args.triton), suffix=suffix)
        facts.write(args.file)
    else:
        count = pack(default_cache(), args.file) if args.verb == "pack" else unpack(args.file, default_cache())
        print(count, "files")


if __name__ == "__main__":
    main()
