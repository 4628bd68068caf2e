"""One palette and one legend for all inspectors.

The hues are those of Okabe and Ito (2008), each with a darker value for light themes and a lighter one for dark themes. Hue alone is not
enough: of equal lightness, purple and grey are one colour to an eye without its middle cones, and orange and yellow to one without its
long ones. So lightness differs too; a test simulates the three deficiencies. Colour never stands alone: every kind also has a glyph, a
line style or a tag.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Mark:
    """How one kind of thing looks.

    Attributes:
        name: machine name, the one in datasets and block states.
        label: the word in a legend; meaning: a sentence for its tooltip.
        glyph: sign shown beside or instead of the colour, or "".
        light, dark: `#rrggbb` with a contrast of at least 4.5 on white and on #111.
        line: CSS line style under tokens and around blocks.
        tag: HTML element, so that the difference survives where styles are stripped.
    """

    name: str
    label: str
    meaning: str
    glyph: str
    light: str
    dark: str
    line: str
    tag: str = "span"

    @property
    def tint(self) -> str:
        """A translucent background that works on any theme."""
        pairs = zip(_channels(self.light), _channels(self.dark), strict=True)
        return f"rgba({','.join(str((low + high) // 2) for low, high in pairs)},0.2)"

    def inline(self) -> str:
        """The part of the look that survives JupyterLab's sanitizer of untrusted notebooks: plain colours, no variables."""
        return f"background-color:{self.tint}" if self.line != "none" else ""


TOKENS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("accepted", "accepted", "A draft token that the target drew too.", "", "#00755a", "#46e0a8", "solid"),
        Mark(
            "correction",
            "correction",
            "The target's own token where a draft was refused.",
            "↳",
            "#003f86",
            "#57aefa",
            "double",
            "ins",
        ),
        Mark(
            "bonus",
            "bonus",
            "The target's own token after a fully accepted draft.",
            "+",
            "#994682",
            "#cc8fbe",
            "dashed",
            "b",
        ),
        Mark("plain", "no draft", "Drawn by the target; nothing was drafted.", "", "#34393f", "#d8e0e8", "none"),
        Mark("rejected", "rejected", "A draft token that was not kept.", "", "#7a2404", "#f0844c", "none", "del"),
        Mark("prompt", "prompt", "A token of the prompt.", "›", "#746400", "#e6c03c", "none", "i"),
    )
}

BLOCKS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("used", "in use", "Named by one request's block table.", "■", "#003f86", "#57aefa", "solid"),
        Mark(
            "shared", "shared", "Named by several requests' block tables at once.", "◆", "#00755a", "#46e0a8", "double"
        ),
        Mark(
            "cached",
            "cached",
            "Holds a finished prefix; no request names it, so it may be reused or evicted.",
            "○",
            "#994682",
            "#cc8fbe",
            "dashed",
        ),
        Mark("free", "free", "Empty.", "·", "#34393f", "#d8e0e8", "none"),
        Mark(
            "dummy",
            "dummy",
            "Takes the writes of padding rows; never holds a request's data.",
            "✕",
            "#7a2404",
            "#f0844c",
            "dotted",
        ),
    )
}

STEPS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("prefill", "prefill", "Rows of prompts.", "›", "#746400", "#e6c03c", "solid"),
        Mark(
            "decode",
            "decode",
            "One row a request: its next token, nothing drafted.",
            "·",
            "#003f86",
            "#57aefa",
            "solid",
        ),
        Mark("verify", "verify", "Rows of drafts, that the target checks.", "≡", "#00755a", "#46e0a8", "solid"),
        Mark("running", "running", "Requests that have blocks.", "■", "#994682", "#cc8fbe", "solid"),
        Mark("waiting", "waiting", "Requests in the queue.", "□", "#34393f", "#d8e0e8", "dashed"),
        Mark(
            "preempted",
            "preempted",
            "A request gave its blocks up, and will compute again.",
            "✕",
            "#7a2404",
            "#f0844c",
            "dotted",
        ),
        Mark(
            "gap",
            "no step in flight",
            "Nothing ran: the host was at work, or there was nothing to do.",
            "╱",
            "#7a2404",
            "#f0844c",
            "dashed",
        ),
    )
}

