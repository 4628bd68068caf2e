"""Chats as token ids: a template's text without special tokens that messages spell, and turns that follow what was generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from power_lab.engine.messages import Message, Options, Tool, texts
from power_lab.engine.templates import ChatTemplate
from power_lab.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from power_lab.engine.tokenizer import Tokenizer

History = Literal["auto", "keep", "render"]
"""How a chat's earlier turns come back: `keep` their exact tokens, `render` them anew, or `auto`: keep unless the template changes them."""
_NONCHARACTERS = [chr(point) for point in range(0xFDD0, 0xFDF0)]  # Unicode keeps them out of text, for uses like this


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a chat's next prompt is made from.

    Attributes:
        prompt, output: the tokens so far: the last turn's prompt, and what the model answered.
        messages: the chat before the answer.
        message: what follows the answer.
        tools, template_options, history: as for `Lab.chat`.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    messages: tuple[Message, ...]
    message: Message
    tools: tuple[Tool, ...] = ()
    template_options: dict[str, Any] = {}
    history: History = "auto"


class NextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt of a chat's next turn.

    Attributes:
        tokens: its ids.
        answer: the text of the last answer, as a message of the chat.
        kept: how many of the tokens so far it begins with; what is cached of them is used.
        reason: why the tokens so far were not simply appended to, or why they were although the template may show the
            answer otherwise; empty where both are the same text.
    """

    tokens: tuple[int, ...]
    answer: str
    kept: int
    reason: str = ""


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Tool] = (),
    options: Options | None = None,
) -> list[int]:
    """Token ids of a chat's prompt, with the beginning-of-text token where the model wants it, once.

    Special tokens come from the template only: a message, tool or option that spells one stays the text that it is.
    Arguments and errors as for `ChatTemplate.render`; TokenizerError without a template.
    """
    text, mark = _rendered(tokenizer, messages, add_generation_prompt, tools, options)
    return tokenizer.encode(text, special=True, bos=True, plain=_plain(mark))


def continuation(
    tokenizer: Tokenizer,
    output: Sequence[int],
    turn: Message,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    options: Options | None = None,
) -> list[int]:
    """Token ids to append to a chat for its next turn: what the template puts after a stand-in for the answer.

    Args:
        output: the tokens that the model answered, with or without its end token, which is never doubled.
        turn: the next message.
        messages: the chat before the answer, for templates that look at it.

    Raises as `chat_ids` does, and TokenizerError when the template does not keep a plain answer as it is.
    """
    stand_in = f"{_marks([*messages, turn], tools, options, _template(tokenizer))[1]}"
    answer = f"{stand_in}answer{stand_in}"
    chat = [*messages, {"role": "assistant", "content": answer}, turn]
    text, mark = _rendered(tokenizer, chat, True, tools, options)
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


def next_prompt(tokenizer: Tokenizer, turn: Turn) -> NextPrompt:
    """The prompt of a chat's next turn, from the tokens so far or from its messages.

    Many templates drop the reasoning of earlier answers. Then the exact tokens so far, which the model saw, and the chat
    rendered anew, which its makers meant, are two prompts, and `turn.history` chooses.

    Raises as `chat_ids` does; TokenizerError also when the tokens are kept and nothing can be appended (`continuation`).
    """
    extras: dict[str, Any] = {"tools": turn.tools, "options": turn.template_options}
    so_far = [*turn.prompt, *turn.output]
    answer = tokenizer.decode(turn.output)

    def kept(reason: str = "") -> NextPrompt:
        tail = continuation(tokenizer, turn.output, turn.message, turn.messages, **extras)
        return NextPrompt(tokens=(*so_far, *tail), answer=answer, kept=len(so_far), reason=reason)

    if turn.history == "keep":
        return kept()
    held = sorted(tokenizer.special_ids.intersection(turn.output[:-1]))
    if turn.history == "auto" and held:
        return kept(f"The answer holds {tokenizer.piece(held[0])!r}, which no message can, so its tokens were kept.")
    chat = [*turn.messages, {"role": "assistant", "content": answer}, turn.message]
    rendered = chat_ids(tokenizer, chat, **extras)
    if turn.history == "auto" and _begins(tokenizer, rendered, so_far):
        return kept()
    same = next((at for at, pair in enumerate(zip(rendered, so_far, strict=False)) if pair[0] != pair[1]), None)
    common = min(len(rendered), len(so_far)) if same is None else same
    reason = f"{_WHY[turn.history]} It begins with {common:,} of the {len(so_far):,} tokens so far."
    return NextPrompt(tokens=tuple(rendered), answer=answer, kept=common, reason=reason)


_WHY = {
    "auto": "The chat template shows the last answer otherwise than it was generated (templates drop reasoning, for one), so the whole"
    " chat was rendered anew.",
    "render": "The whole chat was rendered anew, as asked.",
}


def _begins(tokenizer: Tokenizer, rendered: Sequence[int], so_far: Sequence[int]) -> bool:
    """Whether a chat rendered anew has the text so far, white space aside: templates trim it."""
    ended = bool(so_far) and so_far[-1] in tokenizer.end_ids
    new, old = (
        "".join(tokenizer.decode(ids, skip_special=False).split())
        for ids in (rendered, so_far[:-1] if ended else so_far)
    )
    return new.startswith(old)


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    if tokenizer.chat_template is None:
        raise TokenizerError(
            "The model file has no chat template: it is a base model, or was made without one.",
            "Give a raw prompt instead of messages: text with chat=False.",
        )
    return tokenizer.chat_template


def _rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Sequence[Tool],
    options: Options | None,
) -> tuple[str, str]:
    """The template's text in which spelled special tokens are hidden, and the mark around them."""
    template = _template(tokenizer)
    template.check(messages, tools, options)
    mark = _marks(messages, tools, options, template)[0]
    shielded = _shielded(tokenizer, [list(messages), list(tools), options or {}], mark)
    text = template.render(shielded[0], add_generation_prompt, tools=shielded[1], options=shielded[2])
    return text, mark


def _marks(
    messages: Sequence[Message], tools: Sequence[Tool], options: Options | None, template: ChatTemplate
) -> tuple[str, str]:
    """Two characters that occur in neither the chat nor the templates."""
    given = texts([list(messages), list(tools), dict(options or {})], "messages")
    seen = set().union(*map(set, template.sources.values()), *map(set, given))
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
    if isinstance(value, dict):  # keys too: those of schemas and arguments are the user's or the model's words
        return {_shielded(tokenizer, key, mark): _shielded(tokenizer, part, mark) for key, part in value.items()}
    return value


def _plain(mark: str) -> Callable[[str], str]:
    """Undoes `_shielded`, also where a template wrote JSON in ASCII."""
    either = f"(?:{mark}|\\\\u{ord(mark):04x})"
    hidden = re.compile(f"{either}([0-9a-fA-F]+){either}")
    return lambda text: hidden.sub(lambda found: bytes.fromhex(found[1]).decode(), text)
