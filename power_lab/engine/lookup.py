"""Where a prompt would hit the prefix cache, and why it stops there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from power_lab.engine.inspection import LookupReport
from power_lab.engine.prefix import BLOCK_TOKENS, chain
from power_lab.engine.prefixes import Cache, Held
from power_lab.engine.tokenizer import Tokenizer

NAMESPACES = 64  # others that are searched


@dataclass(frozen=True, slots=True)
class _Stop:
    """Why a prompt is served no further: see `LookupReport`."""

    reason: str
    why: str
    differs_at: int | None = None
    nearest: int = -1


def look_up(cache: Cache, tokenizer: Tokenizer, tokens: Sequence[int], namespace: str) -> LookupReport:
    """As the scheduler would admit it now; nothing changes. tokens: at least one."""
    hashes = chain(cache.root(namespace), tokens, len(tokens) // BLOCK_TOKENS, [])
    hits = _hits(cache, hashes, len(tokens))
    served = len(hits) * BLOCK_TOKENS
    stop = _stop(cache, tokens, namespace, hashes, hits)
    return LookupReport(
        namespace=namespace,
        tokens=tuple(tokens),
        pieces=tuple(tokenizer.piece(token) for token in tokens),
        blocks=tuple(hit.block for hit in hits),
        hashes=tuple(digest.hex() for digest in hashes),
        served=served,
        computed=len(tokens) - served,
        stop=served,
        reason=stop.reason,
        why=stop.why,
        differs_at=stop.differs_at,
        nearest=stop.nearest,
        seconds_saved=cache.seconds(served),
    )


def _hits(cache: Cache, hashes: Sequence[bytes], count: int) -> list[Held]:
    """The longest run of held blocks; one token at least is left to compute."""
    hits: list[Held] = []
    if cache.reuse:
        for digest in hashes[: (count - 1) // BLOCK_TOKENS]:
            if digest not in cache.held:
                break
            hits.append(cache.held[digest])
    return hits


def _stop(cache: Cache, tokens: Sequence[int], namespace: str, hashes: Sequence[bytes], hits: Sequence[Held]) -> _Stop:
    served, full = len(hits) * BLOCK_TOKENS, (len(tokens) - 1) // BLOCK_TOKENS
    if not cache.reuse:
        return _Stop("off", "The prefix cache is off (prefix_cache=False).")
    if len(hits) == full:
        return _all_served(cache, tokens, hashes, served)
    elsewhere = _elsewhere(cache, tokens, namespace, len(hits))
    if elsewhere is not None:
        return elsewhere
    parent = hashes[len(hits) - 1] if hits else cache.root(namespace)
    differs = _differs(cache, tokens, served, parent)
    if differs is not None:
        return differs
    if hits:
        return _Stop("end", f"The cached prefix ends here: nothing is cached behind its {served} tokens.")
    return _Stop("miss", "No prefix is cached in this namespace that begins like this prompt.")


def _all_served(cache: Cache, tokens: Sequence[int], hashes: Sequence[bytes], served: int) -> _Stop:
    """All blocks that can be served are."""
    left = len(tokens) - served
    if left == BLOCK_TOKENS and hashes[-1] in cache.held:
        why = "The last token is always computed, and a block is served whole: the last block, though cached, is computed again."
        return _Stop("last-token", why, nearest=cache.held[hashes[-1]].block)
    if not served:
        why = f"A prompt of {len(tokens)} tokens has no block to serve: blocks are of {BLOCK_TOKENS} tokens and the last token is always"
        return _Stop("short", f"{why} computed.")
    if left == BLOCK_TOKENS:
        return _Stop(
            "last-token",
            "All blocks before the last one are cached; that one holds the last token, which is always computed.",
        )
    return _Stop("last-block", f"All its whole blocks are cached; the last {left} tokens fill none.")


def _elsewhere(cache: Cache, tokens: Sequence[int], namespace: str, hits: int) -> _Stop | None:
    """Another namespace that holds more of the prompt."""
    best, most = "", hits
    for other in [name for name in cache.namespaces if name != namespace][:NAMESPACES]:
        found = _hits(cache, chain(cache.root(other), tokens, len(tokens) // BLOCK_TOKENS, []), len(tokens))
        if len(found) > most:
            best, most = other, len(found)
    if most == hits:
        return None
    name = f"cache_key={best!r}" if best else "the default namespace"
    return _Stop(
        "namespace",
        f"{most * BLOCK_TOKENS} tokens of it are cached in {name}, and prefixes are shared only between equal keys.",
    )


def _differs(cache: Cache, tokens: Sequence[int], served: int, parent: bytes) -> _Stop | None:
    """The cached block that goes on most like the prompt does."""
    rest = tokens[served : served + BLOCK_TOKENS]
    following = [(_agreeing(rest, one.tokens), one) for one in cache.held.values() if one.parent == parent]
    if not following:
        return None
    alike, nearest = max(following, key=lambda found: (found[0], -found[1].block))
    if alike == len(rest):  # the prompt ends inside the block
        why = f"The prompt ends inside a cached block: {alike} of its {BLOCK_TOKENS} tokens are the same, and blocks are served whole."
        return _Stop("short", why, nearest=nearest.block)
    if not served and not alike:
        return None
    at = served + alike
    why = f"The next block differs at token {at}: {alike} of its {BLOCK_TOKENS} tokens are as in a cached block, which is served whole."
    return _Stop("differs", why, differs_at=at, nearest=nearest.block)


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
