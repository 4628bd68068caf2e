"""Tokenizers out of model folders in Hugging Face layout: tokenizer.json and the small files beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.engine.tokenizer import tokenizer_json as parts
from power_lab.engine.tokenizer.marks import Mark
from power_lab.engine.tokenizer.pipeline import Pipeline
from power_lab.engine.tokenizer.tokenizer import Tokenizer
from power_lab.engine.tokenizer.vocabulary import (
    BYTE,
    CONTROL,
    MAX_VOCAB,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)
from power_lab.engine.weights.filenames import TOKENIZER
from power_lab.engine.weights.mapped import member, read_bounded
from power_lab.engine.weights.strict_json import parse_object
from power_lab.errors import TokenizerError

MAX_SMALL_BYTES = 1 << 24  # configs list added tokens again; the largest have some MB
MAX_TEMPLATE_BYTES = 1 << 20
MAX_ENDS = 256


def read(path: str | os.PathLike[str]) -> Tokenizer:
    """Behind `Tokenizer.from_folder`."""
    folder = Path(path)
    if not (folder / TOKENIZER).exists():
        raise TokenizerError(
            f"{folder}: {TOKENIZER} is missing.",
            "Fetch the whole folder, or convert the tokenizer: AutoTokenizer.from_pretrained(...).save_pretrained(folder).",
        )
    file = member(folder, TOKENIZER)
    where = str(file)
    described = parts.parse(file)
    vocabulary = _vocabulary(described, where)
    settings = _Settings(folder, described, vocabulary)
    return Tokenizer(
        vocabulary,
        Pipeline(described, vocabulary, where).codec(),
        marks=[
            Mark(token.content, token.id, token.lstrip, token.rstrip, token.single_word)
            for token in described.added_tokens
        ],
        bos_id=settings.bos(),
        add_bos=settings.adds_bos(),
        end_ids=settings.ends(),
        chat_template=settings.template(),
    )


def _vocabulary(described: parts.TokenizerJson, where: str) -> Vocabulary:
    """Every id's text, and its type as the file states it: added tokens are special or user-defined."""
    model, added = described.model, described.added_tokens
    if isinstance(model, parts.Unigram):
        pieces = {text: index for index, (text, _) in enumerate(model.vocab)}
        unknown = model.unk_id
    else:
        pieces = model.vocab
        unknown = None if model.unk_token is None else pieces.get(model.unk_token)
    if len(pieces) != len(model.vocab):
        raise TokenizerError(f"{where}: model.vocab: a token comes twice.")
    size = _size([*pieces.values(), *(token.id for token in added)], where)
    tokens, types = [""] * size, np.full(size, UNUSED, np.int8)
    for text, index in pieces.items():
        if tokens[index]:
            raise TokenizerError(f"{where}: model.vocab: id {index} is of {tokens[index][:40]!r} and of {text[:40]!r}.")
        tokens[index] = text
    types[list(pieces.values())] = NORMAL
    if model.byte_fallback:
        types[[pieces[name] for byte in range(256) if (name := f"<0x{byte:02X}>") in pieces]] = BYTE
    if unknown is not None:
        if not 0 <= unknown < size:
            raise TokenizerError(f"{where}: model.unk_id: {unknown} is outside the vocabulary of {size} tokens.")
        types[unknown] = UNKNOWN
    _add(tokens, types, added, where)
    return Vocabulary(tokens, types, f"{where}: tokens")


def _size(ids: list[int], where: str) -> int:
    least, most = min(ids, default=0), max(ids, default=-1)
    if least < 0 or not 0 <= most < MAX_VOCAB:
        raise TokenizerError(f"{where}: model.vocab: ids go from {least} to {most}; 0 to {MAX_VOCAB - 1} are allowed.")
    return most + 1


def _add(tokens: list[str], types: np.ndarray, added: list[parts.AddedToken], where: str) -> None:
    """Enter the added tokens."""
    seen: set[str] = set()
    for token in added:
        if token.content in seen:
            raise TokenizerError(f"{where}: added_tokens: {token.content[:40]!r} comes twice.")
        seen.add(token.content)
        before = tokens[token.id]
        if before not in ("", token.content):
            raise TokenizerError(
                f"{where}: added_tokens: {token.content[:40]!r} has id {token.id}, which is of {before[:40]!r}."
            )
        tokens[token.id] = token.content
        types[token.id] = CONTROL if token.special else USER_DEFINED


