"""The models of this machine as a table: text of 80 columns in a terminal, HTML in a notebook. The values stay plain data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from power_lab.engine.config import CPU_KV_TOKENS
from power_lab.models.facts import printable
from power_lab.tables import text_table

if TYPE_CHECKING:
    from power_lab.models import Listing, ModelEntry

_GIB = 1 << 30
_COLUMNS = 80
_HEAD = ("name", "size", "params", "type", "family", "context", "fit")
_NUMBERS = frozenset({"size", "params", "context"})
_FAINT = "opacity:0.7"


class Models(tuple["ModelEntry", ...]):
    """The models of this machine (a tuple of ModelEntry). `notes` says what could not be looked at."""

    notes: tuple[str, ...]

    def __new__(cls, listing: Listing) -> Models:
        made = super().__new__(cls, listing.models)
        made.notes = listing.notes
        return made

    def _groups(self) -> dict[str, list[ModelEntry]]:
        """By place, in the order of the list."""
        groups: dict[str, list[ModelEntry]] = {}
        for model in self:
            groups.setdefault(_place(model), []).append(model)
        return groups

    def _remarks(self) -> list[str]:
        free = next((model.fit.free for model in self if model.fit is not None), None)
        if free is None:
            return list(self.notes)
        pool = f"{CPU_KV_TOKENS:,} tokens"
        return [f"fit: weights and a KV pool of {pool} in the {free / _GIB:.1f} GiB that are free now.", *self.notes]

    def __repr__(self) -> str:
        groups = self._groups()
        rows = [[printable(cell) for cell in _cells(model)] for models in groups.values() for model in models]
        head, *lines = text_table(_right_aligned([list(_HEAD), *rows])).split("\n")
        text, line = [f"  {head}"], iter(lines)
        for place, models in groups.items():
            text.append(printable(place))
            for model in models:
                text.append(f"  {next(line)}")
                text += [part for told in _told(model) for part in _wrapped(told, 6)]
        return "\n".join([*text, *(part for remark in self._remarks() for part in _wrapped(remark, 0))])

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col" style="{_side(name)}">{name}</th>' for name in (*_HEAD, "licence", "status"))
        body = "".join(
            f'<tbody><tr><th scope="rowgroup" colspan="{len(_HEAD) + 2}" style="text-align:left;{_FAINT}">'
            f"{escape(printable(place))}</th></tr>{''.join(map(_html_row, models))}</tbody>"
            for place, models in self._groups().items()
        )
        remarks = "".join(f'<div style="{_FAINT}">{escape(printable(remark))}</div>' for remark in self._remarks())
        return f'<div style="overflow-x:auto"><table><thead><tr>{head}</tr></thead>{body}</table></div>{remarks}'


def _cells(model: ModelEntry) -> tuple[str, ...]:
    return (
        model.name,
        _bytes(model.size),
        _count(model.parameters),
        model.quantisation or "-",
        model.architecture or "-",
        f"{model.context:,}" if model.context else "-",
        model.fit.verdict if model.fit is not None and model.fit.verdict != "unknown" else "-",
    )


def _html_row(model: ModelEntry) -> str:
    cells = [
        f'<td style="{_side(name)}"{_tip(model, name)}>{escape(printable(cell))}</td>'
        for name, cell in zip(_HEAD, _cells(model), strict=True)
    ]
    cells.append(f'<td style="text-align:left">{escape(printable(model.license)) or "-"}</td>')
    status = "; ".join(_told(model)) or model.status
    cells.append(f'<td style="text-align:left;overflow-wrap:anywhere">{escape(printable(status))}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _tip(model: ModelEntry, name: str) -> str:
    """More about a cell, for who points at it."""
    tip = ""
    if name == "name":
        tip = str(model.path)
    elif name == "type" and model.bytes_by_type:
        tip = _mix(model.bytes_by_type)
    elif name == "fit" and model.fit is not None:
        fit = model.fit
        tip = f"weights {_bytes(fit.weights)} + KV pool {_bytes(fit.pool)} of {_bytes(fit.free)} free"
    return f' title="{escape(printable(tip))}"' if tip else ""


def _told(model: ModelEntry) -> Iterator[str]:
    """What a row's numbers do not say."""
    if not model.present:
        yield f"not here yet: power-lab models add {model.name}"
    elif model.status != "ready":
        yield model.status
    elif model.fit is not None and model.fit.verdict in ("tight", "too large"):
        fit = model.fit
        yield f"{fit.verdict}: {_bytes(fit.weights)} of weights and {_bytes(fit.pool)} of KV pool, {_bytes(fit.free)} free"
    if model.draft_layers:
        layers = "a layer" if model.draft_layers == 1 else f"{model.draft_layers} layers"
        yield f"besides, {layers} for drafting (MTP): {_count(model.draft_parameters)} parameters"


def _place(model: ModelEntry) -> str:
    if model.source.startswith("package"):
        return "catalogue"
    if model.source == "power-lab":
        return f"own store {model.path.parent}"
    return model.source


def _right_aligned(rows: list[list[str]]) -> list[list[str]]:
    """The rows with their columns of numbers padded on the left."""
    columns = [
        [cell.rjust(max(map(len, column))) for cell in column] if name in _NUMBERS else list(column)
        for name, column in zip(_HEAD, zip(*rows, strict=True), strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of a terminal's width; a path is not cut."""
    margin = " " * indent
    return textwrap.wrap(
        printable(text),
        _COLUMNS,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _side(name: str) -> str:
    return f"text-align:{'right' if name in _NUMBERS else 'left'};white-space:nowrap"


def _bytes(size: int) -> str:
    if size >= _GIB:
        return f"{size / _GIB:.1f} GiB"
    return f"{size / (1 << 20):.0f} MiB" if size >= 1 << 20 else f"{size / 1024:.0f} KiB"


def _count(values: int) -> str:
    if not values:
        return "-"
    return (
        f"{values / 1e9:.1f}B" if values >= 1e9 else f"{values / 1e6:.0f}M" if values >= 1e6 else f"{values / 1e3:.0f}K"
    )


def _mix(by_type: dict[str, int]) -> str:
    total = sum(by_type.values()) or 1
    return ", ".join(f"{kind} {100 * size / total:.0f} %" for kind, size in by_type.items())
