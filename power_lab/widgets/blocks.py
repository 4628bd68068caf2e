"""The block inspector: who holds which KV block, and which prefixes are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.engine.trace import BlockState
from power_lab.widgets.palette import BLOCKS, legend
from power_lab.widgets.picture import bars, path, svg, text
from power_lab.widgets.text import count, percent, stat, visible
from power_lab.widgets.view import View

if TYPE_CHECKING:
    import xarray

    from power_lab.engine.vitals import PrefixTree

SCHEMA = "power-lab.blocks/1"
_DRAWN = 1024  # cells; beyond that stretches of free blocks are drawn as one
_CHAINS = 24  # block tables and prefixes listed
_LINKS = 40  # blocks of one chain listed


class Blocks(View):
    """The pool as a grid of blocks.

    Args:
        read: gives the pool's blocks; it raises a PowerLabError when the engine is gone.
        live: ask again every second while the view can be seen.
        prefixes: gives the prefix tree, for the text that blocks hold.
    """

    rows = "block"

    def __init__(
        self,
        read: Callable[[], Sequence[BlockState]],
        live: bool = False,
        prefixes: Callable[[], PrefixTree] | None = None,
    ) -> None:
        self._read, self._prefixes = read, prefixes
        self._states, self._pieces = self._asked()
        super().__init__(refreshable=True, live=live)

    @property
    def states(self) -> tuple[BlockState, ...]:
        """The blocks as they were read last."""
        return self._states

    @property
    def dataset(self) -> xarray.Dataset:
        """The latest snapshot: dimension `block`, and `owner` padded with -1."""
        import xarray

        states = self._states
        widest = max((len(state.owners) for state in states), default=0)
        owners = np.full((len(states), widest), -1, dtype=np.int64)
        for index, state in enumerate(states):
            owners[index, : len(state.owners)] = state.owners
        columns: dict[str, tuple[str, str]] = {
            "state": ("1", f"one of {', '.join(BLOCKS)}"),
            "refs": ("request", "block tables that name the block"),
            "hash": ("1", "chained digest of a full block, empty otherwise"),
            "tokens": ("token", "committed tokens in the block"),
            "parent": ("1", "block of the tokens before, -1 if none"),
            "depth": ("block", "blocks before it in its chain"),
        }
        variables: dict[str, Any] = {
            name: (
                "block",
                np.array(
                    [getattr(state, name) for state in states], dtype=object if name in {"state", "hash"} else np.int64
                ),
                {"units": unit, "long_name": title},
            )
            for name, (unit, title) in columns.items()
        }
        variables["owners"] = (
            ("block", "owner"),
            owners,
            {"units": "1", "long_name": "request numbers, padded with -1"},
        )
        pieces = np.array([self._pieces.get(state.hash, "") for state in states], dtype=object)
        variables["piece"] = ("block", pieces, {"units": "1", "long_name": "text of a full block, where it is known"})
        ids = np.array([state.id for state in states], dtype=np.int64)
        return xarray.Dataset(
            variables, {"block": ("block", ids, {"units": "1", "long_name": "block number"})}, {"schema": SCHEMA}
        )

    def summary(self) -> str:
        counts = Counter(state.state for state in self._states)
        parts = ", ".join(f"{counts[name]} {mark.label}" for name, mark in BLOCKS.items() if counts[name])
        return f"{count(len(self._states), 'block')}: {parts}"

    def body(self) -> str:
        return _body(self._states, self._pieces)

    def picture(self) -> str:
        return _picture(self._states) if self._states else ""

    def refresh(self) -> None:
        """Read the pool again. Raises PowerLabError when the engine is gone; the last snapshot stays."""
        self._states, self._pieces = self._asked()

    def _asked(self) -> tuple[tuple[BlockState, ...], dict[str, str]]:
        """The blocks, and the text of those that have a hash."""
        states = tuple(self._read())
        if self._prefixes is None or not any(state.hash for state in states):
            return states, {}
        return states, {node.hash: node.piece for node in self._prefixes().nodes}

    def renew(self) -> str:
        self.refresh()
        return self.body()


def _body(states: tuple[BlockState, ...], pieces: Mapping[str, str]) -> str:
    counts = Counter(state.state for state in states)
    usable = len(states) - counts["dummy"]
    taken = counts["used"] + counts["shared"]
    tokens = sum(state.tokens for state in states if state.state in {"used", "shared", "cached"})
    saved = sum((state.refs - 1) * state.tokens for state in states if state.state == "shared")
    head = (
        '<div class="pl-head">'
        + stat(percent(taken, usable), "in use", f"{taken:,} of {count(usable, 'block')} are named by a request")
        + stat(f"{usable:,}", "blocks")
        + stat(f"{tokens:,}", "tokens held")
        + stat(f"{saved:,}", "tokens shared", "tokens that would be stored again if requests did not share blocks")
        + "</div>"
    )
    return (
        head
        + legend(BLOCKS, counts)
        + _grid(states, pieces)
        + _sharing(states, pieces)
        + _tables(states)
        + _prefixes(states, pieces)
    )


def _grid(states: tuple[BlockState, ...], pieces: Mapping[str, str]) -> str:
    cells: list[str] = []
    gap: list[BlockState] = []

    def close_gap() -> None:
        if len(gap) > 2:
            cells.append(
                f'<span class="pl-c pl-free pl-gap" title="blocks {gap[0].id} to {gap[-1].id}: free">{len(gap):,} free</span> '
            )
        else:
            cells.extend(_cell(state, "") for state in gap)
        gap.clear()

    for index, state in enumerate(states):
        if state.state == "free" and len(states) > _DRAWN:
            gap.append(state)
            continue
        close_gap()
        if len(cells) >= _DRAWN:
            cells.append(f'<span class="pl-note">{count(len(states) - index, "more block")} not drawn</span>')
            break
        cells.append(_cell(state, pieces.get(state.hash, "")))
    else:
        close_gap()
    return (
        '<div class="pl-grid pl-scroll" tabindex="0" role="region" aria-label="Blocks" data-lm-suppress-shortcuts="true" '
        f'style="max-height:22em;overflow:auto">{"".join(cells)}</div>'
    )


def _cell(state: BlockState, piece: str) -> str:
    mark = BLOCKS.get(state.state, BLOCKS["used"])
    facts = [f"block {state.id}: {mark.label}"]
    if state.owners:
        facts.append(f"{'requests' if len(state.owners) > 1 else 'request'} {', '.join(map(str, state.owners))}")
    if state.tokens:
        facts.append(count(state.tokens, "token"))
    if state.hash:
        facts.append(f"hash {state.hash[:8]}")
        facts.append(
            "first of its chain" if state.parent < 0 and not state.depth else f"{state.depth} before it in the chain"
        )
    if state.refs:
        facts.append(f"reference count {state.refs}")
    if piece:
        facts.append(f"\u201c{_short(piece)}\u201d")
    sign = str(state.refs) if state.state == "shared" and state.refs < 10 else mark.glyph
    return (
        f'<span class="pl-c pl-{mark.name}" style="{mark.inline()}" title="{escape(" · ".join(facts))}">{sign}</span> '
    )


def _sharing(states: tuple[BlockState, ...], pieces: Mapping[str, str]) -> str:
    """Which requests hold which blocks together."""
    groups: dict[tuple[int, ...], list[BlockState]] = {}
    for state in states:
        if state.state == "shared":
            groups.setdefault(state.owners, []).append(state)
    ordered = sorted(groups.items(), key=lambda group: -sum(state.tokens for state in group[1]))
    rows = [
        (
            ", ".join(map(str, owners[:12])) + (f" and {len(owners) - 12} more" if len(owners) > 12 else ""),
            _chain(blocks),
        )
        for owners, blocks in ordered
    ]
    return _chains(
        "Who shares what", "Requests", "Blocks that several requests hold at once, stored only once.", rows, pieces
    )


def _chain(blocks: list[BlockState]) -> list[BlockState]:
    """In the order of their tokens. A block that is not full yet has no depth of its own; it comes last."""
    return sorted(blocks, key=lambda state: (not state.hash, state.depth, state.id))


def _tables(states: tuple[BlockState, ...]) -> str:
    owners: dict[int, list[BlockState]] = {}
    for state in states:
        for owner in state.owners:
            owners.setdefault(owner, []).append(state)
    rows = [(str(owner), _chain(blocks)) for owner, blocks in sorted(owners.items())]
    return _chains("Block tables", "Request", "Blocks of each request, in order.", rows, {})


def _prefixes(states: tuple[BlockState, ...], pieces: Mapping[str, str]) -> str:
    by_id = {state.id: state for state in states}
    inner = {state.parent for state in states if state.hash}
    leaves = [state for state in states if state.state == "cached" and state.id not in inner]
    rows: list[tuple[str, list[BlockState]]] = []
    for leaf in sorted(leaves, key=lambda state: (-state.depth, state.id)):
        chain, seen = [leaf], {leaf.id}
        while (parent := by_id.get(chain[0].parent)) is not None and parent.id not in seen:
            chain.insert(0, parent)
            seen.add(parent.id)
        rows.append((leaf.hash[:8], chain))
    return _chains(
        "Cached prefixes",
        "Hash",
        "Finished prefixes that a later request may reuse, by the hash of their last block.",
        rows,
        pieces,
    )


def _chains(
    title: str, key: str, meaning: str, rows: list[tuple[str, list[BlockState]]], pieces: Mapping[str, str]
) -> str:
    if not rows:
        return ""
    lines = []
    for name, chain in rows[:_CHAINS]:
        piece = pieces.get(chain[0].hash, "")
        begins = f'<small class="pl-begins" title="how it begins">{visible(piece[:32])}…</small>' if piece else ""
        links = "".join(_link(state) for state in chain[:_LINKS])
        more = f"<small>and {len(chain) - _LINKS:,} more</small>" if len(chain) > _LINKS else ""
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="pl-num">{sum(state.tokens for state in chain):,}</td>'
            f'<td class="pl-tokens" style="text-align:left">{links}{more} {begins}</td></tr>'
        )
    more = f'<p class="pl-note">{len(rows) - _CHAINS:,} more not listed.</p>' if len(rows) > _CHAINS else ""
    return (
        f'<table class="pl-rounds pl-chains"><caption title="{escape(meaning)}">{title}</caption><thead><tr><th scope="col">{key}</th>'
        '<th scope="col">Tokens</th><th scope="col" class="pl-tokens" style="text-align:left">Blocks</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>{more}"
    )


def _link(state: BlockState) -> str:
    mark = BLOCKS.get(state.state, BLOCKS["used"])
    return f'<span class="pl-t pl-{mark.name}" style="{mark.inline()}" title="{mark.label}">{mark.glyph}\u202f{state.id}</span> '


def _short(piece: str) -> str:
    """The beginning of a text in one line, control characters and line ends left out."""
    kept = "".join(char if char.isprintable() else " " for char in piece[:120])
    return " ".join(kept.split())[:60]


def _picture(states: tuple[BlockState, ...]) -> str:
    """The pool for a document: a square for each block, and a legend."""
    across, size = 64, 10
    drawn = states[:4096]
    parts = []
    for at, (name, mark) in enumerate(BLOCKS.items()):
        boxes = [
            ((i % across) * size, (i // across) * size, size - 2, size - 2)
            for i, state in enumerate(drawn)
            if state.state == name
        ]
        faint = " fill-opacity='0.2'" if name == "free" else ""
        parts.append(path(bars(boxes), f"transform='translate(8 30)' fill='{mark.light}'{faint}"))
        parts.append(
            path(bars([(8 + at * 90, 8, size, size)]), f"fill='{mark.light}'{faint}")
            + text(22 + at * 90, 17, mark.label)
        )
    return svg(across * size + 16, 40 + -(-len(drawn) // across) * size, "".join(parts))
