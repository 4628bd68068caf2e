"""The chat templates of a model file: which one is used, what it can take, and its text for a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from power_lab.engine.messages import (
    Message,
    Options,
    Tool,
    check_messages,
    check_options,
    check_tools,
    normal_messages,
)
from power_lab.errors import ConfigError, TokenizerError

if TYPE_CHECKING:
    from power_lab.engine.chat_sandbox import Program, Sandbox

_DEFAULT, _TOOL_USE = "default", "tool_use"  # names that Hugging Face's format gives to templates
_USUAL = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token"))


class ChatTemplate:
    """A model's Jinja chat template or templates. Each is compiled at its first use, so a bad one does not keep a model from raw prompts.

    The text depends on the arguments alone, except where a template asks for the date (`strftime_now`).

    Args:
        source: the template, or templates by name: `tool_use` is taken when there are tools, else `default`.
        bos, eos: texts of the model's special tokens, which templates call `bos_token` and `eos_token`.
        now: the clock behind `strftime_now`.

    Attributes:
        sources: the templates by name; bos, eos: as given.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.sources = {_DEFAULT: source} if isinstance(source, str) else dict(source)
        self.bos = bos
        self.eos = eos
        self._now = now
        self._programs: dict[str, Program] = {}

    @property
    def source(self) -> str:
        """The template for chats without tools."""
        return self.sources[self._name(())]

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it: some files have the key without a template."""
        return not any(source.strip() for source in self.sources.values())

    @cached_property
    def _sandbox(self) -> Sandbox:
        from power_lab.engine.chat_sandbox import Sandbox  # Jinja takes 60 ms, which raw prompts need not pay

        return Sandbox(self._now)

    def _name(self, tools: Sequence[Tool]) -> str:
        for name in (_TOOL_USE, _DEFAULT) if tools else (_DEFAULT, _TOOL_USE):
            if name in self.sources:
                return name
        names = ", ".join(self.sources)
        raise TokenizerError(
            f"chat_template: no template is called 'default' or 'tool_use'; found {names:.200}.",
            "Give a raw prompt instead of messages.",
        )

    def _program(self, tools: Sequence[Tool]) -> Program:
        from power_lab.engine.chat_sandbox import Program

        if self.empty:
            raise TokenizerError("The model file's chat template is empty.", "Give a raw prompt instead of messages.")
        name = self._name(tools)
        if name not in self._programs:  # two threads may both compile it, to the same end
            self._programs[name] = Program(self.sources[name], self._sandbox)
        return self._programs[name]

    def check(self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Options | None = None) -> None:
        """Checks what is to be rendered against what the template takes.

        Raises ConfigError naming the message, tool or option and the key that is wrong, also for tools, lists and dicts
        that the template never asks for: they would be dropped without a word. A plain option that it does not use is
        no error, so that one notebook serves models with and without it.
        """
        check_tools(tools)
        check_options({} if options is None else options, self._sandbox.globals)
        program = self._program(tools)
        check_messages(messages, known=program.words)
        given = {"tools": tools} if tools else {}
        for name, value in {**given, **(options or {})}.items():
            if isinstance(value, (list, tuple, dict)) and name not in program.words:
                takes = ", ".join(sorted(program.variables - _USUAL)) or "nothing beside messages"
                key = name if name == "tools" else f"template_options.{name}"
                raise ConfigError(key, f"this model's chat template has no {name}", f"It takes: {takes:.500}.")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Tool] = (),
        options: Options | None = None,
    ) -> str:
        """The prompt text of a chat.

        Args:
            messages: dicts with `role` and `content`, as chat APIs have them.
            add_generation_prompt: whether the beginning of the model's next message follows.
            tools: JSON schemas of functions that the model may call.
            options: further variables of the template, such as `enable_thinking`.

        Raises ConfigError as `check` does, TokenizerError when the template refuses the chat, fails or exceeds its bounds.
        """
        self.check(messages, tools, options)
        variables: dict[str, Any] = {
            "documents": None,
            **(options or {}),
            "messages": normal_messages(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos,
            "eos_token": self.eos,
        }
        return self._program(tools).render(variables)
