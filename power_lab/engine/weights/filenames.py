"""How the files of a model are called: parts of a GGUF file, and folders in Hugging Face's layout."""

from __future__ import annotations

import re

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
COMPANIONS = (
    "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a Hugging Face folder that change what the model says, besides config and weights."""

_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def part_name(name: str) -> tuple[str, int, int] | None:
    """Stem, number (from 0) and count that the name of a part of a GGUF file states; None for any other name."""
    match = _PART.fullmatch(name)
    return None if match is None else (match["stem"], int(match["number"]) - 1, int(match["count"]))
