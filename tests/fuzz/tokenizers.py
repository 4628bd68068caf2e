"""Mutated tokenizers: GGUF metadata and Hugging Face folders. Run at length: bench/fuzz.py --module tests.fuzz.tokenizers.

What loads must hold every tokenizer's rules, and folders must give the ids of the `tokenizers` library on the same mutated file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Engine

from power_lab.engine.detokenizer import StreamDecoder
from power_lab.engine.tokenizer import CONTROL, NORMAL, USER_DEFINED, Tokenizer
from power_lab.errors import ModelFileError, TokenizerError
from tests.engine.tokenizer import toys
from tests.engine.tokenizer.test_unigram import TABLE, compiled, t5
from tests.fuzz.files import EDGES, mutate_bytes, mutate_json
from tests.fuzz.targets import AGREED, REFUSED, Case, Disagreement, fresh

LOADED = "loaded, and holds the rules"
UNLIKE = "loaded; the library refuses it"
OTHER_IDS = "loaded; the library gives added tokens other ids than the file does"

TEXTS = ["", "abab baab", " a  b ", "<s>a</s><x> b<tool>c", "é🎉\u2581\n", "aaaaaaa", "ab12 3", "\0\ufdd0"]
PIECES = ["a", "b", "ab", "ba", "abab", "▁", "▁a", "▁ab", "▁▁", "é", "<", "s>", "c", "aa", "aaaa"]
EXTRA = [("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", USER_DEFINED), ("<x>", CONTROL)]


def metadata() -> list[dict[str, Any]]:
    """One of each model."""
    ends = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True, "chat_template": "{{ messages }}"}
    merged = ["ab", "ba", "abab", "Ġa"]
    tokens = [*toys.CODE.values(), *merged, *(name for name, _ in EXTRA)]
    types = [NORMAL] * (256 + len(merged)) + [kind for _, kind in EXTRA]
    merges = ["a b", "b a", "ab ab", "Ġ a"]
    scored = [(piece, -float(index)) for index, piece in enumerate(PIECES)]
    table = np.frombuffer(compiled(TABLE), np.uint8)
    return [
        toys.metadata("gpt2", tokens, types, pre="qwen2", merges=merges, **ends),
        toys.pieces(scored, EXTRA, **ends),
        t5(scored, precompiled_charsmap=table, add_space_prefix=True),
    ]


def gguf_metadata(folder: Path) -> Case:
    """The keys below `tokenizer.`, as a GGUF reader hands them over: of any type, length and value."""
    sound = metadata()

    def case(seed: int) -> str:
        rng = random.Random(seed)
        changed = dict(rng.choice(sound))
        for _ in range(rng.choice((1, 1, 2, 4))):
            key = rng.choice(list(changed))
            value = _odd_value(changed[key], changed, rng)
            changed.pop(key)
            if value is not None:
                changed[key if rng.random() < 0.95 else "tokenizer.ggml.odd"] = value
            if not changed:
                break
        try:
            tokenizer = Tokenizer.from_gguf(changed)
            _hold_rules(tokenizer)
        except TokenizerError as error:
            return _refused(error, "tokenizer.")
        return LOADED

    return case


def _odd_value(before: Any, all_values: Mapping[str, Any], rng: random.Random) -> Any:
    """None to take the key away."""
    way = rng.random()
    if way < 0.1:
        return None
    if way < 0.2:
        return rng.choice(
            (True, -1, 0, 1 << 70, 1.5, float("nan"), "", "x", [], ["a"], np.zeros(0), np.zeros(3, np.int8))
        )
    if way < 0.25:
        return rng.choice(list(all_values.values()))
    if isinstance(before, np.ndarray) and len(before):
        return _odd_array(before, rng)
    if isinstance(before, list) and before:
        return _odd_list(before, rng)
    if isinstance(before, bool):
        return not before
    if isinstance(before, int):
        return rng.choice((before + 1, -before, rng.randrange(600), rng.choice(EDGES)))
    return (
        f"{before}x" if rng.random() < 0.5 else rng.choice(("gpt2", "llama", "t5", "default", "tekken", "{{", "bert"))
    )


def _odd_array(before: np.ndarray, rng: random.Random) -> np.ndarray:
    if rng.random() < 0.2:
        with np.errstate(all="ignore"):
            return before.astype(rng.choice((np.int8, np.uint64, np.float16, np.float64)))
    if rng.random() < 0.2:
        return before[: rng.randrange(len(before) + 1)] if rng.random() < 0.7 else np.concatenate([before, before])
    after = before.copy()
    odd = (0, 1, 2, 3, 4, 5, 6, 7, 127) if before.dtype.kind in "iu" else (0.0, 1e30, -1e30, np.nan, np.inf, -np.inf)
    with np.errstate(all="ignore"):
        for _ in range(rng.choice((1, 3, 40))):
            after[rng.randrange(len(after))] = rng.choice(odd)
    return after


def _odd_list(before: list[str], rng: random.Random) -> list[str]:
    after = list(before)
    if rng.random() < 0.15:
        return after[: rng.randrange(len(after) + 1)] if rng.random() < 0.5 else after + after
    for _ in range(rng.choice((1, 3, 20))):
        at = rng.randrange(len(after))
        after[at] = rng.choice(
            ("", "\0", "a", "a" * 5000, " ", "▁", "<0x41>", "<s>", "é", rng.choice(after), after[at] + "a")
        )
    return after


def tokenizer_json(folder: Path) -> Case:
    """A folder's tokenizer.json, and at times the files beside it; the library is the reference."""
    sound = [_sound(kind) for kind in ("bytes", "pieces", "unigram")]
    beside = {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>"},
            "chat_template": "{{ messages }}",
        },
        "generation_config.json": {"eos_token_id": [1, 2]},
    }

    def case(seed: int) -> str:
        rng = random.Random(seed)
        data = _mutated(rng.choice(sound), rng)
        fresh(folder / "tokenizer.json", data)
        for name, values in beside.items():
            small = json.dumps(values).encode()
            fresh(folder / name, mutate_json(small, rng) if rng.random() < 0.1 else small)
        try:
            tokenizer = Tokenizer.from_folder(folder)
            _hold_rules(tokenizer)
        except (TokenizerError, ModelFileError) as error:
            return _refused(error, str(folder))
        try:
            engine = Engine.from_file(str(folder / "tokenizer.json"))
        except Exception:  # noqa: BLE001 - the library has no error type of its own
            return UNLIKE
        return _compared(tokenizer, engine, json.loads(data))

    return case


