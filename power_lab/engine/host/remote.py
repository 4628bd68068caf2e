"""An engine in the host, used like one in this process."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from power_lab.engine.chat import NextPrompt, Turn
from power_lab.engine.config import strict
from power_lab.engine.host import protocol as wire
from power_lab.engine.host.client import SETTLE_S, Feed, HostClient, Mailbox
from power_lab.engine.inspection import LensAsk, LensReport, LookupReport, PrefixTree, ShapesReport, StepRecord
from power_lab.engine.messages import Options, Tool, check_options, check_tools, texts
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Prompt, SamplingParams
from power_lab.engine.trace import BlockState, EngineFacts, OnDelta, OnDone, RunRecord
from power_lab.engine.vitals import Vitals
from power_lab.errors import ConfigError, PowerLabError


class RemoteRun:
    """A run in the host: the client's ticket.

    One thread waits for it. A KeyboardInterrupt there cancels the run, waits (bounded) until the engine has ended it, and goes on; the
    partial record is then in `record`.
    """

    def __init__(self, client: HostClient, mail: Mailbox) -> None:
        self._client, self._mail = client, mail
        self.id = mail.id
        self.record: RunRecord | None = None
        self._error: PowerLabError | None = None
        self._settled = False

    def cancel(self) -> None:
        """End the run at the next step boundary."""
        if self.record is None and self._error is None:
            self._client.send(wire.Cancel(id=self.id))

    def result(self, timeout: float | None = None, on_delta: OnDelta | None = None) -> RunRecord:
        """The finished record, whatever the finish; `on_delta` is called in this thread.

        Raises TimeoutError after `timeout` seconds without news (the run goes on), HostUnavailable, or the error of the submission.
        """
        try:
            while self.record is None:
                self._take(timeout, on_delta)
        except KeyboardInterrupt:
            self.settle()
            raise
        return self.record

    def when_over(self, told: Callable[[], None]) -> None:
        """Have `told` called once `result` need not wait: on the reader thread, or now."""
        self._mail.when_over(told)

    def settle(self) -> None:
        """Cancel, and wait until the engine has let go of the run, once. Never raises for the engine's sake."""
        if self._settled:
            return
        self._settled = True
        try:
            self.cancel()
            while self.record is None:
                self._take(SETTLE_S, None)
        except (PowerLabError, TimeoutError):
            return

    def _take(self, timeout: float | None, on_delta: OnDelta | None) -> None:
        if self._error is not None:
            raise self._error
        try:
            reply = self._mail.next(timeout)
        except PowerLabError as error:
            self._error = error
            raise
        if isinstance(reply, wire.Done):
            self.record = reply.record
        elif isinstance(reply, wire.Output) and on_delta is not None:
            on_delta(reply.delta)


