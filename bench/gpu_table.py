"""Records of decoding as one table, a line for each engine and batch: what was measured, beside what was recorded elsewhere.

A model's lines stand together, however late its peers were measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]

HEADS = ("model", "engine", "batch", "steady tok/s", "with prompts", "GB/s", "of the floor", "checked")
OURS = "Power Lab"


def table(records: Iterable[Record]) -> str:
    """Lines of text; empty where nothing was decoded. What ran elsewhere is marked with a star."""
    decoded: dict[str, list[Record]] = {}  # by model, in the order in which they first come
    for record in records:
        if record["phase"] == "decode":
            decoded.setdefault(record["model"], []).append(record)
    rows = [_row(record) for own in decoded.values() for record in own]
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    lines = [
        _line(HEADS, widths),
        _line(["-" * width for width in widths], widths),
        *(_line(row, widths) for row in rows),
    ]
    if any(row[1].endswith("*") for row in rows):
        lines.append("* recorded elsewhere, not in this run")
    return "\n".join(lines)


def _row(record: Record) -> list[str]:
    engine = record.get("engine", OURS) + ("*" if "recorded_elsewhere" in record else "")
    if record.get("long"):
        engine += f", one of {record['long']:,}"
    if "failed" in record:
        return [record["model"], engine, str(record["batch"]), "failed", "", "", "", ""]
    floor = record.get("floor_fraction")
    return [
        record["model"],
        engine,
        str(record["batch"]),
        _rate(record.get("tokens_per_s")),
        _rate(record.get("end_to_end_tokens_per_s")),
        _rate(record.get("gb_per_s")),
        "" if floor is None else f"{floor:.3f}",
        (", ".join(record["checked"]) or "nothing") if "checked" in record else "",
    ]


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, numbers to the right."""
    sides = "<<>>>>><"
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True)).rstrip()
