"""A prompt against the prefix cache, as HTML: what is served, what is computed, where it stops and why."""

from __future__ import annotations

from html import escape

from power_lab.engine.vitals import LookupReport
from power_lab.widgets.palette import PREFIXES, legend
from power_lab.widgets.text import count, percent, seconds, visible

_HEAD, _AROUND = 12, 40  # tokens shown from the beginning, and on either side of where it stops


def lookup_html(found: LookupReport, block_tokens: int) -> str:
    """The answer; long prompts show their beginning and what lies around the stop."""
    saved = "" if found.seconds_saved is None or not found.served else f", which saves {seconds(found.seconds_saved)}"
    where = f"cache_key={found.namespace!r}" if found.namespace else "default namespace"
    share = percent(found.served, len(found.tokens))
    told = f"{found.served:,} of {count(len(found.tokens), 'token')} would be served ({share}){saved}."
    counts = {"served": found.served, "computed": found.computed}
    return (
        f'<div class="pl-found" role="group" aria-label="Lookup"><p class="pl-title">Lookup <small>· {escape(where)}</small></p>'
        f'<p><b>{told}</b> <span class="pl-why">{escape(found.why)}</span></p>{legend(PREFIXES, counts)}'
        f'<div class="pl-scroll pl-strip" tabindex="0" role="region" aria-label="Tokens of the prompt"'
        f' style="max-height:12em;overflow:auto">'
        f"{_strip(found, block_tokens)}</div></div>"
    )


def _strip(found: LookupReport, block_tokens: int) -> str:
    stop = found.differs_at if found.differs_at is not None else found.stop
    low, high = max(0, min(found.stop, stop) - _AROUND), min(len(found.tokens), max(found.stop, stop) + _AROUND)
    shown = [*range(min(_HEAD, low)), *range(low, high)]
    parts, before = [], -1
    for at in shown:
        if at != before + 1:
            parts.append(_gap(at - before - 1))
        if at % block_tokens == 0:
            parts.append(_block(found, at // block_tokens))
        if at == found.stop:
            parts.append(f'<span class="pl-stop" title="{escape(found.why)}">▲ stops here</span> ')
        parts.append(_token(found, at, block_tokens))
        before = at
    if before + 1 < len(found.tokens):
        parts.append(_gap(len(found.tokens) - before - 1))
    return "".join(parts)


def _gap(amount: int) -> str:
    return f'<span class="pl-note">… {count(amount, "token")} …</span> '


def _block(found: LookupReport, at: int) -> str:
    if at < len(found.blocks):
        block = found.blocks[at]
        return f'<small class="pl-edge" title="block {at} of the prompt is block {block} of the pool">#{block}</small> '
    return f'<small class="pl-edge" title="block {at} of the prompt is not served">|</small> '


def _token(found: LookupReport, at: int, block_tokens: int) -> str:
    mark = PREFIXES["served" if at < found.served else "computed"]
    facts = [f"token {at:,}: {mark.label}", f"id {found.tokens[at]}", f"block {at // block_tokens} of the prompt"]
    differs = ""
    if at == found.differs_at:
        facts.append("the first one that differs from the closest cached block")
        differs = " pl-differs"
    piece = found.pieces[at] if at < len(found.pieces) else ""
    return f'<span class="pl-t pl-{mark.name}{differs}" style="{mark.inline()}" title="{escape(" · ".join(facts))}">{visible(piece)}</span>'
