"""Which code is running: a digest over the package's own sources."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import metadata
from pathlib import Path

_PARTS, _FILES = ("engine", "kernels", "models"), ("__init__.py", "errors.py", "hashes.py")
_LIBRARIES = ("numpy", "numba", "llvmlite", "torch", "triton", "tokenizers", "jinja2", "msgspec", "blake3")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Hex SHA-256 over the sources that the engine host runs (relative name and contents, in order)."""
    package = Path(__file__).resolve().parents[1]
    hasher = hashlib.sha256(b"power-lab code v1\0")
    sources = [path for part in _PARTS for path in (package / part).rglob("*.py")]
    for path in sorted([*sources, *(package / name for name in _FILES)]):
        name, text = path.relative_to(package).as_posix().encode(), path.read_bytes()
        hasher.update(b"%d %s\0%d\0" % (len(name), name, len(text)))
        hasher.update(text)
    return hasher.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Power Lab and of the libraries that take part in an answer, without importing them."""
    found = {}
    for name in ("power-lab", *_LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
