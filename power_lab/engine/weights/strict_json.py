"""JSON out of files that nobody vouches for: strict where Python's parser is lax, and bounded before it runs."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

import numpy as np

from power_lab.errors import ModelFileError

MAX_DEPTH = 64
MAX_VALUES = 1 << 20  # of lists and objects together; headers of the largest models have some 200k
_REMEDY = "The file is damaged or not of a model; fetch it again."
_STRUCTURE = b'"[]{},'
_TEXT = bytes(set(range(256)) - set(_STRUCTURE))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The object that `data` holds, in UTF-8.

    Raises ModelFileError, which begins with `where`, for what is not JSON, for NaN and Infinity (also as 1e999), a key that comes
    twice, half a surrogate pair, nesting beyond MAX_DEPTH or more than MAX_VALUES values.
    """
    _refuse_bombs(data, where)

    def number(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else constant(text)

    def constant(text: str) -> NoReturn:
        raise ModelFileError(f"{where}: {text[:40]} is not a finite number.", _REMEDY)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise ModelFileError(f"{where}: key {twice!r} comes twice.", _REMEDY)
        return result

    try:
        value = json.loads(data.decode(), parse_float=number, parse_constant=constant, object_pairs_hook=unique)
        if rb"\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except ModelFileError:
        raise
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ModelFileError(f"{where}: is not UTF-8 text: {error.reason}.", _REMEDY) from None
    except ValueError as error:
        raise ModelFileError(f"{where}: is not JSON: {error}.", _REMEDY) from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where}: holds a JSON {type(value).__name__}; an object is expected.", _REMEDY)
    return value


def _refuse_bombs(data: bytes, where: str) -> None:
    """Counts brackets and commas outside strings: parsing takes time and memory by these."""
    if data.count(b'"') <= 4 * MAX_VALUES:
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _TEXT)
        outside = b"".join(bare.split(b'"')[::2])
        brackets = np.frombuffer(outside.translate(None, b","), np.uint8)
        opening = (brackets == ord("[")) | (brackets == ord("{"))
        if len(outside) <= 2 * MAX_VALUES:
            if len(brackets) and np.cumsum(np.where(opening, 1, -1)).max() > MAX_DEPTH:
                raise ModelFileError(f"{where}: is nested deeper than {MAX_DEPTH} levels.", _REMEDY)
            return
    raise ModelFileError(f"{where}: holds more than the {MAX_VALUES} values that such a file may have.", _REMEDY)
