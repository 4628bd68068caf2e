"""Text to token ids and back."""

from power_lab.engine.tokenizer.tokenizer import (
    CONTROL,
    MAX_MARKS,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
    Tokenizer,
)

__all__ = ["CONTROL", "MAX_MARKS", "NORMAL", "PRE_TOKENIZERS", "UNUSED", "USER_DEFINED", "Tokenizer"]
