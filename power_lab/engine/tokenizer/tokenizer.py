"""Text to token ids and back, with special tokens by type and one rule for the beginning of a prompt."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from power_lab.engine import chat
from power_lab.engine.chat import ChatTemplate, Message
from power_lab.engine.detokenizer import StreamDecoder
from power_lab.engine.tokenizer.codec import Codec
from power_lab.engine.tokenizer.marks import Mark, Marks
from power_lab.engine.tokenizer.vocabulary import USER_DEFINED, Vocabulary
from power_lab.errors import TokenizerError


class Tokenizer:
    """Text to token ids and back. Immutable and safe to use from several threads.

    Attributes:
        vocab_size: number of token ids.
        bos_id: beginning-of-text token, or None.
        add_bos: whether this model's prompts begin with it.
        end_ids: tokens with which the model ends a turn or the text.
        special_ids: control tokens and the unknown token; they carry no text.
        chat_template: the file's template, or None.
        missing_bytes: bytes that no token stands for. Text that holds them loses them, as in the model's own tokenizer.
        space_prefix: whether prompts are encoded with a space before them, which decoding from the start takes away.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        codec: Codec,
        *,
        marks: Sequence[Mark] | None = None,
        bos_id: int | None = None,
        add_bos: bool = False,
        end_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        """Made by `from_gguf` and `from_folder`.

        Args:
            marks: special and user-defined tokens as they are found in text; without, they are found by their names.
            end_ids: the first is what templates call `eos_token`.
            chat_template: the model's template, or its templates by name.

        Raises TokenizerError for an id outside the vocabulary.
        """
        if marks is None:
            found = (*sorted(vocabulary.special), *vocabulary.of(USER_DEFINED))
            marks = [Mark(vocabulary.tokens[token], token) for token in found]
        self._vocabulary = vocabulary
        self._codec = codec
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for
        self.vocab_size = vocabulary.size
        self.special_ids = vocabulary.special
        self.missing_bytes = codec.missing_bytes
        self.space_prefix = codec.spacing != "never"
        self._control = Marks(mark for mark in marks if mark.token in self.special_ids)
        self._marks = {False: Marks(mark for mark in marks if mark.token not in self.special_ids), True: Marks(marks)}
        self.bos_id = bos_id if bos_id is None else vocabulary.checked("beginning-of-text token", bos_id)
        self.add_bos = add_bos and bos_id is not None
        ends = [vocabulary.checked("end token", token) for token in end_ids]
        self.end_ids = frozenset(ends)
        self.chat_template = None
        if chat_template is not None:
            eos = self._text(ends[0] if ends else None)
            self.chat_template = ChatTemplate(chat_template, bos=self._text(bos_id), eos=eos)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer that a GGUF file describes. Raises TokenizerError naming a missing or unsupported key."""
        from power_lab.engine.tokenizer.gguf import read

        return read(metadata)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a model folder in Hugging Face layout (tokenizer.json and what lies beside it).

        Raises TokenizerError naming the file and the key that is missing, wrong or not supported.
        """
        from power_lab.engine.tokenizer.folder import read

        return read(path)

    def encode(self, text: str, *, special: bool, bos: bool, plain: Callable[[str], str] | None = None) -> list[int]:
        """Token ids of a text. No end token is ever appended: a prompt is there to be continued.

        Args:
            text: any text.
            special: whether control tokens written in the text become those tokens (template output) or stay plain text
                (what a user typed). User-defined tokens are ordinary vocabulary and are found in both.
            bos: whether this is the start of a prompt. The model's beginning-of-text token is then put first if the
                file asks for it (`add_bos`) and the ids do not begin with it already, so that a template which writes
                it never doubles it; and so is the space that some tokenizers put before a text.
            plain: applied to the text between special tokens before it is encoded (see `encode_chat`).

        Raises TokenizerError when the text holds lone surrogates.
        """
        ids: list[int] = []
        codec = self._codec
        spaced = bos and self.space_prefix
        try:
            for piece, token in self._marks[special].split(text):
                if token is not None:
                    ids.append(token)
                    spaced = codec.spacing == "always"
                elif piece:
                    ids += codec.encode(plain(piece) if plain else piece, spaced)
        except (UnicodeEncodeError, TypeError):
            raise TokenizerError("The text is not valid Unicode: it holds lone surrogates or is no string.") from None
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a chat's prompt, with the beginning-of-text token where the model wants it, once.

        Special tokens come from the template only: a message that spells one, say `<|im_end|>`, stays the text that it
        is. Raises ConfigError naming what is wrong with a message, TokenizerError when no template can be used.
        """
        return chat.chat_ids(self, messages, add_generation_prompt)

    def continuation(
        self, output: Sequence[int], message: str | Message, messages: Sequence[Message] | None = None
    ) -> list[int]:
        """Token ids to append to a chat for its next turn; everything before stays token for token the same.

        Args:
            output: the tokens that the model answered, with or without its end token, which is never doubled.
            message: the next message; text is the user's.
            messages: the chat before the answer, for templates that look at it.

        Raises as `encode_chat` does, and TokenizerError if the template does not keep answers as they are, so that
        nothing can be said to follow them.
        """
        turn = {"role": "user", "content": message} if isinstance(message, str) else message
        return chat.continuation(self, output, turn, messages or [{"role": "user", "content": "Hello"}])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token gives its name. TokenizerError for an unknown id."""
        known = self._bytes.get(token)
        if known is None:
            self._vocabulary.checked("token id", token)
            special = token in self.special_ids
            known = self._vocabulary.tokens[token].encode() if special else self._codec.token_bytes(token)
            self._bytes[token] = known
        return known

    def decode(self, ids: Iterable[int], skip_special: bool = True, *, start: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            skip_special: whether control tokens leave no text.
            start: whether the ids are a prompt's beginning, so that the space which encoding put there is taken away.
        """
        decoder = StreamDecoder(self, skip_special=skip_special, start=start)
        return decoder.push(ids) + decoder.flush()

    def piece(self, token: int) -> str:
        """One token for display: what it decodes to alone, or a special token's name."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def replace_special(self, text: str, by: Callable[[str], str]) -> str:
        """The text with every control token that is spelled in it replaced by `by(what was found)`."""
        return self._control.replace(text, by)

    def lost(self, text: str) -> str:
        """The characters of a text that would not come back from its ids, each once, in order."""
        return "".join(char for char in dict.fromkeys(text) if not self._codec.holds(char))

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.token_bytes(token).decode("utf-8", "replace")
