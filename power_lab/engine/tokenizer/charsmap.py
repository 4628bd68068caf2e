"""SentencePiece's compiled character normalisation: a double-array trie of texts and what each becomes.

Source: sentencepiece's `precompiled_charsmap`: the trie's size in bytes as u32, its u32 units (Yata's XOR-compressed double array, as
darts-clone writes it), then replacements that end in a zero byte. All little-endian.
"""

from __future__ import annotations

import numpy as np

from power_lab.errors import TokenizerError

MAX_BYTES = 1 << 24  # NMT-NFKC's, the usual one, has 240 kB
MAX_REPLACEMENT = 256  # bytes; Unicode's longest decomposition has 33. It bounds how much longer text may become


class Charsmap:
    """Normalises text: at each place the longest known beginning is replaced, and other characters stay."""

    def __init__(self, data: bytes, where: str) -> None:
        """Raises TokenizerError, which begins with `where`, for a table that is not whole."""
        self._where = where
        size = int.from_bytes(data[:4], "little") if len(data) >= 4 else 0
        if not 4 <= size <= len(data) - 4 or size % 4 or len(data) > MAX_BYTES:
            raise TokenizerError(f"{where}: {len(data)} bytes that say they hold a table of {size}.")
        self._units: list[int] = np.frombuffer(data, "<u4", size // 4, 4).tolist()
        self._texts = data[4 + size :]

    def normalise(self, text: str) -> str:
        """The text after replacement. Raises TokenizerError where the table leads outside itself."""
        data = text.encode()
        out: list[bytes] = []
        at = 0
        try:
            while at < len(data):
                length, value = self._longest(data, at)
                if length:
                    out.append(self._replacement(value))
                else:
                    length = 1 + (data[at] >= 0xC0) + (data[at] >= 0xE0) + (data[at] >= 0xF0)
                    out.append(data[at : at + length])
                at += length
            return b"".join(out).decode()
        except (IndexError, ValueError):
            raise TokenizerError(f"{self._where}: the table leads outside itself.", "Fetch the model again.") from None

    def _longest(self, data: bytes, at: int) -> tuple[int, int]:
        """Length and value of the longest key that the text goes on with; (0, 0) if there is none."""
        units = self._units
        node = _offset(units[0])
        found = (0, 0)
        for index in range(at, len(data)):
            byte = data[index]
            if not byte:
                break
            node ^= byte
            unit = units[node]
            if unit & 0x800000FF != byte:
                break
            node ^= _offset(unit)
            if unit & 0x100:
                found = (index - at + 1, units[node] & 0x7FFFFFFF)
        return found

    def _replacement(self, begin: int) -> bytes:
        end = self._texts.index(b"\0", begin, begin + MAX_REPLACEMENT)
        return self._texts[begin:end]


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
