"""Prefix identity: chained digests of token blocks under a tagged root. No torch.

A block's digest names everything that its KV contents depend on: the root (model, KV layout, mode, arithmetic, namespace) and all
tokens from position 0 to its end. In exact mode equal digests mean bit-equal contents.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from blake3 import blake3

from power_lab.engine.trace import EngineFacts
from power_lab.errors import ConfigError

BLOCK_TOKENS = 64
KV_LAYOUT = "f32 pages v1"
_DOMAIN = "power-lab 2026-11 prefix chain v1"


def root(parts: Mapping[str, str]) -> bytes:
    """Digest of what all blocks of a cache depend on; tags and lengths keep the parts apart."""
    hasher = blake3(derive_key_context=_DOMAIN)
    for tag, value in sorted(parts.items()):
        for text in (tag.encode(), value.encode()):
            hasher.update(struct.pack("<Q", len(text)))
            hasher.update(text)
    return hasher.digest()


def model_root(facts: EngineFacts, namespace: str) -> bytes:
    """The root of what one engine's model computes in a namespace. Adapters are part of it before there are any."""
    parts = {"model": facts.sha256, "adapter": "", "kv": KV_LAYOUT, "mode": facts.mode, "digest": facts.digest}
    return root({**parts, "namespace": namespace})


def extend(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of the block that follows `parent` and holds `tokens` (exactly `BLOCK_TOKENS` of them)."""
    if len(tokens) != BLOCK_TOKENS:
        raise ValueError(f"a block holds {BLOCK_TOKENS} tokens, not {len(tokens)}")
    return blake3(parent + struct.pack(f"<{BLOCK_TOKENS}i", *tokens), derive_key_context=_DOMAIN).digest()


def chain(start: bytes, tokens: Sequence[int], blocks: int, known: list[bytes]) -> list[bytes]:
    """Extend `known` in place to the digests of the first `blocks` blocks of `tokens`, and return it."""
    while len(known) < blocks:
        at = len(known) * BLOCK_TOKENS
        known.append(extend(known[-1] if known else start, tokens[at : at + BLOCK_TOKENS]))
    return known


def check_namespace(key: str) -> str:
    """Validate a caller's cache key. Raises ConfigError."""
    bad = any(ord(c) < 32 or ord(c) == 127 or 0xD800 <= ord(c) <= 0xDFFF for c in key)  # a lone surrogate has no UTF-8
    if len(key) > 256 or key.strip() != key or bad:
        raise ConfigError(
            "cache_key", "must be at most 256 characters, trimmed and free of control characters and surrogates"
        )
    return key
