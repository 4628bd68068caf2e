"""Passages of freely licensed prose, for prompts that quote, summarise or ask about a text.

They lie beside this file, compressed, so that every machine has the same; `rebuild` cuts them anew out of the docstrings and manuals of
packages that are installed here. Sources and licences: `SOURCES`; notices: docs/training.md.
"""

from __future__ import annotations

import ast
import json
import lzma
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

FILE = Path(__file__).with_name("passages.json.xz")
SOURCES = {
    "pydoc_data": "PSF-2.0",
    "json": "PSF-2.0",
    "logging": "PSF-2.0",
    "asyncio": "PSF-2.0",
    "email": "PSF-2.0",
    "unittest": "PSF-2.0",
    "concurrent": "PSF-2.0",
    "importlib": "PSF-2.0",
    "argparse": "PSF-2.0",
    "random": "PSF-2.0",
    "statistics": "PSF-2.0",
    "typing": "PSF-2.0",
    "heapq": "PSF-2.0",
    "difflib": "PSF-2.0",
    "decimal": "PSF-2.0",
    "_pydecimal": "PSF-2.0",
    "datetime": "PSF-2.0",
    "numpy": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
    "transformers": "Apache-2.0",
}
"""package -> SPDX licence."""
SHORTEST, LONGEST = 180, 900  # characters
_EACH = 420  # passages of one package
_MARKUP = re.compile(r"``|:[a-z]+:`|>>>|\.\. |^\s*[-=~^]{3,}|https?://|[<>|{}\\]|`_|\w_\w|\*\*", re.M)


@dataclass(frozen=True, slots=True)
class Passage:
    """A paragraph. Attributes: source: the package; text."""

    source: str
    text: str


def passages() -> list[Passage]:
    """All of them, in the order of the file."""
    return [Passage(*entry) for entry in json.loads(lzma.decompress(FILE.read_bytes()))]


def rebuild(seed: int = 0) -> int:
    """Cut them anew out of what is installed here and write the file. Returns how many there are."""
    rng = random.Random(seed)
    found: list[tuple[str, str]] = []
    known: set[str] = set()
    for source in SOURCES:
        here = sorted(set(_prose(source)) - known)
        rng.shuffle(here)
        found += [(source, text) for text in here[:_EACH]]
        known.update(here)
    rng.shuffle(found)
    FILE.write_bytes(lzma.compress(json.dumps(found, ensure_ascii=True).encode(), preset=9 | lzma.PRESET_EXTREME))
    return len(found)


def _prose(package: str) -> Iterator[str]:
    """Paragraphs of a package's docstrings and long texts that read as prose."""
    spec = find_spec(package)
    if spec is None:
        return
    files = [Path(spec.origin)] if spec.origin and not spec.submodule_search_locations else []
    for folder in spec.submodule_search_locations or ():
        files += [path for path in sorted(Path(folder).rglob("*.py")) if "test" not in path.name]
    for path in files:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= SHORTEST:
                for paragraph in re.split(r"\n\s*\n", node.value):
                    text = " ".join(paragraph.split())
                    if _reads_as_prose(text):
                        yield text


def _reads_as_prose(text: str) -> bool:
    plain = sum(sign.isalpha() or sign in " ,.;:'\"()-" for sign in text)
    return (
        SHORTEST <= len(text) <= LONGEST
        and text.isascii()
        and text[0].isupper()
        and text[-1] in ".!?"
        and text.count(". ") >= 1
        and plain > 0.95 * len(text)
        and not _MARKUP.search(text)
    )
