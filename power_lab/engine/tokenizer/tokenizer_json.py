"""The parts of a tokenizer.json that are known, as types: what does not fit them is refused by its place in the file.

The file describes a pipeline of the `tokenizers` library. It is not handed over as it is: many parts of that library can be made
to run for hours or to fill memory (regular expressions, replacements that grow), and some depend on chance (dropout).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from power_lab.engine.weights.mapped import read_bounded
from power_lab.errors import TokenizerError

MAX_BYTES = 1 << 26  # Gemma's has 33 MB
MAX_QUOTES = 1 << 23  # bounds the strings before any is made; Gemma's has 2.6 million


class _Part(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """A part that says its type. Fields that change nothing here are taken as they are (Any)."""


class Pattern(msgspec.Struct, forbid_unknown_fields=True):
    """What to look for: either a text or a regular expression."""

    string: str | None = msgspec.field(default=None, name="String")
    regex: str | None = msgspec.field(default=None, name="Regex")


class Nfc(_Part, tag="NFC"):
    """Unicode normalisation; so are the next three."""


class Nfd(_Part, tag="NFD"): ...


class Nfkc(_Part, tag="NFKC"): ...


class Nfkd(_Part, tag="NFKD"): ...


class Prepend(_Part, tag="Prepend"):
    prepend: str


class Replace(_Part, tag="Replace"):
    pattern: Pattern
    content: str


class Precompiled(_Part, tag="Precompiled"):
    precompiled_charsmap: bytes  # base64 in the file


class StripSpaces(_Part, tag="Strip"):
    strip_left: bool
    strip_right: bool


class Normalizers(_Part, tag="Sequence"):
    normalizers: list[Nfc | Nfd | Nfkc | Nfkd | Prepend | Replace | Precompiled | StripSpaces]


Normalizer = Nfc | Nfd | Nfkc | Nfkd | Prepend | Replace | Precompiled | StripSpaces | Normalizers


class Split(_Part, tag="Split"):
    pattern: Pattern
    behavior: Literal["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
    invert: bool = False


class ByteLevelPart(_Part, tag="ByteLevel"):
    """Also a decoder and a post-processor, where none of the fields matters."""

    add_prefix_space: bool = True
    trim_offsets: Any = True
    use_regex: bool = True


class Digits(_Part, tag="Digits"):
    individual_digits: bool = False


class Punctuation(_Part, tag="Punctuation"):
    behavior: Literal["Isolated", "Contiguous"] = "Isolated"


class WhitespaceSplit(_Part, tag="WhitespaceSplit"): ...


class Metaspace(_Part, tag="Metaspace"):
    """Also a decoder. `str_rep` and `add_prefix_space` are of older files."""

    replacement: Literal["\u2581"] = "\u2581"
    prepend_scheme: Literal["always", "first", "never"] = "always"
    split: bool = True
    add_prefix_space: bool | None = None
    str_rep: Any = None


SinglePreTokenizer = Split | ByteLevelPart | Digits | Punctuation | WhitespaceSplit | Metaspace


class PreTokenizers(_Part, tag="Sequence"):
    pretokenizers: list[SinglePreTokenizer]


class ByteFallback(_Part, tag="ByteFallback"): ...


class Fuse(_Part, tag="Fuse"): ...


class Strip(_Part, tag="Strip"):
    content: str
    start: int
    stop: int


SingleDecoder = ByteLevelPart | Metaspace | Replace | ByteFallback | Fuse | Strip


class Decoders(_Part, tag="Sequence"):
    decoders: list[SingleDecoder]


class Template(_Part, tag="TemplateProcessing"):
    """`single`: parts with one key, SpecialToken or Sequence, around one text."""

    single: list[dict[Literal["SpecialToken", "Sequence"], dict[str, Any]]]
    pair: Any = None
    special_tokens: Any = None


class Processors(_Part, tag="Sequence"):
    processors: list[Template | ByteLevelPart]


class Bpe(_Part, tag="BPE"):
    vocab: dict[str, int]
    merges: list[tuple[str, str] | str]
    dropout: None = None
    unk_token: str | None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class Unigram(_Part, tag="Unigram"):
    vocab: list[tuple[str, float]]
    unk_id: int | None = None
    byte_fallback: bool = False


class AddedToken(msgspec.Struct, forbid_unknown_fields=True):
    """A token that is found in text as it is written; `normalized` is not followed: the text is searched before normalising."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class TokenizerJson(msgspec.Struct, forbid_unknown_fields=True):
    """The file. `truncation` and `padding` are not followed: prompts are neither cut nor filled."""

    model: Bpe | Unigram
    added_tokens: list[AddedToken] = []
    normalizer: Normalizer | None = None
    pre_tokenizer: SinglePreTokenizer | PreTokenizers | None = None
    post_processor: Template | ByteLevelPart | Processors | None = None
    decoder: SingleDecoder | Decoders | None = None
    version: Any = None
    truncation: Any = None
    padding: Any = None


def parse(path: Path) -> TokenizerJson:
    """Read a tokenizer.json. Raises TokenizerError naming the place that is wrong or not supported, ModelFileError for
    a file that cannot be read or is too large."""
    data = read_bounded(path, MAX_BYTES)
    if data.count(b'"') > MAX_QUOTES:
        raise TokenizerError(f"{path}: holds more than {MAX_QUOTES // 2} texts.")
    try:
        return msgspec.json.decode(data, type=TokenizerJson)
    except msgspec.ValidationError as error:
        raise TokenizerError(f"{path}: {error}.", "Power Lab does not support this kind of tokenizer.") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise TokenizerError(f"{path}: is not sound JSON: {error}.", "Fetch it again.") from None