PARTS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("drafting", "drafting", "The drafter proposed tokens.", "✎", "#00755a", "#46e0a8", "solid"),
        Mark("model", "model", "The target model's pass.", "■", "#003f86", "#57aefa", "solid"),
        Mark("sampling", "sampling", "Tokens were drawn from the logits.", "◇", "#994682", "#cc8fbe", "solid"),
        Mark(
            "commit",
            "commit",
            "What was drawn was kept, and the next step prepared.",
            "✓",
            "#34393f",
            "#d8e0e8",
            "solid",
        ),
    )
}

GRAPHS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("replay", "replayed", "Steps that replayed a recorded graph.", "●", "#00755a", "#46e0a8", "solid"),
        Mark("capture", "captured", "Steps whose graph was recorded for them.", "◉", "#994682", "#cc8fbe", "double"),
        Mark("eager", "eager", "Steps that ran operation by operation.", "○", "#7a2404", "#f0844c", "dashed"),
        Mark(
            "padding", "padding", "Rows that were computed only to fill the shape.", "▒", "#34393f", "#d8e0e8", "dotted"
        ),
    )
}

PREFIXES: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark("held", "held", "A running request holds it now.", "■", "#003f86", "#57aefa", "solid"),
        Mark(
            "kept",
            "kept",
            "No request holds it; the next one that begins like it is served.",
            "○",
            "#994682",
            "#cc8fbe",
            "dashed",
        ),
        Mark(
            "next",
            "evicted next",
            "Among the next eight blocks that are taken: free ones go first.",
            "↗",
            "#7a2404",
            "#f0844c",
            "dotted",
        ),
        Mark("served", "served", "Comes from the cache.", "●", "#00755a", "#46e0a8", "double"),
        Mark("computed", "computed", "Must be computed.", "", "#34393f", "#d8e0e8", "none"),
    )
}

POINTS: dict[str, Mark] = {
    mark.name: mark
    for mark in (
        Mark(
            "front",
            "Pareto front",
            "No other point has more of the one at no more of the other.",
            "●",
            "#00755a",
            "#46e0a8",
            "solid",
        ),
        Mark("beaten", "other points", "Another point is at least as good in both.", "○", "#34393f", "#d8e0e8", "none"),
        Mark(
            "unequal",
            "other outputs",
            "Its outputs are not those of the points that must have the same.",
            "✕",
            "#7a2404",
            "#f0844c",
            "dotted",
        ),
        Mark("failed", "not measured", "It has a reason instead of figures.", "–", "#994682", "#cc8fbe", "dashed"),
    )
}

MARKS = {**TOKENS, **BLOCKS, **STEPS, **PARTS, **GRAPHS, **PREFIXES, **POINTS}  # their names differ


def legend(marks: dict[str, Mark], counts: dict[str, int]) -> str:
    """The legend as HTML: only the kinds that occur, each with its sign, word and count."""
    items = "".join(
        f'<span class="pl-key" title="{escape(mark.meaning)}"><{mark.tag} class="pl-{mark.name} pl-sample" style="{mark.inline()}">'
        f'{mark.glyph or "ab"}</{mark.tag}> {mark.label} <span class="pl-n">{counts[mark.name]:,}</span></span> '
        for mark in marks.values()
        if counts.get(mark.name)
    )
    return f'<div class="pl-legend">{items}</div>'


def variables(used: Container[str] | None = None) -> str:
    """CSS custom properties `--pl-<kind>` for light themes, and for dark ones of JupyterLab, Notebook and VS Code.

    Args:
        used: names of the kinds that are wanted; None for all.
    """
    marks = [mark for mark in MARKS.values() if used is None or mark.name in used]
    if not marks:
        return ""
    light = "".join(f"--pl-{mark.name}:{mark.light};" for mark in marks)
    dark = "".join(f"--pl-{mark.name}:{mark.dark};" for mark in marks)
    return f'.power-lab{{{light}}}[data-jp-theme-light="false"] .power-lab,.vscode-dark .power-lab{{{dark}}}'


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))
