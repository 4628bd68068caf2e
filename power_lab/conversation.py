"""Chats that continue the exact tokens of the turns before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from power_lab.errors import ConfigError

if TYPE_CHECKING:
    from power_lab.engine.request import Prompt
    from power_lab.lab import Lab
    from power_lab.run import Run


class Conversation:
    """A chat whose every turn continues the exact tokens of the turns before, so that their KV blocks are reused.

    A turn that fails or is interrupted leaves the conversation as it was.

    Attributes:
        turns: the runs so far.
    """

    def __init__(self, lab: Lab, system: str | None, params: Mapping[str, Any]) -> None:
        self._lab = lab
        self._system = system
        self._params = dict(params)
        self.turns: list[Run] = []

    def say(self, text: str, **params: Any) -> Run:
        """One turn: the user's message in, the run of the answer out. `params` override the conversation's for this turn."""
        run = self._lab.generate(self._prompt(text), **{**self._params, **params})
        self.turns.append(run)
        return run

    def _prompt(self, text: str) -> Prompt:
        if self.turns:
            record, engine = self.turns[-1].record, self._lab.engine
            if engine.facts.sha256 != record.engine.sha256:  # token ids mean nothing to another model
                raise ConfigError(
                    "model",
                    f"this conversation was held with {record.engine.model}, and {engine.facts.model} is loaded now",
                    f"Load {record.engine.model!r} again, or begin another one with lab.chat().",
                )
            return engine.continuation(record.prompt_tokens, record.tokens, text)
        opening = [{"role": "system", "content": self._system}] if self._system is not None else []
        return [*opening, {"role": "user", "content": text}]
