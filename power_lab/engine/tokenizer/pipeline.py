"""From the parts of a tokenizer.json to a codec: each known combination, and no other."""

from __future__ import annotations

from typing import TypeVar

from tokenizers import Regex, models
from tokenizers import normalizers as library_normalizers
from tokenizers import pre_tokenizers as library_pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from power_lab.engine.tokenizer import tokenizer_json as parts
from power_lab.engine.tokenizer.bytelevel import ByteLevel
from power_lab.engine.tokenizer.charsmap import Charsmap
from power_lab.engine.tokenizer.codec import Codec, Spacing
from power_lab.engine.tokenizer.pieces import Pieces
from power_lab.engine.tokenizer.pretokenizers import known
from power_lab.engine.tokenizer.unigram import unigram_model
from power_lab.engine.tokenizer.vocabulary import BYTE, NORMAL, SPACE, USER_DEFINED, Vocabulary
from power_lab.errors import TokenizerError

T = TypeVar("T")

MAX_MERGES = 1 << 21
_FORMS = {
    parts.Nfc: library_normalizers.NFC,
    parts.Nfd: library_normalizers.NFD,
    parts.Nfkc: library_normalizers.NFKC,
    parts.Nfkd: library_normalizers.NFKD,
}
_RUNS = {(" {2,}", " "), (" {2,}", SPACE)}  # regular expression and content of harmless replacements
_TO_SPACE = parts.Replace(parts.Pattern(string=" "), SPACE)
_FROM_SPACE = parts.Replace(parts.Pattern(string=SPACE), " ")