def _sound(kind: str) -> bytes:
    """A small tokenizer of each kind that folders hold."""
    names = ["<unk>", "<s>", "</s>"]
    if kind == "bytes":
        vocab = {token: index for index, token in enumerate([*names, *toys.CODE.values(), "ab", "ba", "abab", "Ġa"])}
        engine = Engine(models.BPE(vocab, [("a", "b"), ("b", "a"), ("ab", "ab"), ("Ġ", "a")]))
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        engine.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    elif kind == "pieces":
        tokens = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
        merges = [("a", "b"), ("b", "a"), ("ab", "ab"), ("▁", "▁"), ("▁", "a"), ("▁a", "b"), ("a", "a"), ("aa", "aa")]
        vocab = {token: index for index, token in enumerate(tokens)}
        engine = Engine(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
        engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # type: ignore[assignment]
    else:
        scored = [*((name, 0.0) for name in names), *((piece, -1.0 - index) for index, piece in enumerate(PIECES))]
        engine = Engine(models.Unigram(scored, 0))
        engine.normalizer = normalizers.NFKC()  # type: ignore[assignment]
        engine.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
        engine.decoder = decoders.Metaspace()  # type: ignore[assignment]
    engine.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    engine.add_special_tokens([AddedToken(name, normalized=False) for name in (*names, "<x>")])
    engine.add_tokens([AddedToken("<tool>", normalized=False)])
    return engine.to_str().encode()


def _mutated(data: bytes, rng: random.Random) -> bytes:
    """Mostly outside the long lists, which would take nearly all of the changes."""
    way = rng.random()
    if way < 0.25:
        return mutate_json(data, rng)
    if way < 0.35:
        return mutate_bytes(data, rng)
    tree = json.loads(data)
    held = {key: tree["model"].pop(key) for key in ("vocab", "merges") if key in tree["model"]}
    after = mutate_json(json.dumps(tree).encode(), rng)
    try:
        changed = json.loads(after)
        changed["model"] |= held
        return json.dumps(changed, ensure_ascii=False).encode(errors="surrogatepass")
    except (ValueError, KeyError, TypeError, RecursionError):
        return after


def _hold_rules(tokenizer: Tokenizer) -> None:
    """What is true of every tokenizer."""
    for text in TEXTS:
        for special in (False, True):
            ids = tokenizer.encode(text, special=special, bos=True)
            if ids != tokenizer.encode(text, special=special, bos=True):
                raise Disagreement(f"{text!r} has now these ids, now others")
            if not all(0 <= token < tokenizer.vocab_size for token in ids):
                raise Disagreement(f"{text!r} has ids outside the vocabulary: {ids}")
            decoder = StreamDecoder(tokenizer, start=True)
            if "".join(decoder.push([token]) for token in ids) + decoder.flush() != tokenizer.decode(ids):
                raise Disagreement(f"{text!r} streams otherwise than it decodes")
    for token in range(min(tokenizer.vocab_size, 1000)):
        tokenizer.piece(token)


def _compared(tokenizer: Tokenizer, engine: Engine, tree: dict[str, Any]) -> str:
    """Against the library, where both go by the same rules."""
    added = tree.get("added_tokens", [])
    if any(engine.token_to_id(token["content"]) != token["id"] for token in added):
        return OTHER_IDS
    if any(token.get("normalized") for token in added):
        return LOADED  # found in the text as it is; the library looks for some of them after normalising
    for text in TEXTS:
        if tree["model"]["type"] == "Unigram" and any(
            name in text for name in ("<x>", "<tool>", "<s>", "</s>", "<unk>")
        ):
            continue  # the library makes special tokens of plain text
        ours = tokenizer.encode(text, special=True, bos=True)
        theirs = engine.encode(text, add_special_tokens=False).ids
        if tokenizer.add_bos and theirs[:1] != [tokenizer.bos_id]:
            theirs = [tokenizer.bos_id, *theirs]
        if ours != theirs:
            raise Disagreement(f"{text!r}: {ours} against {theirs}")
    return AGREED


def _refused(error: Exception, named: str) -> str:
    said = str(error)
    if len(said) > 2000 or not (named in said or said.startswith(("chat_template", "end token", "beginning"))):
        raise Disagreement(f"the error does not name the place, or at length: {said[:2000]!r}")
    return REFUSED


TARGETS: Mapping[str, Callable[[Path], Case]] = {"gguf-tokenizer": gguf_metadata, "tokenizer-json": tokenizer_json}