class RemoteEngine:
    """The client's side of an engine: same calls as `power_lab.engine.engine.Engine`."""

    def __init__(self, client: HostClient, loaded: wire.Loaded) -> None:
        self.client = client
        self.key = loaded.engine
        self.facts: EngineFacts = loaded.facts

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        chat: bool | None = None,
        tools: Sequence[Tool] | None = None,
        template_options: Options | None = None,
        cache_key: str = "",
        deadline_s: float | None = None,
        on_delta: OnDelta | None = None,
        on_done: OnDone | None = None,
    ) -> RemoteRun:
        """Start a run. `on_delta` and `on_done` are called on the reader thread; errors of submission come out of `result`.

        Raises ConfigError naming an argument of the wrong type, over which the host would end the connection.
        """

        def listen(reply: wire.Reply) -> None:
            if isinstance(reply, wire.Output) and on_delta is not None:
                on_delta(reply.delta)
            elif isinstance(reply, wire.Done) and on_done is not None:
                on_done(reply.record)

        wanted, extras = framed(prompt), _extras(tools, template_options)
        mail = self.client.open_mail(listen if on_delta or on_done else None)
        run = RemoteRun(self.client, mail)
        try:
            fields = {
                "id": mail.id,
                "engine": self.key,
                "prompt": wanted,
                "params": params,
                "chat": chat,
                **extras,
                "cache_key": cache_key,
                "deadline_s": deadline_s,
            }
            self.client.send(strict(wire.Submit, fields))
        except KeyboardInterrupt:
            run.settle()
            raise
        except BaseException:
            self.client.close_mail(mail)
            raise
        return run

    def explain(self) -> tuple[Decision, ...]:
        return self.client.query("explain", self.key)

    def memory(self) -> MemoryPlan:
        return self.client.query("memory", self.key)

    def blocks(self) -> tuple[BlockState, ...]:
        return self.client.query("blocks", self.key)

    def status(self) -> EngineStatus:
        return self.client.query("status", self.key)

    def subscribe(
        self,
        on_vitals: Callable[[Vitals], None],
        hz: float = 2.0,
        on_end: Callable[[PowerLabError], None] | None = None,
    ) -> Feed:
        """Samples of the whole host; this engine's is `vitals.of(engine.key)`. As `HostClient.subscribe`."""
        return self.client.subscribe(on_vitals, hz, on_end)

    def steps(self) -> tuple[StepRecord, ...]:
        """The last 4,096 steps of the engine, oldest first."""
        return self.client.query("steps", self.key)

    def shapes(self) -> ShapesReport:
        """What became of each graph shape, and better ones."""
        return self.client.query("shapes", self.key)

    def prefixes(self) -> PrefixTree:
        """Every block of the prefix cache."""
        return self.client.query("prefixes", self.key)

    def lookup(
        self,
        prompt: Prompt,
        *,
        chat: bool | None = None,
        cache_key: str = "",
        cancelled: Callable[[], bool] | None = None,
    ) -> LookupReport:
        """Where a prompt would hit the prefix cache now, and where and why it stops. Arguments as for `submit`; cancelled as for `lens`."""
        asked = {"prompt": framed(prompt), "chat": chat, "cache_key": cache_key}
        return self.client.query("lookup", self.key, cancelled=cancelled, **asked)

    def lens(self, ask: LensAsk, cancelled: Callable[[], bool] | None = None) -> LensReport:
        """Target and draft at one position of a run; `LensAsk.of(record, position)` asks about a finished one.

        cancelled: whether nobody wants it any more; then it ends at the engine's next step boundary with RequestCancelled.
        """
        return self.client.query("lens", self.key, cancelled=cancelled, lens=ask)

    def tokenize(self, text: str) -> list[int]:
        return list(self.client.query("tokenize", self.key, text=text))

    def continuation(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], message: str) -> list[int]:
        """Token ids of a chat's next prompt: all tokens so far unchanged, then the user's new message."""
        tokens, output = tuple(prompt_tokens), tuple(output_tokens)
        return list(self.client.query("continuation", self.key, tokens=tokens, output=output, text=message))

    def next_prompt(self, turn: Turn) -> NextPrompt:
        """The same with the chat's messages known: `turn.history` chooses between the exact tokens and a chat rendered anew."""
        framed([*turn.messages, turn.message])
        extras = _extras(turn.tools, turn.template_options)
        fields = {"history": turn.history, "message": turn.message, "messages": tuple(turn.messages), **extras}
        asked = strict(Turn, {"prompt": tuple(turn.prompt), "output": tuple(turn.output), **fields})
        return self.client.query("next_prompt", self.key, turn=asked)

    def close(self) -> None:
        """Drop the lease."""
        if self.client.open:
            self.client.unload(self.key)


def framed(prompt: Prompt) -> wire.Prompt:
    """A prompt as it crosses the socket. Raises ConfigError for anything that is not text, token ids or chat messages."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise _not_a_prompt(prompt)
    items: list[int | wire.Data] = []
    for index, item in enumerate(prompt):
        if isinstance(item, Mapping):
            items.append(_message(dict(item), f"prompt[{index}]"))
        else:
            items.append(_token(item))
    return tuple(items)


def _message(message: wire.Data, where: str) -> wire.Data:
    for _ in texts(message, where):
        """Every part is data of JSON; whether the template takes it is the engine's to say."""
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"{where}.role", "a role such as 'user' is expected")
    return message


def _extras(tools: Sequence[Tool] | None, options: Options | None) -> wire.Data:
    check_tools(tools or ())
    check_options({} if options is None else options)
    return {"tools": tuple(tools or ()), "template_options": dict(options or {})}


def _token(value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _not_a_prompt(value) from None


def _not_a_prompt(value: object) -> ConfigError:
    remedy = "A prompt is text, a list of token ids, or a list of chat messages."
    return ConfigError("prompt", f"{type(value).__name__} found", remedy)
