"""Figures of the lessons: HTML tables, which stay readable where scripts, styles and SVG are taken out. Each has a text form too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

import numpy as np

from power_lab.lessons.lattice import Lattice
from power_lab.lessons.microscope import Row, Window
from power_lab.tables import text_table
from power_lab.widgets.figure import Figure, marked, meter, scrolling, table
from power_lab.widgets.palette import TOKENS, legend
from power_lab.widgets.text import visible

Piece = Callable[[int], str]
"""Token id -> its text, such as `Microscope.piece`."""

_WORDS = {"kept": "accepted", "refused": "rejected", "unused": "rejected", "bonus": "bonus"}


def window_table(window: Window, piece: Piece) -> Figure:
    """One round: a row for each row of the verify pass, with what was guessed and what the target drew there."""
    head = ("position", "guess", "drafter's p", "target's p", "target draws", "so")
    said = {
        "kept": "equal: kept",
        "refused": "different: the target's own stands",
        "unused": "not looked at",
        "bonus": "one more for free",
    }
    cells, lines = [], []
    for row in window.rows:
        draft, own, used = row.draft, row.target.token, row.verdict != "unused"
        of_drafter = "" if row.drafter is None or draft is None else f"{row.drafter.probability(draft):.3f}"
        of_target = "" if draft is None else f"{row.target.probability(draft):.3f}"
        guess = "" if draft is None else marked(piece(draft), _WORDS[row.verdict])
        drawn = marked(piece(own), _own_kind(row)) if used else "–"
        cells.append(
            (str(row.position), guess or "none", of_drafter or "–", of_target or "–", drawn, said[row.verdict])
        )
        plain = "" if draft is None else repr(piece(draft))
        lines.append(
            (str(row.position), plain, of_drafter, of_target, repr(piece(own)) if used else "", said[row.verdict])
        )
    return Figure(table(head, cells, left=(1, 4, 5)), text_table(lines, head))


def position_table(row: Row, piece: Piece, best: int = 6) -> Figure:
    """One position: the distributions of target and drafter side by side, and the noise that chooses from both."""
    target, drafter = row.target, row.drafter
    sides = [target] if drafter is None else [target, drafter]
    seen = {token for side in sides for token in (*side.top(best), side.token)} | {row.draft}
    tokens = sorted((token for token in seen if token is not None), key=lambda token: -target.probability(token))
    noise = target.noise(tokens)
    noisy = bool(target.temperature)
    head = ["token", "target's p", *(["drafter's p"] if drafter is not None else [])]
    head += ["noise", "target's score", *(["drafter's score"] if drafter is not None else [])] if noisy else []
    cells, lines = [], []
    for token, luck in zip(tokens, noise, strict=True):
        marks = ["accepted", "correction"]
        cell, line = [marked(piece(token), "plain")], [repr(piece(token))]
        for side, mark in zip(sides, marks, strict=False):
            share, wins = side.probability(token), not noisy and token == side.token
            cell.append(meter(share, mark) + _won(f"{share:.3f}", wins))
            line.append(f"{share:.3f}" + "*" * wins)
        if noisy:
            cell.append(f"{luck:+.2f}")
            line.append(f"{luck:+.2f}")
            for side in sides:
                score, wins = side.scores[token] + luck, token == side.token
                cell.append(_won("never" if np.isinf(score) else f"{score:.2f}", wins))
                line.append(f"{score:.2f}" + "*" * wins)
        cells.append(tuple(cell))
        lines.append(tuple(line))
    return Figure(table(head, cells, left=(0, 1, 2) if drafter is not None else (0, 1)), text_table(lines, head))


def slots_chart(windows: Sequence[Window], piece: Piece) -> Figure:
    """The slots that each round wrote, as cells: what counts before it, what it adds, and what lies behind the cursor."""
    first = min(window.start for window in windows)
    last = max(window.start + len(window.rows) for window in windows)
    head = ("round", "before", *(str(at) for at in range(first, last)), "cursor")
    known: dict[int, int] = {}
    cells, lines = [], []
    for window in windows:
        inputs = dict(zip(range(window.start, last), (window.anchor, *window.drafts), strict=False))
        cell, line = [str(window.number), f"{window.start:,}"], [str(window.number), str(window.start)]
        for at in range(first, last):
            if at in inputs:
                good = at < window.committed
                kind = "plain" if at == window.start else "accepted" if good else "rejected"
                cell.append(marked(piece(inputs[at]), kind))
                line.append(piece(inputs[at]).strip() + ("" if good else " ×"))
                if good:
                    known[at] = inputs[at]
            else:
                cell.append(f'<span class="pl-n">{visible(piece(known[at]))}</span>' if at in known else "")
                line.append(piece(known[at]).strip() if at in known else "")
        cells.append((*cell, str(window.committed)))
        lines.append((*line, str(window.committed)))
    kinds = {"plain": len(windows), "accepted": sum(w.accepted for w in windows)}
    kinds["rejected"] = sum(len(w.drafts) - w.accepted for w in windows)
    return Figure(
        legend(TOKENS, kinds) + scrolling("Places in the cache", table(head, cells), True),
        text_table(lines, head),
    )


def walk_table(grid: Lattice, alone: Sequence[int], walk: Sequence[int]) -> Figure:
    """The candidates of each position, with what each is worth by itself and beside the one that the walk has just chosen.

    Args:
        alone: the best candidate of each position by itself. walk: the path.
    """
    head = ("position", "candidate", "p alone", "own score", "pair score", "sum", "chosen by")
    cells, lines = [], []
    for at, (column, unary) in enumerate(zip(grid.texts, grid.unary, strict=True)):
        pair = grid.pair[at - 1][walk[at - 1]] if at else np.zeros_like(unary)
        for one, text in enumerate(column):
            words = [*(["the walk"] if walk[at] == one else []), *(["best alone"] if alone[at] == one else [])]
            numbers = (f"{np.exp(unary[one]):.3f}", f"{unary[one]:.2f}", f"{pair[one]:+.2f}" if at else "")
            total, note = f"{unary[one] + pair[one]:.2f}", ", ".join(words) or "–"
            place = f"+{at + 1}" if one == 0 else ""
            mark = "accepted" if walk[at] == one else "plain"
            cells.append(
                (
                    place or "&nbsp;",
                    marked(text, mark),
                    *(cell or "–" for cell in numbers),
                    _won(total, walk[at] == one),
                    note,
                )
            )
            lines.append((place, repr(text), *numbers, total, note))
    return Figure(table(head, cells, left=(1, 6)), text_table(lines, head))


def facts_table(rows: Sequence[Mapping[str, str]]) -> Figure:
    """Rows of the same keys, the first one naming the row."""
    head = tuple(rows[0])
    cells = [[escape(row[key]) for key in head] for row in rows]
    return Figure(table(head, cells, left=(0,)), text_table([[row[key] for key in head] for row in rows], head))


def costs_chart(seconds: Mapping[int, float]) -> Figure:
    """Seconds of a step by its rows, as bars, beside what as many steps of one row would take."""
    one = seconds[min(seconds)]
    head = ("rows", "ms", "beside the widest", "times one row", "ms a row")
    most = max(seconds.values())
    cells = [
        (
            str(rows),
            f"{1e3 * took:.1f}",
            meter(took / most, "accepted", wide=20),
            f"{took / one:.2f}",
            f"{1e3 * took / rows:.1f}",
        )
        for rows, took in sorted(seconds.items())
    ]
    lines = [(a, b, d, e) for a, b, _, d, e in cells]
    return Figure(table(head, cells, left=(2,)), text_table(lines, (*head[:2], *head[3:])))


def _own_kind(row: Row) -> str:
    return {"kept": "accepted", "refused": "correction", "bonus": "bonus"}[row.verdict]


def _won(text: str, wins: bool) -> str:
    return f'<b class="pl-wins">{text}</b>' if wins else text
