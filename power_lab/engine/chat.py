"""Chat templates of model files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja chat template with the texts of the model's special tokens."""

    source: str
    bos: str
    eos: str