class Pipeline:
    """The description, flattened, with errors that name the part."""

    def __init__(self, described: parts.TokenizerJson, vocabulary: Vocabulary, where: str) -> None:
        self._where = where
        self._vocabulary = vocabulary
        self._model = described.model
        normalizer, pre, decoder = described.normalizer, described.pre_tokenizer, described.decoder
        self._normalizers = normalizer.normalizers if isinstance(normalizer, parts.Normalizers) else _one(normalizer)
        self._pre = pre.pretokenizers if isinstance(pre, parts.PreTokenizers) else _one(pre)
        self._decoders = decoder.decoders if isinstance(decoder, parts.Decoders) else _one(decoder)

    def codec(self) -> Codec:
        """Raises TokenizerError for a part that is known but not in this place, or not with this setting."""
        if isinstance(self._model, parts.Bpe) and any(isinstance(part, parts.ByteLevelPart) for part in self._pre):
            return self._byte_level(self._model)
        return self._pieces()

    def _refused(self, what: str, part: object) -> TokenizerError:
        return TokenizerError(
            f"{self._where}: {what}: {str(part)[:200]} is not supported here.",
            "Power Lab does not support this kind of tokenizer.",
        )

    def _merges(self, model: parts.Bpe, vocab: dict[str, int]) -> list[tuple[str, str]]:
        """Pairs of `vocab`; those that make or take a special token are left out, so that plain text never makes one."""
        if len(model.merges) > MAX_MERGES:
            raise TokenizerError(
                f"{self._where}: model.merges: {len(model.merges)} merges; at most {MAX_MERGES} are allowed."
            )
        pairs = [merge.partition(" ")[::2] if isinstance(merge, str) else merge for merge in model.merges]
        kept = [(left, right) for left, right in pairs if left + right in vocab and left in vocab and right in vocab]
        if len(kept) < len(pairs):
            known = model.vocab
            for index, (left, right) in enumerate(pairs):
                if not (left + right in known and left in known and right in known):
                    raise TokenizerError(
                        f"{self._where}: model.merges[{index}]: {left[:40]!r} and {right[:40]!r} join tokens "
                        "that the vocabulary lacks."
                    )
        return kept

    def _vocab(self, model: parts.Bpe, *kinds: int) -> dict[str, int]:
        types = self._vocabulary.types
        return {token: index for token, index in model.vocab.items() if types[index] in kinds}

    def _byte_level(self, model: parts.Bpe) -> Codec:
        if model.byte_fallback:
            raise self._refused("model", "byte_fallback with a ByteLevel pre-tokenizer")
        if (
            not isinstance(self._decoders[-1] if self._decoders else None, parts.ByteLevelPart)
            or len(self._decoders) != 1
        ):
            raise self._refused("decoder", self._decoders)
        vocab = self._vocab(model, NORMAL, USER_DEFINED)
        return ByteLevel(
            self._vocabulary,
            vocab,
            self._merges(model, vocab),
            library_pre_tokenizers.Sequence([self._byte_level_cut(part) for part in self._pre]),
            normalizer=library_normalizers.Sequence([self._form(part) for part in self._normalizers])
            if self._normalizers
            else None,
            whole_words=model.ignore_merges,
        )

    def _form(self, part: parts.Normalizer) -> Normalizer:
        if type(part) not in _FORMS:
            raise self._refused("normalizer", part)
        return _FORMS[type(part)]()

    def _byte_level_cut(self, part: parts.SinglePreTokenizer) -> PreTokenizer:
        match part:
            case parts.ByteLevelPart(add_prefix_space=False):
                return library_pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part.use_regex)
            case parts.Digits():
                return library_pre_tokenizers.Digits(individual_digits=part.individual_digits)
            case parts.Punctuation():
                return library_pre_tokenizers.Punctuation(part.behavior.lower())
            case parts.Split(pattern=parts.Pattern(regex=str(regex), string=None)) if known(regex):
                if (part.behavior, part.invert) in (("Isolated", False), ("Removed", True)):
                    return library_pre_tokenizers.Split(Regex(regex), part.behavior.lower(), part.invert)
        raise self._refused("pre_tokenizer", part)

    def _pieces(self) -> Codec:
        spacing, spaced, metaspace, split_words = self._spacing()
        rest = self._normalizers[1:] if spaced else self._normalizers
        charsmap = None
        if rest and isinstance(rest[0], parts.Precompiled):
            charsmap = Charsmap(rest[0].precompiled_charsmap, f"{self._where}: normalizer")
            rest = rest[1:]
        if not metaspace and _TO_SPACE not in rest:
            raise self._refused("normalizer", "one that leaves spaces as they are")
        self._check_decoders()
        model, ids = self._ranked(self._model) if isinstance(self._model, parts.Bpe) else self._unigram(self._model)
        return Pieces(
            self._vocabulary,
            model,
            ids,
            spacing=spacing,
            charsmap=charsmap,
            normalizers=[self._piece_normalizer(part) for part in rest],
            spaced=spaced,
            splits=[
                library_pre_tokenizers.WhitespaceSplit()
                for part in self._pre
                if isinstance(part, parts.WhitespaceSplit)
            ],
            metaspace=metaspace,
            split_words=split_words,
        )

    def _spacing(self) -> tuple[Spacing, list[Normalizer], bool, bool]:
        """Where a space is put before the text, by which normalizer, whether by a Metaspace, and whether that cuts."""
        prepended = (
            self._normalizers[:1] if self._normalizers and isinstance(self._normalizers[0], parts.Prepend) else []
        )
        if any(isinstance(part, parts.Prepend) and part.prepend != SPACE for part in prepended):
            raise self._refused("normalizer", prepended[0])
        match self._pre:
            case [] if prepended:
                return "always", [library_normalizers.Prepend(SPACE)], False, False
            case [] | [parts.Split(pattern=parts.Pattern(string=" "), invert=False)] if not prepended:
                return "never", [], False, False  # no space is left for the split to find
            case [parts.Metaspace() as part] | [parts.WhitespaceSplit(), parts.Metaspace() as part] if not prepended:
                old = {True: "always", False: "never", None: part.prepend_scheme}[part.add_prefix_space]
                return ("never" if old == "never" else part.prepend_scheme), [], True, part.split
        raise self._refused("pre_tokenizer", self._pre)

    def _piece_normalizer(self, part: parts.Normalizer) -> Normalizer:
        if part == _TO_SPACE:
            return library_normalizers.Replace(" ", SPACE)
        if (
            isinstance(part, parts.Replace)
            and (part.pattern.regex, part.content) in _RUNS
            and part.pattern.string is None
        ):
            return library_normalizers.Replace(Regex(" {2,}"), part.content)
        if isinstance(part, parts.StripSpaces):
            return library_normalizers.Strip(part.strip_left, part.strip_right)
        return self._form(part)

    def _check_decoders(self) -> None:
        """Bytes come out as `Pieces.token_bytes` has them; a decoder that says otherwise is refused."""
        for part in self._decoders:
            strip = isinstance(part, parts.Strip) and (part.content, part.start, part.stop) == (" ", 1, 0)
            if not (
                strip or part == _FROM_SPACE or isinstance(part, (parts.ByteFallback, parts.Fuse, parts.Metaspace))
            ):
                raise self._refused("decoder", part)
        if not any(part == _FROM_SPACE or isinstance(part, parts.Metaspace) for part in self._decoders):
            raise self._refused("decoder", self._decoders)

    def _ranked(self, model: parts.Bpe) -> tuple[models.Model, None]:
        if model.ignore_merges:
            raise self._refused("model", "ignore_merges without a ByteLevel pre-tokenizer")
        vocab = self._vocab(model, NORMAL, USER_DEFINED)
        unknown = model.unk_token if model.unk_token in model.vocab else None
        named = {} if unknown is None else {unknown: model.vocab[unknown]}  # whatever its type, and no merge makes it
        whole = vocab | self._vocab(model, BYTE) | named
        return models.BPE(
            whole,
            self._merges(model, vocab),
            unk_token=unknown,
            fuse_unk=model.fuse_unk,
            byte_fallback=model.byte_fallback,
        ), None

    def _unigram(self, model: parts.Unigram) -> tuple[models.Model, list[int]]:
        types = self._vocabulary.types
        kept = [index for index in range(len(model.vocab)) if types[index] in (NORMAL, USER_DEFINED, BYTE)]
        scores = [score for _, score in model.vocab]
        return unigram_model(self._vocabulary, kept, scores, model.unk_id, model.byte_fallback)


def _one(part: T | None) -> list[T]:
    return [] if part is None else [part]
