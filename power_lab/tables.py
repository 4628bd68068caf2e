"""What a lab tells about itself, shown as tables in a notebook and as text elsewhere. The values stay plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from power_lab.engine.host.protocol import EngineInfo, HostStatus
from power_lab.engine.report import Decision, MemoryPlan

_MIB = 1 << 20


def text_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows as aligned text."""
    lines = [list(head)] if head else []
    lines += [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def html_table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows as a small HTML table; every cell is escaped."""
    left = ' style="text-align:left;vertical-align:top"'
    top = "".join(f'<th scope="col"{left}>{escape(cell)}</th>' for cell in head)
    body = "".join(f"<tr>{''.join(f'<td{left}>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table>"


class Decisions(tuple[Decision, ...]):
    """Every setting and mechanism in force, who owns it and why (a tuple of Decision)."""

    __slots__ = ()
    _head = ("setting", "value", "owner", "why")

    def _rows(self) -> list[tuple[str, ...]]:
        return [(item.key, item.value, item.owner, item.reason) for item in self]

    def __repr__(self) -> str:
        return text_table(self._rows(), self._head)

    def _repr_html_(self) -> str:
        return html_table(self._rows(), self._head)


class Memory(MemoryPlan, frozen=True, kw_only=True):
    """The memory plan of an engine, in bytes."""

    def _rows(self) -> list[tuple[str, str]]:
        parts = ("weights", "pool", "states", "graphs", "workspace", "total", "resident")
        rows = [(name, f"{getattr(self, name) / _MIB:,.1f} MiB") for name in parts]
        return [*rows, ("pages", f"{self.pages:,} of {self.page_bytes / _MIB:,.2f} MiB"), ("why", self.reason)]

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())


class Status(HostStatus, frozen=True, kw_only=True):
    """The engine host: process, clients, engines, and when it would end by itself."""

    def _rows(self) -> list[tuple[str, str]]:
        return [
            (
                "host",
                f"pid {self.pid}, power-lab {self.package}, up {_span(self.uptime_s)}, {self.resident / _MIB:,.0f} MiB",
            ),
            *(("client", f"{one.name} (pid {one.pid})") for one in self.clients if not one.observer),
            *(("engine", _engine(one)) for one in self.engines),
            ("ends", self._ends()),
            ("log", self.log),
        ]

    def _ends(self) -> str:
        rule = f"an unused engine after {_span(self.idle_s)}, the empty host after {_span(self.linger_s)}"
        return rule if self.ends_in_s is None else f"in {_span(self.ends_in_s)} ({rule})"

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())


def shown(kind: type[Any], value: msgspec.Struct) -> Any:
    """The same values as the subclass that shows itself."""
    return kind(**{name: getattr(value, name) for name in value.__struct_fields__})


def _engine(one: EngineInfo) -> str:
    if one.state == "loading":
        return f"{one.config.model} ({one.engine}) is loading: {one.stage or 'starting'}"
    users = f"{len(one.clients)} client{'s' if len(one.clients) != 1 else ''}"
    fate = "" if one.ends_in_s is None else f", ends in {_span(one.ends_in_s)}"
    return f"{one.config.model} ({one.engine}), {one.config.mode}, {users}, {one.runs} running{fate}"


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
