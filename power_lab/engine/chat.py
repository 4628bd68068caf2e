"""Chats as token ids: a model file's template, rendered safely, and turns appended without touching what came before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from power_lab.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from power_lab.engine.chat_sandbox import Program
    from power_lab.engine.tokenizer import Tokenizer

MAX_MESSAGES = 4096
MAX_CHARACTERS = 1 << 22  # of all messages together
_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
_NONCHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # Unicode keeps them out of text, for uses like this

Message = dict[str, Any]


class ChatTemplate:
    """A Jinja chat template. It is compiled at its first use, so a bad one does not keep a model from raw prompts.

    Attributes:
        source: the template as the file has it.
        bos, eos: texts of the model's special tokens, which templates call `bos_token` and `eos_token`.
    """

    def __init__(
        self, source: str, *, bos: str = "", eos: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        self.source = source
        self.bos = bos
        self.eos = eos
        self._now = now

    @cached_property
    def _program(self) -> Program:
        from power_lab.engine.chat_sandbox import Program, Sandbox  # Jinja takes 60 ms, which raw prompts need not pay

        return Program(self.source, Sandbox(self._now))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt text of a chat. `messages` are dicts with `role` and `content`, as chat APIs have them.

        Raises ConfigError naming the message and key that is wrong, TokenizerError when the template fails.
        """
        check_messages(messages)
        return self._program.render(
            {
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self.bos,
                "eos_token": self.eos,
                "tools": None,
                "documents": None,
            }
        )


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ConfigError naming the first message and key that is missing, unknown or of the wrong type."""
    if not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise ConfigError("messages", f"a list of 1 to {MAX_MESSAGES} messages is expected")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ConfigError(where, f"is a {type(message).__name__}, not a dict with role and content")
        for key in message:
            if key not in _KEYS:
                raise ConfigError(f"{where}.{key}", "unknown key", f"Known keys: {', '.join(_KEYS)}.")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ConfigError(f"{where}.role", "a role such as 'user' is expected")
        parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not (isinstance(content, str) or parts or (content is None and "tool_calls" in message)):
            raise ConfigError(f"{where}.content", f"is a {type(content).__name__}; text is expected")
    try:
        total = sum(map(len, _texts(list(messages), "messages")))
    except RecursionError:
        raise ConfigError("messages", "values are nested too deeply") from None
    if total > MAX_CHARACTERS:
        raise ConfigError("messages", f"have {total} characters; at most {MAX_CHARACTERS} are allowed")


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
    """Behind `Tokenizer.encode_chat`."""
    template = _template(tokenizer)
    check_messages(messages)
    mark = _marks(messages, template)[0]
    text = template.render(_shielded(tokenizer, list(messages), mark), add_generation_prompt)
    return tokenizer.encode(text, special=True, bos=True, plain=_plain(mark))


def continuation(tokenizer: Tokenizer, output: Sequence[int], turn: Message, messages: Sequence[Message]) -> list[int]:
    """Behind `Tokenizer.continuation`: what the template puts after a stand-in for the answer follows the answer."""
    template = _template(tokenizer)
    check_messages([*messages, turn])
    mark, other = _marks([*messages, turn], template)
    answer = f"{other}answer{other}"
    chat = [*_shielded(tokenizer, list(messages), mark), {"role": "assistant", "content": answer}]
    text = template.render([*chat, *_shielded(tokenizer, [turn], mark)], add_generation_prompt=True)
    if text.count(answer) != 1:
        raise TokenizerError(
            "The chat template does not keep the assistant's answer as it is, so a turn cannot be appended to it.",
            "Send the whole chat as a new prompt.",
        )
    tail = tokenizer.encode(text.partition(answer)[2], special=True, bos=False, plain=_plain(mark))
    if output and output[-1] in tokenizer.end_ids:
        end = next((index for index, token in enumerate(tail) if token in tokenizer.end_ids), None)
        if end is not None and not tokenizer.decode(tail[:end], skip_special=False).strip():
            tail = tail[end + 1 :]
    return tail


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise TokenizerError("The model file has no chat template.", "Give a raw prompt instead of messages.")
    return tokenizer.chat_template


def _texts(value: Any, where: str) -> Iterator[str]:
    """All texts in JSON-like data. Raises ConfigError naming the place of anything else."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _texts(key, where)
            yield from _texts(part, f"{where}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts(part, f"{where}[{index}]")
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise ConfigError(where, f"is a {type(value).__name__}; text, numbers, lists and dicts are expected")


def _marks(messages: Sequence[Message], template: ChatTemplate) -> tuple[str, str]:
    """Two characters that occur in neither the messages nor the template."""
    seen = set(template.source).union(*map(set, _texts(list(messages), "messages")))
    free = [mark for mark in _NONCHARACTERS if mark not in seen]
    if len(free) < 2:
        raise ConfigError("messages", "hold nearly all of Unicode's noncharacters U+FDD0 to U+FDEF")
    return free[0], free[1]


def _shielded(tokenizer: Tokenizer, value: Any, mark: str) -> Any:
    """The same data with control tokens' names spelled in hex between marks; `_plain` turns them back into text."""
    if isinstance(value, str):
        return tokenizer.replace_special(value, lambda name: f"{mark}{name.encode().hex()}{mark}")
    if isinstance(value, list):
        return [_shielded(tokenizer, part, mark) for part in value]
    if isinstance(value, dict):
        return {key: _shielded(tokenizer, part, mark) for key, part in value.items()}
    return value


def _plain(mark: str) -> Callable[[str], str]:
    hidden = re.compile(f"{mark}([0-9a-fA-F]+){mark}")
    return lambda text: hidden.sub(lambda found: bytes.fromhex(found[1]).decode(), text)
