"""How text is cut into words before byte-level BPE merges them: one entry for each name that GGUF files use.

A name stands for the cuts that a model was trained with, stated in its tokenizer.json; GGUF files carry the name only.
llama.cpp's ids are the same with two exceptions, `tekken` and the `gpt-4o` group: it approximates their upper and lower case
letters by ASCII ones and leaves out combining marks, so Hindi, Thai or "Éa" come out otherwise than the models' own tokenizers have
it. Here the models' own cuts are used, so that a GGUF file and the SafeTensors folder of one model give the same ids.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging.

    Attributes:
        cuts: regular expressions, applied one after another; every match stands alone, and so does what lies between.
        whole_words: whether a piece that is in the vocabulary is taken whole, whatever the merges say.
        bos: whether a beginning-of-text token is put first when the file does not say.
    """

    cuts: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The library's pre-tokenizer, which also spells the words in byte-level code."""
        cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ASCII_SIGNS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_CLAUSE = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _cased(end: str) -> str:
    """Words that end before a capital which follows a small letter; `end` may follow each."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return rf"{before}[{_UPPER}]*[{_LOWER}]+{end}|{before}[{_UPPER}]+[{_LOWER}]*{end}"


GPT2 = rf"'(?:s|t|re|ve|m|ll|d)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_LINES}"
QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_SIGNS}|{_LINES}"
QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
TEKKEN = rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
GPT4O = rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
SEED = rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_ASCII_SIGNS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling", PreTokenizer((GPT2,))),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((LLAMA3,), whole_words=True, bos=True),
    ),
    ("minicpm5 glm4 glm5", PreTokenizer((LLAMA3,), whole_words=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open ufakzeka grok-2 bailingmoe bailingmoe2 llada-moe",
        PreTokenizer((QWEN2,)),
    ),
    ("qwen35", PreTokenizer((QWEN35,))),
    ("tekken", PreTokenizer((TEKKEN,), whole_words=True, bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((GPT4O,))),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(DEEPSEEK3)),
    ("seed-coder", PreTokenizer((SEED,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_CLAUSE,))),
    ("viking", PreTokenizer((_CLAUSE, r"\p{N}"))),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: rules for names, rules in _GROUPS for name in names.split()}
"""`tokenizer.ggml.pre` -> rules. Text is never normalised. Each was compared with llama.cpp on the tests' corpus."""


def known(pattern: str) -> bool:
    """Whether a tokenizer.json's regular expression is one of those above, or one of tiktoken's ways to write them.

    Oniguruma, which runs them, tries all ways to match, so an expression like `(a+)+b` takes a short text for ever, and there is no
    time limit to set. Which expressions are harmless cannot be seen from their form by any simple rule. So the known ones are
    known by their text, and others are refused; each of these takes time linear in the text.
    """
    return _plain(pattern) in _KNOWN


def _plain(pattern: str) -> str:
    """The same expression with characters for the escapes that some files use and others do not."""

    def char(found: re.Match[str]) -> str:
        code = found[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else {"r": "\r", "n": "\n"}.get(code, found[0])

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", char, pattern, flags=re.DOTALL)


_TIKTOKEN = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
    r"[0-9]",
    r"[0-9]{1,3}",
    r"\d{1,3}",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
)
_KNOWN = frozenset(
    _plain(cut) for cut in (*_TIKTOKEN, *(cut for rules in PRE_TOKENIZERS.values() for cut in rules.cuts))
)