class _Settings:
    """What tokenizer_config.json, special_tokens_map.json, generation_config.json and chat_template.jinja say."""

    def __init__(self, folder: Path, described: parts.TokenizerJson, vocabulary: Vocabulary) -> None:
        self._folder = folder
        self._described = described
        self._vocabulary = vocabulary
        self._ids = {text: index for index, text in enumerate(vocabulary.tokens) if text}
        self._config = self._read("tokenizer_config.json")
        self._map = self._read("special_tokens_map.json")
        self._generation = self._read("generation_config.json")

    def bos(self) -> int | None:
        return self._named("bos_token")

    def adds_bos(self) -> bool:
        """As tokenizer_config.json says; else whether the post-processor puts it first."""
        stated = self._config.get("add_bos_token")
        if stated is not None and not isinstance(stated, bool):
            raise self._wrong("tokenizer_config.json", "add_bos_token", stated)
        first = self._first()
        bos = self.bos()
        if first is not None and first != bos and stated is not False:
            raise TokenizerError(
                f"{self._folder / 'tokenizer.json'}: post_processor: puts {self._vocabulary.tokens[first][:40]!r} first, "
                "which is not the bos_token of tokenizer_config.json."
            )
        return first is not None if stated is None else stated

    def ends(self) -> list[int]:
        """The tokenizer's eos first, then what generation ends at."""
        eos = self._named("eos_token")
        found = self._generation.get("eos_token_id")
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if len(listed) > MAX_ENDS:
            raise self._wrong("generation_config.json", "eos_token_id", found)
        where = f"{self._folder / 'generation_config.json'}: eos_token_id"
        for token in listed:
            if type(token) is not int:
                raise self._wrong("generation_config.json", "eos_token_id", found)
            self._vocabulary.checked(where, token)
        return list(dict.fromkeys([*([] if eos is None else [eos]), *listed]))

    def template(self) -> str | Mapping[str, str] | None:
        """chat_template.jinja, or else what tokenizer_config.json has: a template, or several by name."""
        if (self._folder / "chat_template.jinja").exists():
            data = read_bounded(member(self._folder, "chat_template.jinja"), MAX_TEMPLATE_BYTES)
            try:
                return data.decode()
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{self._folder / 'chat_template.jinja'}: is not UTF-8: {error.reason}.") from None
        found = self._config.get("chat_template")
        if found is None or isinstance(found, str):
            return found
        named = list(_templates(found))
        if not named or any(not (isinstance(name, str) and isinstance(text, str)) for name, text in named):
            raise self._wrong("tokenizer_config.json", "chat_template", found)
        return dict(named)

    def _first(self) -> int | None:
        """The token that the post-processor puts before a text. What it puts after is not followed: prompts go on."""
        processor = self._described.post_processor
        listed = processor.processors if isinstance(processor, parts.Processors) else [processor]
        templates = [part.single for part in listed if isinstance(part, parts.Template)]
        if not templates:
            return None
        texts = [index for index, item in enumerate(templates[0]) if "Sequence" in item]
        before = [str(item.get("SpecialToken", {}).get("id")) for item in templates[0][: texts[0] if texts else 0]]
        known = all(name in self._ids for name in before)
        if len(templates) > 1 or len(texts) != 1 or len(before) > 1 or not known:
            raise TokenizerError(
                f"{self._folder / 'tokenizer.json'}: post_processor: {str(templates)[:200]} is not supported.",
                "It can put one token of the vocabulary before a text.",
            )
        return self._ids[before[0]] if before else None

    def _named(self, key: str) -> int | None:
        """The id of a token that a config names, as a text or as an object with `content`."""
        for name, values in (("tokenizer_config.json", self._config), ("special_tokens_map.json", self._map)):
            found = values.get(key)
            if found is None:
                continue
            text = found.get("content") if isinstance(found, dict) else found
            if not isinstance(text, str) or text not in self._ids:
                raise self._wrong(name, key, found)
            return self._ids[text]
        return None

    def _read(self, name: str) -> dict[str, Any]:
        if not (self._folder / name).exists():
            return {}
        path = member(self._folder, name)
        return parse_object(read_bounded(path, MAX_SMALL_BYTES), str(path))

    def _wrong(self, name: str, key: str, value: object) -> TokenizerError:
        return TokenizerError(f"{self._folder / name}: {key}: {str(value)[:100]!r} cannot be used.")


def _templates(value: object) -> Iterator[tuple[Any, Any]]:
    """(name, template) of the list that older files have, and of a plain object."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        for item in value:
            yield (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
