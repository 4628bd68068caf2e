"""Model folders in Hugging Face layout, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Engine

from tests.engine.tokenizer.corpus import TEXTS

SPECIAL = ["<s>", "</s>", "<|x|>"]


def edit(folder: Path, name: str = "tokenizer.json", **changes: Any) -> Path:
    """Change keys of one of the folder's JSON files, which is made if it is not there; None takes a key away."""
    path = folder / name
    values = (json.loads(path.read_text()) if path.exists() else {}) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return folder


def byte_level(kind: str, folder: Path, tokens: list[str], merges: list[str]) -> Path:
    """One of transformers' byte-level tokenizers, with special tokens and a user-defined one."""
    import transformers

    vocab = {token: index for index, token in enumerate([*tokens, *SPECIAL])}
    made = getattr(transformers, kind)(
        vocab=vocab,
        merges=[tuple(merge.split(" ")) for merge in merges],
        bos_token="<s>",
        eos_token="</s>",
        unk_token="</s>",
        pad_token="</s>",
    )
    return _saved(made, folder)


def pieces(kind: str, folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Path:
    """transformers' Llama or Gemma tokenizer."""
    import transformers

    made = getattr(transformers, kind)(
        vocab=vocab, merges=merges, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **options
    )
    return _saved(made, folder)


def _saved(made: Any, folder: Path) -> Path:
    from tokenizers import AddedToken

    made.add_tokens([AddedToken("<|x|>", special=True, normalized=False)])
    made.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<strip>", normalized=False, rstrip=True)])
    made.save_pretrained(folder)
    return folder


def trained_pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Llama-like: unknown, begin, end, the bytes, then pieces trained on the corpus; and their merges."""
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)  # type: ignore[assignment]
    engine.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=2500, show_progress=False, max_token_length=10))
    model = json.loads(engine.to_str())["model"]
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*head, *sorted(model["vocab"], key=model["vocab"].get)]
    return {token: index for index, token in enumerate(tokens)}, [tuple(pair) for pair in model["merges"]]


def legacy_llama(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Path:
    """How Llama 2's and Mistral 7B's tokenizer.json were written: the space is the normalizer's."""
    engine = Engine(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    engine.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    engine.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _written(engine, folder)


def unigram(folder: Path, charsmap: bytes | None = None) -> Path:
    """T5-like, with a table of characters or a normal form instead."""
    engine = Engine(models.Unigram())
    engine.normalizer = normalizers.NFKC() if charsmap is None else charsmap_normalizer(charsmap)  # type: ignore[assignment]
    engine.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always", split=True)]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=1500, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    engine.train_from_iterator(TEXTS, trainer)
    engine.decoder = decoders.Metaspace()  # type: ignore[assignment]
    return _written(engine, folder)


def charsmap_normalizer(charsmap: bytes) -> normalizers.Normalizer:
    runs = normalizers.Replace(Regex(" {2,}"), "▁")
    return normalizers.Sequence([normalizers.Precompiled(charsmap), normalizers.Strip(False, True), runs])


def _written(engine: Engine, folder: Path) -> Path:
    from tokenizers import AddedToken

    engine.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", *SPECIAL)])
    engine.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("<strip>", normalized=False, rstrip=True)])
    engine.save(str(folder / "tokenizer.json"))
    return edit(folder, "tokenizer_config.json", bos_token="<s>", eos_token={"content": "</s>"})
