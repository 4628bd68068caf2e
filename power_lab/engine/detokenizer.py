"""Streaming detokenization: text that is safe to show now, byte for byte what decoding it all at once gives."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from power_lab.errors import ConfigError


class Vocabulary(Protocol):
    """What the decoder needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def space_prefix(self) -> bool: ...

    def token_bytes(self, token: int) -> bytes: ...


class StreamDecoder:
    """Turns tokens into text as they come.

    Incomplete UTF-8 and any ending that could grow into a stop string are held back. A stop string may span tokens or
    lie inside one. The one that is complete first ends the output, the longest if several are complete at one
    character: so the outcome does not depend on how the text was cut into tokens or pushes.

    Attributes:
        stopped: the stop string that was met, or None. The text ends before it.
        consumed: how many of the latest push's tokens were taken: all, or up to the one that completed the stop string.
    """

    __slots__ = ("_bytes", "_drop", "_held", "_skip", "_stops", "_vocabulary", "consumed", "stopped")

    def __init__(
        self, vocabulary: Vocabulary, stop: tuple[str, ...] = (), *, skip_special: bool = True, start: bool = False
    ) -> None:
        """An output's tokens go on where a prompt ends, so by default nothing is taken away.

        Args:
            skip_special: whether control tokens leave no text.
            start: whether the tokens are a prompt's beginning, so that the space which encoding put there is taken away.

        Raises ConfigError for an empty stop string.
        """
        if not all(stop):
            raise ConfigError("stop", "a stop string is empty")
        self._vocabulary = vocabulary
        self._stops = stop
        self._skip = vocabulary.special_ids if skip_special else frozenset()
        self._drop = start and vocabulary.space_prefix  # the next byte, if it is a space
        self._bytes = b""  # an incomplete character
        self._held = ""  # may become a stop string
        self.stopped: str | None = None
        self.consumed = 0

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens; returns the text that is now certain. After a stop nothing is taken any more."""
        self.consumed = 0
        out: list[str] = []
        for token in tokens:
            if self.stopped is not None:
                break
            self.consumed += 1
            if token in self._skip:
                continue
            stored = self._bytes + self._fresh(token)
            text, used = codecs.utf_8_decode(stored, "replace", False)
            self._bytes = stored[used:]
            if text:
                out.append(self._release(text))
        return "".join(out)

    def flush(self) -> str:
        """The end of the output: what was held back, with U+FFFD for an incomplete character."""
        text = "" if self.stopped is not None else self._release(self._bytes.decode("utf-8", "replace"))
        text, self._held, self._bytes = text + self._held, "", b""
        return text

    def after(self, token: int) -> tuple[StreamDecoder, str]:
        """The decoder behind one more token, and the text that is then certain. This one stays as it is: what comes back is itself where
        whole characters came and nothing is held back, as with most tokens, and else a `clone`."""
        if not (self._bytes or self._stops or self._drop):
            if token in self._skip:
                return self, ""
            with suppress(UnicodeDecodeError):
                return self, self._vocabulary.token_bytes(token).decode()
        twin = self.clone()
        return twin, twin.push((token,))

    def clone(self) -> StreamDecoder:
        """An independent decoder in the same state; costs a few attribute copies."""
        twin = object.__new__(StreamDecoder)
        twin._vocabulary, twin._stops, twin._skip, twin._drop = self._vocabulary, self._stops, self._skip, self._drop
        twin._bytes, twin._held, twin.stopped, twin.consumed = self._bytes, self._held, self.stopped, self.consumed
        return twin

    def _fresh(self, token: int) -> bytes:
        data = self._vocabulary.token_bytes(token)
        if self._drop and data and token not in self._vocabulary.special_ids:
            data, self._drop = data.removeprefix(b" "), False
        return data

    def _release(self, fresh: str) -> str:
        """What of held and fresh text can go out; meets the stop string or holds back a possible beginning of one."""
        text = self._held + fresh
        if not self._stops:
            return text
        ends = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            _, cut, self.stopped = min(ends)
            self._held, self._bytes = "", b""
            return text[:cut]
        cut = min(_possible_start(text, stop) for stop in self._stops)
        self._held = text[cut:]
        return text[:cut]


def _possible_start(text: str, stop: str) -> int:
    """Where the longest ending of `text` begins that is a proper beginning of `stop`; len(text) if none is."""
    at = max(0, len(text) - len(stop) + 1)
    while (at := text.find(stop[0], at)) >= 0:
        if stop.startswith(text[at:]):
            return at
        at += 1
    return len(text)
