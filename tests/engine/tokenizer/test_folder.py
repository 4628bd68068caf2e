"""Hugging Face folders: the ids of the `tokenizers` library itself, and every other description refused by its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Engine

from power_lab.engine.tokenizer import Tokenizer
from power_lab.errors import PowerLabError, TokenizerError
from tests.engine.tokenizer import folders
from tests.engine.tokenizer.corpus import TEXTS
from tests.engine.tokenizer.test_unigram import TABLE, compiled

MORE = ["<s>a</s><|x|> b <tool>c<strip>  d<|x|>", " <|x|>", "e\u0301\u212b", "<tool><tool> <strip>\n\n<strip>"]
GRAPHEMES = {key: text for key, text in TABLE.items() if key not in ("ab", "abc")}  # the library looks at no others
Maker = Callable[[Path], Path]


@pytest.fixture(scope="session")
def ranked() -> tuple[dict[str, int], list[tuple[str, str]]]:
    return folders.trained_pieces()


KINDS = [
    "Qwen2Tokenizer",
    "GPT2Tokenizer",
    "CohereTokenizer",
    "LlamaTokenizer",
    "GemmaTokenizer",
    "legacy",
    "unigram",
    "charsmap",
]


@pytest.fixture(scope="session")
def makers(
    uncut_bpe: tuple[list[str], list[str]], ranked: tuple[dict[str, int], list[tuple[str, str]]]
) -> dict[str, Maker]:
    def byte_level(kind: str) -> Maker:
        return lambda folder: folders.byte_level(kind, folder, *uncut_bpe)

    def pieces(kind: str) -> Maker:
        return lambda folder: folders.pieces(kind, folder, *ranked)

    return {
        **{kind: byte_level(kind) for kind in KINDS[:3]},
        **{kind: pieces(kind) for kind in KINDS[3:5]},
        "legacy": lambda folder: folders.legacy_llama(folder, *ranked),
        "unigram": folders.unigram,
        "charsmap": lambda folder: folders.unigram(folder, compiled(GRAPHEMES)),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys(makers: dict[str, Maker], kind: str, tmp_path: Path) -> None:
    folder = makers[kind](tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    engine = Engine.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.vocab_size == engine.get_vocab_size()
    for text in [*TEXTS, *MORE]:
        for special in (True, False):
            engine.encode_special_tokens = not special
            wanted = engine.encode(text).ids
            if wanted[:2] == [tokenizer.bos_id] * 2:
                del wanted[0]
            if kind in ("unigram", "charsmap") and not special and any(name in text for name in folders.SPECIAL):
                continue  # the library's unigram makes special tokens of plain text
            assert tokenizer.encode(text, special=special, bos=True) == wanted, text


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_never_makes_a_special_token(makers: dict[str, Maker], kind: str, tmp_path: Path) -> None:
    folder = makers[kind](tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    if described["model"]["type"] == "BPE":
        vocab = described["model"]["vocab"]
        letters = [letter for letter in "</s>" if letter in vocab]
        vocab |= {"</": len(vocab) + 9, "</s": len(vocab) + 10}
        described["model"]["merges"] = [["<", "/"], ["</", "s"], ["</s", ">"], *described["model"]["merges"]]
        assert letters == list("</s>")
        folders.edit(folder, model=described["model"])
    tokenizer = Tokenizer.from_folder(folder)
    end = next(iter(tokenizer.end_ids))
    assert end in tokenizer.special_ids
    typed = tokenizer.encode("a</s>", special=False, bos=True)
    assert end not in typed and tokenizer.decode(typed) == "a</s>"
    assert tokenizer.encode("a</s>", special=True, bos=True)[-1] == end


def test_facts_of_a_folder(makers: dict[str, Maker], tmp_path: Path) -> None:
    folder = makers["legacy"](tmp_path)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.end_ids, tokenizer.space_prefix) == (1, True, {2}, True)
    assert tokenizer.special_ids == {0, 1, 2, tokenizer.vocab_size - 3} and tokenizer.chat_template is None
    folders.edit(folder, "generation_config.json", eos_token_id=[2, tokenizer.vocab_size - 3])
    folders.edit(folder, "tokenizer_config.json", add_bos_token=False, chat_template="{{ eos_token }}a")
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.add_bos and tokenizer.end_ids == {2, tokenizer.vocab_size - 3}
    assert tokenizer.chat_template is not None and tokenizer.chat_template.eos == "</s>"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}é")
    template = Tokenizer.from_folder(folder).chat_template
    assert template is not None and template.bos == "<s>"
    assert template.render([{"role": "user", "content": "x"}]) == "<s>é"


def test_tokens_are_named_by_the_map_where_the_config_does_not(makers: dict[str, Maker], tmp_path: Path) -> None:
    folder = makers["legacy"](tmp_path)
    (folder / "tokenizer_config.json").unlink()
    folders.edit(folder, "special_tokens_map.json", bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>")
    folders.edit(folder, "generation_config.json", eos_token_id=0)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.end_ids) == (1, {0, 2})


def test_ids_that_no_token_has_are_unused(makers: dict[str, Maker], tmp_path: Path) -> None:
    folder = makers["GPT2Tokenizer"](tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    size = Tokenizer.from_folder(folder).vocab_size
    described["added_tokens"].append(described["added_tokens"][-1] | {"id": size + 5, "content": "<far>"})
    tokenizer = Tokenizer.from_folder(folders.edit(folder, added_tokens=described["added_tokens"]))
    assert tokenizer.vocab_size == size + 6 and tokenizer.token_bytes(size + 2) == b""
    assert tokenizer.encode("<far>", special=False, bos=False) == [size + 5]


def test_merges_may_make_user_defined_tokens(makers: dict[str, Maker], tmp_path: Path) -> None:
    """Files list runs of spaces as added tokens, spelled as merging spells them."""
    folder = makers["GPT2Tokenizer"](tmp_path)
    described = json.loads((folder / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    run = vocab.setdefault("ĠĠ", 9000)
    described["model"]["merges"].insert(0, ["Ġ", "Ġ"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    added = [*described["added_tokens"], {"id": run, "content": "ĠĠ", **flags}]
    folders.edit(folder, model=described["model"], added_tokens=added)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("    \n  ", special=False, bos=False)
    assert run in ids and tokenizer.decode(ids) == "    \n  " and tokenizer.token_bytes(run) == b"  "
    assert ids == Engine.from_file(str(folder / "tokenizer.json")).encode("    \n  ", add_special_tokens=False).ids


HOSTILE_SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BEGIN, TEXT = [{"SpecialToken": {"id": "<s>"}}], [{"Sequence": {"id": "A"}}]
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "normalizer": (
        "GPT2Tokenizer",
        {"normalizer": {"type": "BertNormalizer"}},
        r"'BertNormalizer' - at `\$.normalizer",
    ),
    "lowercase": ("GPT2Tokenizer", {"normalizer": {"type": "Lowercase"}}, "Lowercase"),
    "charsmap": (
        "unigram",
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "normalizer: 3 bytes",
    ),
    "charsmap late": (
        "unigram",
        {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": ""}],
            }
        },
        "Precompiled",
    ),
    "growing": (
        "legacy",
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}},
        "normalizer: ",
    ),
    "prepend": ("legacy", {"normalizer": {"type": "Prepend", "prepend": "x" * 9}}, "normalizer: Prepend"),
    "spaces stay": ("legacy", {"normalizer": None}, "leaves spaces"),
    "regex": (
        "GPT2Tokenizer",
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [HOSTILE_SPLIT, BYTE_LEVEL]}},
        "a.+b",
    ),
    "prefix": ("GPT2Tokenizer", {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, "add_prefix_space=True"),
    "unknown field": ("GPT2Tokenizer", {"pre_tokenizer": BYTE_LEVEL | {"x": 1}}, "unknown field `x`"),
    "pre_tokenizer": ("GPT2Tokenizer", {"pre_tokenizer": {"type": "BertPreTokenizer"}}, "BertPreTokenizer"),
    "decoder": ("GPT2Tokenizer", {"decoder": {"type": "Metaspace"}}, "decoder: "),
    "decoder unknown": ("GPT2Tokenizer", {"decoder": {"type": "CTC"}}, "'CTC'"),
    "pieces decoder": ("legacy", {"decoder": {"type": "Fuse"}}, "decoder: "),
    "post_processor": ("GPT2Tokenizer", {"post_processor": {"type": "BertProcessing"}}, "BertProcessing"),
    "no text": ("legacy", {"post_processor": {"type": "TemplateProcessing", "single": []}}, "post_processor: "),
    "two before": (
        "legacy",
        {"post_processor": {"type": "TemplateProcessing", "single": [*BEGIN, *BEGIN, *TEXT]}},
        "post_",
    ),
    "unknown before": (
        "legacy",
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<y>"}}, *TEXT]}},
        "post_processor: ",
    ),
    "model": ("GPT2Tokenizer", {"model": {"type": "WordPiece", "vocab": {}}}, "'WordPiece'"),
    "no model": ("GPT2Tokenizer", {"model": None}, "missing required field `model`"),
    "top": ("GPT2Tokenizer", {"surprise": 1}, "unknown field `surprise`"),
}


@pytest.mark.parametrize("case", BAD)
def test_unknown_parts_are_refused_by_name(makers: dict[str, Maker], case: str, tmp_path: Path) -> None:
    kind, change, said = BAD[case]
    folder = makers[kind](tmp_path)
    Tokenizer.from_folder(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if change == {"model": None}:
        folders.edit(folder, model=None)
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_folder(folder)


MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "dropout"),
    "suffix": ({"end_of_word_suffix": "</w>"}, "end_of_word_suffix"),
    "merge": ({"merges": [["a", "nothing"]]}, r"model.merges\[0\]: 'a' and 'nothing'"),
    "merge form": ({"merges": [["a"]]}, "merges"),
    "id below": ({"vocab": {"a": -1}}, "ids go from -1"),
    "id beyond": ({"vocab": {"a": 1 << 70}}, "ids go from"),
    "id far": ({"vocab": {"a": 1 << 30}}, "ids go from"),
    "id text": ({"vocab": {"a": "0"}}, "Expected `int`"),
    "id shared": ({"vocab": {"a": 5, "b": 5}, "merges": []}, "id 5 is of 'a' and of 'b'"),
    "code": ({"vocab": {"a b": 5}, "merges": []}, "'a b'. is not in byte-level code"),
    "bytes": ({"byte_fallback": True}, "byte_fallback"),
}


def test_an_added_token_that_comes_twice_is_refused(makers: dict[str, Maker], tmp_path: Path) -> None:
    folder = makers["legacy"](tmp_path)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    with pytest.raises(TokenizerError, match="added_tokens: '<s>' comes twice"):
        Tokenizer.from_folder(folders.edit(folder, added_tokens=[added[1], *added]))


@pytest.mark.parametrize("case", MODEL)
def test_unusable_models_are_refused(makers: dict[str, Maker], case: str, tmp_path: Path) -> None:
    change, said = MODEL[case]
    folder = makers["GPT2Tokenizer"](tmp_path)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    folders.edit(folder, model=model | change, added_tokens=[])
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_folder(folder)


BESIDE: dict[str, tuple[str, dict[str, Any], str]] = {
    "eos unknown": ("tokenizer_config.json", {"eos_token": "<nothing>"}, "eos_token"),
    "eos number": ("tokenizer_config.json", {"eos_token": 2}, "eos_token"),
    "add_bos": ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token"),
    "bos other": ("tokenizer_config.json", {"bos_token": "</s>"}, "puts '<s>' first"),
    "template": ("tokenizer_config.json", {"chat_template": 5}, "chat_template"),
    "templates": ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template"),
    "end beyond": ("generation_config.json", {"eos_token_id": 1 << 40}, "eos_token_id: 1099511627776 is outside"),
    "end text": ("generation_config.json", {"eos_token_id": ["2"]}, "eos_token_id"),
    "ends": ("generation_config.json", {"eos_token_id": [2] * 1000}, "eos_token_id"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_unusable_settings_are_refused(makers: dict[str, Maker], case: str, tmp_path: Path) -> None:
    name, change, said = BESIDE[case]
    folder = folders.edit(makers["legacy"](tmp_path), name, **change)
    with pytest.raises(TokenizerError, match=said) as error:
        Tokenizer.from_folder(folder)
    assert name in str(error.value)


def test_unsound_files_are_refused(makers: dict[str, Maker], tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    folder = makers["legacy"](tmp_path)
    whole = (folder / "tokenizer.json").read_bytes()
    for bad in (b"", b"[" * 100_000, b'{"a":' * 100_000, whole[:-9], whole.replace(b"<tool>", b"\xff"), b"[]"):
        (folder / "tokenizer.json").write_bytes(bad)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    with pytest.raises(PowerLabError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)
