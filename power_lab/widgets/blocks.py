"""The block inspector: who holds which KV block, and which prefixes are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from power_lab.engine.trace import BlockState
from power_lab.widgets.palette import BLOCKS, legend
from power_lab.widgets.text import count, percent, stat
from power_lab.widgets.view import View

if TYPE_CHECKING:
    import xarray

SCHEMA = "power-lab.blocks/1"
_DRAWN = 1024  # cells; beyond that stretches of free blocks are drawn as one
_CHAINS = 24  # block tables and prefixes listed
_LINKS = 40  # blocks of one chain listed


class Blocks(View):
    """The pool as a grid of blocks.

    Args:
        read: gives the pool's blocks; it raises a PowerLabError when the engine is gone.
        live: ask again every second while the view can be seen.
    """

    def __init__(self, read: Callable[[], Sequence[BlockState]], live: bool = False) -> None:
        self._read = read
        self._states = tuple(read())
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
        ids = np.array([state.id for state in states], dtype=np.int64)
        return xarray.Dataset(
            variables, {"block": ("block", ids, {"units": "1", "long_name": "block number"})}, {"schema": SCHEMA}
        )

    def summary(self) -> str:
        counts = Counter(state.state for state in self._states)
        parts = ", ".join(f"{counts[name]} {mark.label}" for name, mark in BLOCKS.items() if counts[name])
        return f"{count(len(self._states), 'block')}: {parts}"

    def body(self) -> str:
        return _body(self._states)

    def refresh(self) -> None:
        """Read the pool again. Raises PowerLabError when the engine is gone; the last snapshot stays."""
        self._states = tuple(self._read())

    def renew(self) -> str:
        self.refresh()
        return self.body()


def _body(states: tuple[BlockState, ...]) -> str:
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
    return head + legend(BLOCKS, counts) + _grid(states) + _tables(states) + _prefixes(states)


def _grid(states: tuple[BlockState, ...]) -> str:
    cells: list[str] = []
    gap: list[BlockState] = []

    def close_gap() -> None:
        if len(gap) > 2:
            cells.append(
                f'<span class="pl-c pl-free pl-gap" title="blocks {gap[0].id} to {gap[-1].id}: free">{len(gap):,} free</span> '
            )
        else:
            cells.extend(map(_cell, gap))
        gap.clear()

    for index, state in enumerate(states):
        if state.state == "free" and len(states) > _DRAWN:
            gap.append(state)
            continue
        close_gap()
        if len(cells) >= _DRAWN:
            cells.append(f'<span class="pl-note">{count(len(states) - index, "more block")} not drawn</span>')
            break
        cells.append(_cell(state))
    else:
        close_gap()
    return (
        '<div class="pl-grid pl-scroll" tabindex="0" role="region" aria-label="Blocks" data-lm-suppress-shortcuts="true" '
        f'style="max-height:22em;overflow:auto">{"".join(cells)}</div>'
    )


def _cell(state: BlockState) -> str:
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
    sign = str(state.refs) if state.state == "shared" and state.refs < 10 else mark.glyph
    return (
        f'<span class="pl-c pl-{mark.name}" style="{mark.inline()}" title="{escape(" · ".join(facts))}">{sign}</span> '
    )


def _tables(states: tuple[BlockState, ...]) -> str:
    owners: dict[int, list[BlockState]] = {}
    for state in states:
        for owner in state.owners:
            owners.setdefault(owner, []).append(state)
    # A block that is not full yet has no depth of its own; it comes last.
    rows = [
        (str(owner), sorted(blocks, key=lambda state: (not state.hash, state.depth, state.id)))
        for owner, blocks in sorted(owners.items())
    ]
    return _chains("Block tables", "Request", "Blocks of each request, in order.", rows)


def _prefixes(states: tuple[BlockState, ...]) -> str:
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
    )


def _chains(title: str, key: str, meaning: str, rows: list[tuple[str, list[BlockState]]]) -> str:
    if not rows:
        return ""
    lines = []
    for name, chain in rows[:_CHAINS]:
        links = "".join(_link(state) for state in chain[:_LINKS])
        more = f"<small>and {len(chain) - _LINKS:,} more</small>" if len(chain) > _LINKS else ""
        lines.append(
            f'<tr><th scope="row">{escape(name)}</th><td class="pl-num">{sum(state.tokens for state in chain):,}</td>'
            f'<td class="pl-tokens" style="text-align:left">{links}{more}</td></tr>'
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
