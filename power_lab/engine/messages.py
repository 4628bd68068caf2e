"""Chats as data: messages, tools and template options, checked before anything reads them. No torch, no Jinja."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from power_lab.errors import ConfigError

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_OPTIONS = 64
MAX_CHARACTERS = 1 << 22  # of all messages together, and of tools and options
MAX_DEPTH = 32  # of lists and dicts inside one another
KEYS = ("role", "content", "name", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id")
# One thing under three names; templates ask for either of the first two.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")

Message = dict[str, Any]
Tool = dict[str, Any]
Options = Mapping[str, Any]


def check_messages(messages: Sequence[Message], known: Collection[str] = ()) -> None:
    """Checks a chat.

    Args:
        messages: dicts with `role` and `content`, as chat APIs have them. A `content` is text or a list of parts (dicts).
        known: keys that a message may have beside KEYS: those that the template asks for.

    Raises ConfigError naming the first message and key that is missing, unknown or of the wrong type.
    """
    if not isinstance(messages, (list, tuple)) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise ConfigError("messages", f"a list of 1 to {MAX_MESSAGES} messages is expected")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", known)
    _bounded("messages", list(messages))


def _check_message(message: object, where: str, known: Collection[str]) -> None:
    if not isinstance(message, dict):
        raise ConfigError(where, f"is {type(message).__name__}, not a dict with role and content")
    for key in message:
        if key not in KEYS and key not in known:
            raise ConfigError(f"{where}.{key}", "unknown key", f"Known keys: {', '.join(KEYS)}.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where}.role", "a role such as 'user' is expected")
    parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    bare = content is None and bool({"tool_calls", *_REASONING} & message.keys())
    if not (isinstance(content, str) or parts or bare):
        raise ConfigError(f"{where}.content", f"is {type(content).__name__}; text is expected")
    calls = message.get("tool_calls")
    if not (calls is None or (isinstance(calls, list) and all(isinstance(call, dict) for call in calls))):
        raise ConfigError(f"{where}.tool_calls", "a list of calls (dicts) is expected")


def normal_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them, and as Transformers hands them over: without empty keys, reasoning under all its names."""
    found: list[dict[str, Any]] = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in _REASONING if key in kept), None)
        found.append(kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning})
    return found


def check_tools(tools: Sequence[Tool]) -> None:
    """Checks JSON schemas of functions: {"type": "function", "function": {"name", "description", "parameters"}}, or the inner dict alone.

    Raises ConfigError naming the first tool and key that is missing or of the wrong type.
    """
    if not isinstance(tools, (list, tuple)) or len(tools) > MAX_TOOLS:
        raise ConfigError("tools", f"a list of at most {MAX_TOOLS} JSON schemas is expected")
    for index, tool in enumerate(tools):
        where, schema = f"tools[{index}]", tool
        if not isinstance(tool, dict):
            raise ConfigError(where, f"is {type(tool).__name__}, not the JSON schema of a function (a dict)")
        if "function" in tool:
            where, schema = f"{where}.function", tool["function"]
            if not isinstance(schema, dict):
                raise ConfigError(where, f"is {type(schema).__name__}; a dict with a name is expected")
        for key, kind, needed in (("name", str, True), ("description", str, False), ("parameters", dict, False)):
            value = schema.get(key)
            if not (isinstance(value, kind) and value != "") and (needed or value not in (None, "")):
                raise ConfigError(f"{where}.{key}", f"is {value!r:.60}; a {kind.__name__} is expected")
    _bounded("tools", list(tools))


def check_options(options: Options, functions: Iterable[str] = ()) -> None:
    """Checks variables for a template: names, and values that are JSON data. `functions` are names that are taken, too.

    Raises ConfigError naming the option.
    """
    if not isinstance(options, dict) or len(options) > MAX_OPTIONS:
        raise ConfigError("template_options", f"a dict of at most {MAX_OPTIONS} variables is expected")
    for name in options:
        where = f"template_options.{name}"
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ConfigError(where, "is not a variable's name")
        if name in _OWN or name in functions:
            raise ConfigError(where, "is set by Power Lab", "Give messages and tools as arguments of their own.")
    _bounded("template_options", dict(options))


def texts(value: Any, where: str, depth: int = 0) -> Iterator[str]:
    """All texts in JSON-like data. Raises ConfigError naming the place of anything else."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise ConfigError(
                where.partition("[")[0].partition(".")[0], f"values are nested more than {MAX_DEPTH} deep"
            )
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict):
                if not isinstance(key, str):
                    raise ConfigError(where, f"has a key that is a {type(key).__name__}; text is expected")
                yield key
            yield from texts(part, f"{where}.{key}" if isinstance(value, dict) else f"{where}[{key}]", depth + 1)
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise ConfigError(where, f"is {type(value).__name__}; text, numbers, lists and dicts are expected")


def _bounded(key: str, value: Any) -> None:
    total = sum(map(len, texts(value, key)))
    if total > MAX_CHARACTERS:
        raise ConfigError(key, f"have {total} characters; at most {MAX_CHARACTERS} are allowed")
