"""Small tokenizers for tests, as the metadata that a GGUF file would have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from power_lab.engine.tokenizer import BYTE, NORMAL, UNKNOWN, Tokenizer

CODE = {b: chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]}
CODE |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in CODE)}
CODE = dict(sorted(CODE.items()))
"""Byte -> its letter in byte-level code."""


def metadata(model: str, tokens: Sequence[str], types: Iterable[int], **keys: Any) -> dict[str, Any]:
    """GGUF metadata; `keys` are more keys below tokenizer.ggml, and `chat_template`. None leaves a key out."""
    named = {"model": model, "tokens": list(tokens), "token_type": np.array(list(types), np.int32)} | keys
    template = named.pop("chat_template", None)
    result = {f"tokenizer.ggml.{key}": value for key, value in named.items() if value is not None}
    return result if template is None else result | {"tokenizer.chat_template": template}


def byte_level(
    tokens: Sequence[str],
    types: Iterable[int],
    merges: Sequence[str] = (),
    pre: str = "gpt-2",
    *,
    bos_id: int | None = None,
    add_bos: bool | None = None,
    end_ids: Sequence[int] = (),
    chat_template: str | None = None,
) -> Tokenizer:
    """A byte-level tokenizer; end tokens are its eos, eot and eom."""
    ends = dict(zip(("eos_token_id", "eot_token_id", "eom_token_id"), end_ids, strict=False))
    keys = {"pre": pre, "merges": list(merges), "bos_token_id": bos_id, "add_bos_token": add_bos, **ends}
    return Tokenizer.from_gguf(metadata("gpt2", tokens, types, **keys, chat_template=chat_template))


def pieces(scored: Sequence[tuple[str, float]], extra: Sequence[tuple[str, int]] = (), **keys: Any) -> dict[str, Any]:
    """SentencePiece metadata: <unk>, the 256 bytes (byte b has id b + 1), scored pieces, then extra tokens with types."""
    tokens = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        *(text for text, _ in scored),
        *(text for text, _ in extra),
    ]
    types = [UNKNOWN, *[BYTE] * 256, *[NORMAL] * len(scored), *(kind for _, kind in extra)]
    scores = np.array([0.0] * 257 + [score for _, score in scored] + [0.0] * len(extra), np.float32)
    return metadata("llama", tokens, types, **{"scores": scores, "add_bos_token": False, "unknown_token_id": 0} | keys)
