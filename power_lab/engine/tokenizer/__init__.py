"""Text to token ids and back: byte-level BPE, SentencePiece BPE and unigram, out of GGUF files and model folders."""

from power_lab.engine.tokenizer.pretokenizers import PRE_TOKENIZERS
from power_lab.engine.tokenizer.tokenizer import Tokenizer
from power_lab.engine.tokenizer.vocabulary import BYTE, CONTROL, MAX_MARKS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

__all__ = [
    "BYTE",
    "CONTROL",
    "MAX_MARKS",
    "NORMAL",
    "PRE_TOKENIZERS",
    "UNKNOWN",
    "UNUSED",
    "USER_DEFINED",
    "Tokenizer",
]
