"""Text of a model made safe and visible: output is hostile, and whitespace matters."""

from __future__ import annotations

import unicodedata
from html import escape

_SIGNS = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍", "\0": "␀", "\u00a0": "⍽"}
_LONGEST = 48  # characters shown of one token; some vocabularies hold whole lines of dashes


def visible(text: str, *, spaces: bool = True, longest: int = _LONGEST) -> str:
    """A token as HTML: spaces (where wanted) and line ends as signs, control and direction characters by number, escaped, never empty."""
    if not text:
        return "∅"
    shown = text if len(text) <= longest else text[:longest] + "…"
    signs = _SIGNS if spaces else _SIGNS | {" ": " "}
    return escape("".join(signs.get(char) or _safe(char) for char in shown))


def _safe(char: str) -> str:
    # Cc and Cf hold escapes and direction overrides, which could rearrange the page around them.
    return f"⟨{ord(char):04X}⟩" if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"} else char


def percent(part: int, whole: int) -> str:
    """`62%`, or a dash where there is nothing to divide by."""
    return f"{100 * part / whole:.0f}%" if whole else "–"


def seconds(value: float) -> str:
    """A duration with a fitting unit: `12.3 ms`, `1.25 s`."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def nbytes(size: float) -> str:
    """`640 B`, `1.5 MiB`: binary units, in which settings are given, too."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def ago(seconds_: float) -> str:
    """A duration of waiting, to the unit that matters: `4 s`, `12 min`, `3 h`, `2 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds_ >= size:
            return f"{seconds_ / size:.0f} {unit}"
    return f"{seconds_:.0f} s"


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def finished(run: int, finish: str) -> str:
    """Says of a view that it shows a record and not an engine at work: why there is nothing to refresh."""
    return f'<p class="pl-note pl-record">Record of run {run}, which has finished ({escape(finish)}): it does not change any more.</p>'


def stat(value: str, label: str, title: str = "") -> str:
    """One figure with its label, for the head of an inspector."""
    hint = f' title="{escape(title)}"' if title else ""
    return f'<span class="pl-stat"{hint}><b>{escape(value)}</b> <small>{escape(label)}</small></span> '
