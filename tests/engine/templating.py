"""Chat templates against Transformers: a matrix of chats, tools and options, and what became of each.

`python -m tests.engine.templating FOLDER` compares every .jinja file of a folder, for templates that cannot be kept here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from power_lab.engine.templates import ChatTemplate
from power_lab.errors import PowerLabError

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
ARGUMENTS = {"city": "Zürich", "days": 3, "deep": {"a": [1, 2.5, None, True], "q": "<\"'&>\n"}}

Chat = list[dict[str, Any]]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(arguments: Any, number: str = "abcdefghi") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def result(content: str, number: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "content": content, "tool_call_id": number}


CHATS: dict[str, Chat] = {
    "one question": [user("Hi")],
    "a system message": [system(" Be brief. "), user("Hi")],
    "a developer message": [{"role": "developer", "content": "Be brief."}, user("Hi")],
    "many turns": [
        system("S"),
        user("Hi"),
        answer(" Hello! "),
        user("  Bye\n"),
        answer("x"),
        user("日本語 \U0001f600\n\nz"),
    ],
    "two questions": [user("a"), user("b")],
    "an answer last": [user("a"), answer("b")],
    "thinking in the text": [user("2+2?"), answer("<think>\nhm\n</think>\n\n4"), user("3?")],
    "thinking at the end": [user("2+2?"), answer("<think>\nhm\n</think>\n\n4")],
    "thinking apart": [user("2+2?"), answer("4", reasoning_content="hm\nso"), user("3?"), answer("3", thinking="ja")],
    "thinking switched off": [system("You help. /no_think"), user("Hi /think")],
    "nothing said": [system(""), user(""), answer(""), user("x")],
    "a call and its result": [user("W?"), answer("", tool_calls=[call(ARGUMENTS)]), result('{"t": 3}')],
    "two calls": [
        user("W?"),
        answer(None, tool_calls=[call(ARGUMENTS), call({"city": "B"}, "123456789")]),
        result("3"),
        result("4", "123456789"),
        answer("It is 3."),
        user("ok"),
    ],
    "arguments as JSON": [
        system("S"),
        user("W?"),
        answer("let me", tool_calls=[call(json.dumps(ARGUMENTS))]),
        result("3"),
        answer("3"),
    ],
    "thinking before a call": [user("W?"), answer("", reasoning="hm", tool_calls=[call({"city": "B"})]), result("3")],
    "a call with a short id": [user("W?"), answer("", tool_calls=[call({}, "x")]), result("3", "x")],
    "parts": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])],
    "parts and an image": [
        system([{"type": "text", "text": "sys"}]),
        user([{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]),
        answer([{"type": "text", "text": "ok"}]),
        user("b"),
    ],
    "a role of its own": [{"role": "critic", "content": "x"}, user("y")],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.\nÜ",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "which", "enum": ["A", "B"]},
                    "days": {"type": ["integer", "null"], "default": 3},
                    "deep": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True, "reasoning_effort": "high", "thinking": True},
    {"date_string": "1 Jan 2026", "tools_in_user_message": False},
]


def theirs(source: str, chat: Chat, tools: list[dict[str, Any]], options: dict[str, Any], prompt: bool) -> str:
    """Transformers' text, its messages prepared as `apply_chat_template` does. Raises what it raises."""
    texts, _ = render_jinja_template(
        [[{key: value for key, value in message.items() if value is not None} for message in chat]],
        chat_template=source,
        tools=tools or None,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
        **options,
    )
    return texts[0]


def compare(source: str) -> Iterator[tuple[str, str]]:
    """(outcome, case) over the whole matrix: `same`, `both refuse`, `no tools`, or what is wrong."""
    ours = ChatTemplate(source, bos="<s>", eos="</s>")
    for name, chat in CHATS.items():
        for tools in ([], TOOLS):
            for options in OPTIONS:
                for prompt in (True, False):
                    yield (
                        _outcome(ours, source, chat, tools, options, prompt),
                        f"{name}, {len(tools)} tools, {options}, {prompt}",
                    )


def _outcome(ours: ChatTemplate, source: str, chat: Chat, *chosen: Any) -> str:
    tools, options, prompt = chosen
    found = error = None
    try:
        found = ours.render(chat, prompt, tools=tools, options=options)
    except PowerLabError as refused:
        error = str(refused)
    if error is not None and "chat template has no tools" in error:
        return "no tools" if _drops(source, chat, *chosen) else f"wrong: {error}"
    try:
        wanted = theirs(source, chat, tools, options, prompt)
    except Exception as refused:  # noqa: BLE001 - what Jinja and templates raise is of many kinds
        if error is None:
            return f"wrong: only Transformers raises {refused!r}"
        own = type(refused).__name__ == "TemplateError"
        return "both refuse" if not own or str(refused) in error else f"wrong: {error!r} is not {refused!r}"
    if error is not None:
        return f"wrong: {error}"
    return "same" if found == wanted else f"wrong: {found!r} is not {wanted!r}"


def _drops(source: str, chat: Chat, tools: list[dict[str, Any]], *chosen: Any) -> bool:
    """Whether Transformers gives the same with and without tools."""
    found = []
    for given in (tools, []):
        try:
            found.append(theirs(source, chat, given, *chosen))
        except Exception as refused:  # noqa: BLE001
            found.append(repr(refused))
    return found[0] == found[1]


def main(folder: Path) -> int:
    total: Counter[str] = Counter()
    for path in sorted(folder.glob("*.jinja")):
        for outcome, case in compare(path.read_text(encoding="utf-8")):
            total[outcome.partition(":")[0]] += 1
            if outcome.startswith("wrong"):
                print(f"{path.name}: {case}: {outcome}")
    print(dict(total))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
