"""The prefix inspector: what the cache holds, what it has saved, what goes next, and where a prompt would hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import traitlets

from power_lab.engine.vitals import LookupReport, PrefixNode, PrefixTree
from power_lab.errors import PowerLabError
from power_lab.widgets.figure import LEFT, meter
from power_lab.widgets.lookup import lookup_html
from power_lab.widgets.palette import PREFIXES, legend
from power_lab.widgets.picture import FAINT, INK, bars, path, svg, text
from power_lab.widgets.prefix_tree import Stretch, next_evictions, stretches
from power_lab.widgets.text import ago, count, nbytes, percent, seconds, stat, visible
from power_lab.widgets.view import View, Work, script

if TYPE_CHECKING:
    import xarray

    from power_lab.engine.request import Prompt
    from power_lab.jupyter.cancel import CancelToken

SCHEMA = "power-lab.prefixes/1"
KINDS = {"block": "KV block"}  # a kind without a name here is told by its own
_LISTED = 120  # stretches
_LINKS = 24  # blocks of a stretch
_NEXT = 8  # evictions told
_LONGEST_PROMPT = 1 << 20  # characters that a page may ask about


class Lookup(Protocol):
    """As `Engine.lookup`."""

    def __call__(
        self,
        prompt: Prompt,
        *,
        chat: bool | None = None,
        cache_key: str = "",
        cancelled: Callable[[], bool] | None = None,
    ) -> LookupReport: ...


class Prefixes(View):
    """The tree as a table, with a box that looks a prompt up.

    Args:
        read: gives the tree; look: where a prompt would hit. Both raise a PowerLabError when the engine is gone.
        live: ask again every second while the view can be seen.

    Attributes:
        found: the latest answer to a prompt.
        box: what the page's box says of it: prompt (text; "" and a note where it was something else), cache_key, whether it was raw text.
    """

    _esm = script("view", "lookup")

    rows = "node"
    askable = traitlets.Bool(True).tag(sync=True)
    box = traitlets.Dict().tag(sync=True)

    def __init__(self, read: Callable[[], PrefixTree], look: Lookup, live: bool = False) -> None:
        self._read, self._look = read, look
        self._tree = read()
        self.found: LookupReport | None = None
        super().__init__(refreshable=True, live=live)

    @property
    def tree(self) -> PrefixTree:
        """As it was read last."""
        return self._tree

    def lookup(self, prompt: Prompt, *, chat: bool | None = None, cache_key: str = "") -> LookupReport:
        """Where a prompt would hit now, shown by the view from now on. Arguments and errors as of `lab.engine.lookup`."""
        self.found = self._look(prompt, chat=chat, cache_key=cache_key)
        text = prompt if isinstance(prompt, str) and len(prompt) <= _LONGEST_PROMPT else ""
        self.box = {"prompt": text, "note": "" if text else _told(prompt), "cache_key": cache_key, "raw": chat is False}
        return self.found

    def asked(self, kind: str, content: dict[str, Any]) -> Work | None:
        return (lambda token: self._looked(content, token)) if kind == "lookup" else None

    def _looked(self, content: dict[str, Any], token: CancelToken) -> None:
        prompt, key, chat = content.get("prompt"), content.get("cache_key", ""), content.get("chat")
        if (
            not isinstance(prompt, str)
            or not isinstance(key, str)
            or len(prompt) > _LONGEST_PROMPT
            or not (chat is None or isinstance(chat, bool))
        ):
            self.send(
                {
                    "kind": "looked",
                    "html": "",
                    "message": f"A prompt is text of at most {_LONGEST_PROMPT:,} characters.",
                }
            )
            return
        try:
            found = self._look(prompt, chat=chat, cache_key=key, cancelled=lambda: token.cancelled)
            tree = self._read()
        except PowerLabError as error:
            token.check()
            self.send({"kind": "looked", "html": "", "message": str(error)})
            return
        with self.settled(token):
            self.found, self._tree = found, tree
            self.send({"kind": "looked", "html": self.body(), "message": found.why})

    @property
    def dataset(self) -> xarray.Dataset:
        """Dimension `node`, parents before children; `token` holds the ids, padded with -1."""
        import xarray

        nodes = self._tree.nodes
        widest = max((len(node.tokens) for node in nodes), default=0)
        tokens = np.full((len(nodes), widest), -1, np.int64)
        for at, node in enumerate(nodes):
            tokens[at, : len(node.tokens)] = node.tokens
        variables: dict[str, Any] = {
            name: (
                "node",
                np.array(
                    [_number(getattr(node, name)) if kind is np.float64 else getattr(node, name) for node in nodes],
                    dtype=kind,
                ),
                {"units": unit, "long_name": title},
            )
            for name, (kind, unit, title) in _COLUMNS.items()
        }
        variables["tokens"] = (("node", "token"), tokens, {"units": "1", "long_name": "token ids, padded with -1"})
        tree = self._tree
        told = (
            "block_tokens",
            "lookups",
            "hits",
            "tokens",
            "hit_tokens",
            "evictions",
            "free_blocks",
            "nbytes",
            "left_out",
        )
        attributes = {"schema": SCHEMA, **{name: getattr(tree, name) for name in told}}
        attributes |= {name: _number(getattr(tree, name)) for name in ("seconds_saved", "seconds_a_token")}
        at = np.arange(len(nodes))
        return xarray.Dataset(
            variables, {"node": ("node", at, {"units": "1", "long_name": "parents before children"})}, attributes
        )

    def summary(self) -> str:
        tree = self._tree
        if not tree.nodes:
            return "Prefixes: none is cached yet."
        saved = "" if tree.seconds_saved is None else f", {seconds(tree.seconds_saved)} saved"
        return (
            f"{count(len(tree.nodes) + tree.left_out, 'cached block')} in {nbytes(tree.nbytes)}: "
            f"{percent(tree.hit_tokens, tree.tokens)} of {count(tree.tokens, 'prompt token')} served{saved}"
        )

    def body(self) -> str:
        found = lookup_html(self.found, self._tree.block_tokens) if self.found is not None else ""
        return _body(self._tree, found)

    def picture(self) -> str:
        return _picture(stretches(self._tree)) if self._tree.nodes else ""

    def renew(self) -> str:
        self._tree = self._read()
        return self.body()


_COLUMNS: dict[str, tuple[Any, str, str]] = {
    "kind": (object, "1", "what the node is"),
    "block": (np.int64, "1", "block in the pool"),
    "hash": (object, "1", "chained digest"),
    "parent": (object, "1", "digest of the node before, empty at a root"),
    "depth": (np.int64, "block", "blocks before it"),
    "namespace": (object, "1", "cache key under which it was computed"),
    "piece": (object, "1", "its text"),
    "hits": (np.int64, "request", "requests that it served"),
    "tokens_saved": (np.int64, "token", "prompt tokens that it served"),
    "seconds_saved": (np.float64, "s", "by the engine's measured seconds a prompt token"),
    "age_s": (np.float64, "s", "since it was computed"),
    "last_hit_s": (np.float64, "s", "since it served last"),
    "refs": (np.int64, "request", "requests that hold it now"),
    "eviction": (np.int64, "1", "place in the order of eviction, -1 while it is held"),
    "nbytes": (np.int64, "byte", "over all layers"),
}


def _told(prompt: Prompt) -> str:
    """What was looked up, where no box of text can hold it."""
    if isinstance(prompt, str):
        return "a text too long for this box"
    messages = bool(prompt) and not isinstance(prompt[0], int)
    return f"a conversation of {count(len(prompt), 'message')}" if messages else count(len(prompt), "token id")


def _number(value: float | None) -> float:
    return np.nan if value is None else float(value)


def _body(tree: PrefixTree, found: str) -> str:
    if not tree.nodes:
        why = (
            f"A prompt leaves one for each {tree.block_tokens} of its tokens, so run a longer one, for example "
            '<code>lab.generate("The quick brown fox " * 40)</code>, and refresh.'
        )
        return f'<div class="pl-empty"><p><b>No prefix is cached yet.</b></p><p class="pl-note">{why}</p></div>{found}'
    lines = stretches(tree)
    held = Counter(_state(tree, node) for node in tree.nodes)
    return _head(tree) + found + legend(PREFIXES, held) + _table(tree, lines) + _evictions(tree)


def _state(tree: PrefixTree, node: PrefixNode) -> str:
    """Free blocks are taken before any is evicted: only what goes among the next few is marked as going."""
    return "held" if node.eviction < 0 else "next" if tree.free_blocks + node.eviction < _NEXT else "kept"


def _head(tree: PrefixTree) -> str:
    saved = "–" if tree.seconds_saved is None else seconds(tree.seconds_saved)
    each = (
        "not measured yet"
        if tree.seconds_a_token is None
        else f"{seconds(tree.seconds_a_token)} a prompt token, as measured"
    )
    return (
        '<div class="pl-head">'
        + stat(
            percent(tree.hit_tokens, tree.tokens),
            "of prompt tokens served",
            f"{tree.hit_tokens:,} of {tree.tokens:,} since the engine began",
        )
        + stat(
            percent(tree.hits, tree.lookups),
            "of requests",
            f"{tree.hits:,} of {tree.lookups:,} requests were served something",
        )
        + stat(saved, "saved", each)
        + stat(
            f"{len(tree.nodes) + tree.left_out:,}", "blocks held", f"{count(tree.evictions, 'block')} evicted so far"
        )
        + stat(
            nbytes(tree.nbytes),
            "of KV",
            f"{count(tree.free_blocks, 'free block')} are taken before any of these is evicted",
        )
        + "</div>"
    )


def _table(tree: PrefixTree, lines: list[Stretch]) -> str:
    most = max((line.tokens_saved for line in lines), default=0)
    columns = (
        ("Prefix", "text of the blocks, below the prefix that they go on from", True),
        ("Blocks", f"blocks of {tree.block_tokens} tokens, in order", True),
        ("Hits", "requests that it served", False),
        ("Tokens saved", "prompt tokens that it served", False),
        ("Time saved", "by the engine's measured seconds a prompt token", False),
        ("Bytes", "of KV", False),
        ("Age", "since it was computed; and since it served last", False),
        (
            "Evicted",
            "place in the order of eviction, which begins when no block is free; a dash while a request holds it",
            False,
        ),
    )
    head = "".join(
        f'<th scope="col" title="{escape(title)}"{LEFT if left else ""}>{name}</th>' for name, title, left in columns
    )
    namespaces = len({node.namespace for node in tree.nodes}) > 1
    body = "".join(_line(tree, line, most, namespaces) for line in lines[:_LISTED])
    more = ""
    if len(lines) > _LISTED or tree.left_out:
        parts = (
            [count(len(lines) - _LISTED, "more stretch").replace("stretchs", "stretches")]
            if len(lines) > _LISTED
            else []
        )
        parts += [f"{count(tree.left_out, 'block')} far from the roots"] if tree.left_out else []
        more = f'<p class="pl-note">{" and ".join(parts)} not listed.</p>'
    return (
        '<div class="pl-scroll" tabindex="0" role="region" aria-label="Prefix tree" style="max-height:30em;overflow:auto">'
        f'<table class="pl-rounds pl-prefixes"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'
    )


def _line(tree: PrefixTree, line: Stretch, most: int, namespaces: bool) -> str:
    piece = "".join(node.piece for node in line.nodes[:2])
    begin = line.alike - 4 if line.alike > 12 and line.alike < len(piece) else 0  # where it parts from its siblings
    name = ("…" if begin else "") + visible(piece[begin : begin + 44]) if piece else f"<i>{line.first.hash[:8]}</i>"
    if namespaces and not line.level:
        name = f"<b>{escape(line.first.namespace or 'default')}</b> {name}"
    links = "".join(_link(tree, node) for node in line.nodes[:_LINKS])
    more = f"<small>and {len(line.nodes) - _LINKS:,} more</small>" if len(line.nodes) > _LINKS else ""
    age = ago(line.age_s) + ("" if line.last_hit_s is None else f" · {ago(line.last_hit_s)}")
    saved = "–" if line.seconds_saved is None or not line.hits else seconds(line.seconds_saved)
    bar = meter(line.tokens_saved / most, "served", 5) if line.tokens_saved else ""
    first = line.eviction == 0 and not tree.free_blocks
    eviction = "–" if line.eviction < 0 else "next" if first else f"{line.eviction + 1:,}."
    return (
        f'<tr><th scope="row" class="pl-left pl-piece" title="{escape(piece[:400])}"><span class="pl-lead">{line.lead}</span>{name}</th>'
        f'<td class="pl-left pl-links">{links}{more}</td><td>{line.hits or "–"}</td><td>{bar}{line.tokens_saved or "–"}</td>'
        f"<td>{saved}</td><td>{nbytes(line.nbytes)}</td><td>{age}</td><td>{eviction}</td></tr>"
    )


def _link(tree: PrefixTree, node: PrefixNode) -> str:
    mark, begin = PREFIXES[_state(tree, node)], node.depth * tree.block_tokens
    facts = [
        f"{KINDS.get(node.kind, node.kind)} {node.block}: {mark.label}",
        f"tokens {begin:,} to {begin + max(0, len(node.tokens) - 1):,}" if node.tokens else f"{node.depth} before it",
        f"{count(node.hits, 'hit')}",
        f"held by {count(node.refs, 'request')}" if node.refs else _place(tree, node),
        f"hash {node.hash[:8]}",
    ]
    title = escape(" · ".join(facts))
    return f'<span class="pl-t pl-{mark.name}" style="{mark.inline()}" title="{title}">{mark.glyph}\u202f{node.block}</span> '


def _place(tree: PrefixTree, node: PrefixNode) -> str:
    free = f", after {count(tree.free_blocks, 'free block')}" if tree.free_blocks else ""
    return f"evicted as number {node.eviction + 1:,}{free}"


def _evictions(tree: PrefixTree) -> str:
    first = next_evictions(tree.nodes, _NEXT)
    if not first:
        return '<p class="pl-note">All blocks are held by requests: none can be evicted.</p>'
    links = "".join(_link(tree, node) for node in first)
    before = (
        f"after {count(tree.free_blocks, 'free block')} are used up"
        if tree.free_blocks
        else "as soon as a request needs a block"
    )
    return f'<p class="pl-next"><b>Next evictions</b> <small>({before})</small> {links}</p>'


def _picture(lines: list[Stretch]) -> str:
    """The tree for a document: a bar for each stretch, as long as its tokens, as dark as its hits."""
    shown, row, left = lines[:60], 18, 8
    longest = max(node.depth + 1 for line in lines for node in line.nodes)
    most = max(1, max(line.hits for line in lines))
    scale = 420 / longest
    parts = []
    for at, line in enumerate(shown):
        box = bars([(left + line.first.depth * scale, 6 + at * row, max(2.0, len(line.nodes) * scale - 1), row - 6)])
        parts.append(
            path(
                box,
                f"fill='{PREFIXES['served'].light}' fill-opacity='{0.15 + 0.85 * line.hits / most:.2f}' stroke='{FAINT}'",
            )
        )
        label = (
            f"{line.tokens:,} tokens, {count(line.hits, 'hit')}: {''.join(node.piece for node in line.nodes[:1])[:28]}"
        )
        parts.append(text(left + 430, 6 + at * row + row - 8, " ".join(label.split()), f"fill='{INK}'"))
    return svg(760, 12 + len(shown) * row, "".join(parts))
