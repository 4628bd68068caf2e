"""Canonical JSON: one byte sequence for one value, so that a digest over it means something.

The rules are those of RFC 8785 (JSON Canonicalization Scheme), so any JCS library in any language gets the same bytes:
UTF-8, no whitespace, object keys sorted by UTF-16 code units, strings with the shortest escapes, numbers as ECMAScript prints
them. What JSON cannot carry exactly is refused and never rounded: NaN, infinities, integers beyond 2^53-1 (write those as
decimal strings), lone surrogates, keys that are not strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from hashlib import sha256
from typing import Any, NoReturn

from power_lab.errors import EvidenceError

SAFE_INTEGER = (1 << 53) - 1
_DEEPEST = 32


def canonical(value: Any, field: str = "value") -> bytes:
    """The canonical bytes of a JSON value. Raises EvidenceError naming the dotted field that cannot be represented."""
    try:
        return _encode(value, field, 0).encode("utf-8")
    except UnicodeEncodeError:
        raise EvidenceError(field, "text holds a lone surrogate, which is not valid Unicode") from None


def parse(text: str | bytes) -> Any:
    """Read JSON strictly. Raises EvidenceError for malformed text, a key given twice, NaN and numbers that no double holds."""
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_double, parse_int=_integer
        )
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EvidenceError("json", f"not readable as JSON: {error}") from None


def digest(tag: str, data: bytes) -> str:
    """SHA-256 in hex over `power-lab/<tag>`, a zero byte and the data; the tag keeps digests of different things apart."""
    return sha256(f"power-lab/{tag}".encode() + b"\0" + data).hexdigest()


def token_digest(tag: str, tokens: Iterable[int]) -> str:
    """Domain-tagged SHA-256 over token ids as little-endian unsigned 32-bit integers."""
    return digest(tag, b"".join(token.to_bytes(4, "little") for token in tokens))


def _encode(value: Any, field: str, depth: int) -> str:
    if depth > _DEEPEST:
        raise EvidenceError(field, f"nested deeper than {_DEEPEST} levels")
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > SAFE_INTEGER:
            raise EvidenceError(field, f"{value} is beyond 2^53-1", "Write it as a decimal string.")
        return str(value)
    if isinstance(value, float):
        return _number(value, field)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_encode(item, f"{field}[{index}]", depth + 1) for index, item in enumerate(value)) + "]"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise EvidenceError(field, f"key {key!r} is not a string")
        keys = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        pairs = (
            f"{json.dumps(key, ensure_ascii=False)}:{_encode(value[key], f'{field}.{key}', depth + 1)}" for key in keys
        )
        return "{" + ",".join(pairs) + "}"
    raise EvidenceError(field, f"a {type(value).__name__} has no JSON form")


def _number(value: float, field: str) -> str:
    """ECMAScript's Number::toString. Python's repr has the same shortest digits, only its layout differs."""
    if not math.isfinite(value):
        raise EvidenceError(field, f"{value} is not a finite number")
    if value == 0:
        return "0"  # ECMAScript prints -0 as 0
    sign, parts, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)  # a finite Decimal; the other cases are strings
    digits = "".join(map(str, parts))
    point = len(digits) + exponent  # digits before the decimal point
    if len(digits) <= point <= 21:
        text = digits + "0" * (point - len(digits))
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        text = f"{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1:+d}"
    return "-" * sign + text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise EvidenceError(key, "given twice in one object")
        result[key] = value
    return result


def _integer(text: str) -> int | float:
    # A double of 2^53 or more is printed without a point; it has to come back as the double that it was.
    value = _double(text)
    return int(text) if abs(value) <= SAFE_INTEGER else value


def _double(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise EvidenceError("json", f"{text[:40]} is not a finite number")
