"""Chats that continue the exact tokens of the turns before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from power_lab.engine.chat import Turn
from power_lab.errors import ConfigError

if TYPE_CHECKING:
    from power_lab.engine.chat import History
    from power_lab.engine.messages import Message
    from power_lab.lab import Lab
    from power_lab.run import Run

TURN_OPTIONS = ("stream", "tools", "template_options", "cache_key", "deadline_s")  # of a turn, beside SamplingParams


class Conversation:
    """A chat whose turns continue the exact tokens of the turns before, so that their KV blocks are reused.

    Some chat templates show earlier answers otherwise than they were generated: without their reasoning, say. Then the two
    are different prompts, and `history` chooses: `keep` goes on from the exact tokens; `render` renders the whole chat
    anew each turn; `auto`, the default, keeps the tokens while the template agrees with them and else renders the chat anew,
    as the model's makers meant it. Whatever was not plainly continued says why in `reasons`.

    A turn that fails or is interrupted leaves the conversation as it was.

    Attributes:
        turns: the runs so far.
        reasons: for each turn, why it did not simply continue the tokens before; empty where it did.
    """

    def __init__(self, lab: Lab, system: str | None, params: Mapping[str, Any], history: History = "auto") -> None:
        self._lab = lab
        self._params = dict(params)
        self._history: History = history
        self._asked: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self.turns: list[Run] = []
        self.reasons: list[str] = []

    def __repr__(self) -> str:
        """What to do with it, for who shows it as a cell's value."""
        system = next((f", system {one['content']!r}" for one in self._asked[:1] if one["role"] == "system"), "")
        many = f"{len(self.turns)} turn{'' if len(self.turns) == 1 else 's'}"
        return f'<Conversation: {many}{system}; .say("...") is the next>'

    @property
    def messages(self) -> list[Message]:
        """The chat so far, with the last answer as its run shows it."""
        answer = [{"role": "assistant", "content": self.turns[-1].text}] if self.turns else []
        return [*self._asked, *answer]

    def say(self, message: str | Message, **params: Any) -> Run:
        """One turn: a message in, the run of the answer out.

        Args:
            message: the user's text, or a whole message, such as the result of a tool: {"role": "tool", "content": ...}.
            params: override the conversation's for this turn.

        Raises as `Lab.generate` does, and ConfigError when another model is loaded now.
        """
        turn: Message = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        chosen = {**self._params, **params}
        if self.turns:
            template = {key: chosen.pop(key, None) for key in ("tools", "template_options")}
            asked, prompt, reason = self._next(turn, template)
        else:
            asked, reason = [*self._asked, turn], ""
            prompt = asked
        run = self._lab.generate(prompt, **chosen)
        self._asked = asked
        self.turns.append(run)
        self.reasons.append(reason)
        return run

    def _next(self, turn: Message, template: Mapping[str, Any]) -> tuple[list[Message], list[int], str]:
        record, engine = self.turns[-1].record, self._lab.engine
        if engine.facts.sha256 != record.engine.sha256:  # token ids mean nothing to another model
            raise ConfigError(
                "model",
                f"this conversation was held with {record.engine.model}, and {engine.facts.model} is loaded now",
                f"Load {record.engine.model!r} again, or begin another one with lab.chat().",
            )
        found = engine.next_prompt(
            Turn(
                prompt=record.prompt_tokens,
                output=record.tokens,
                messages=tuple(self._asked),
                message=turn,
                tools=tuple(template["tools"] or ()),
                template_options=template["template_options"] or {},
                history=self._history,
            )
        )
        answer = {"role": "assistant", "content": found.answer}
        return [*self._asked, answer, turn], list(found.tokens), found.reason
