"""One client of the host: reads its frames, starts and cancels its runs, sends replies. Lives on the event loop's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab.engine.host import protocol as wire
from power_lab.engine.host.api import EngineLike, TicketLike
from power_lab.engine.host.lease import Hosted
from power_lab.engine.host.log import where
from power_lab.engine.host.threads import on_thread
from power_lab.engine.trace import Delta, RunRecord
from power_lab.errors import ConfigError, EngineClosed, PowerLabError, ProtocolError, QueueFull, RequestCancelled

if TYPE_CHECKING:
    from power_lab.engine.host.server import Host

SEND_LIMIT = 32 << 20  # bytes that may wait for a client that reads nothing for STALL_S seconds
SEND_HARD_LIMIT = 512 << 20  # bytes that may wait for any client
STALL_S = 5.0
RUN_LIMIT = 4096
TASK_LIMIT = 64
HELLO_TIMEOUT = 10.0


@dataclass(slots=True, eq=False)
class Run:
    """A submitted request. `ticket` is None until the engine took it; a cancel that comes before is kept."""

    id: int
    hosted: Hosted
    ticket: TicketLike | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()


class Connection:
    """A connected client."""

    def __init__(self, host: Host, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int) -> None:
        self._host, self._reader, self._writer = host, reader, writer
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, Run] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outputs: deque[wire.Output] = deque()  # from engines' threads
        self._flushing = False  # whether the loop is going to send them
        self._open = True
        self._written = self._read_by_client = 0
        self._moved = time.monotonic()
        self.pid, self.name, self.observer = pid, "", False
        self.since = time.monotonic()

    @property
    def title(self) -> str:
        """How others see this client."""
        return f"{self.name} (pid {self.pid})"

    @property
    def info(self) -> wire.ClientInfo:
        return wire.ClientInfo(
            name=self.name, pid=self.pid, connected_s=time.monotonic() - self.since, observer=self.observer
        )

    async def serve(self) -> None:
        """Until the client leaves. Whatever it sends, the host lives."""
        try:
            if await self._greet():
                await self._read()
        except ProtocolError as error:
            self._host.log.warning("client %s is cut off: %s", self.title, error.message)
            self.fail(0, error)
        except ConnectionError:
            self._host.log.info("client %s broke off", self.title)
        finally:
            await self._leave()

    async def _greet(self) -> bool:
        try:
            body = await asyncio.wait_for(wire.read_frame(self._reader, wire.HELLO_LIMIT), HELLO_TIMEOUT)
        except TimeoutError:
            raise ProtocolError("No Hello frame came in time.") from None
        if body is None:
            return False
        hello = wire.request_of(body)
        if not isinstance(hello, wire.Hello):
            raise ProtocolError(f"The first frame must be Hello, not {type(hello).__name__}.")
        # A notebook's name is whatever its author made it; a line end in it would forge a line of the log.
        self.name = "".join(char if char.isprintable() else "?" for char in hello.client)
        self.observer = hello.observer
        self.send(self._host.welcome(self))
        if hello.protocol != wire.PROTOCOL:
            return False
        self._host.join(self)
        return True

    async def _read(self) -> None:
        while (body := await wire.read_frame(self._reader, wire.REQUEST_LIMIT)) is not None:
            frame = wire.request_of(body)
            if isinstance(frame, wire.Bye):
                return
            await self._handle(frame)

    async def _handle(self, frame: wire.Request) -> None:
        match frame:
            case wire.Submit():
                # In order, so that runs start in the order they were asked for.
                await self._guarded(frame.id, self._submit(frame))
            case wire.Cancel():
                self._cancel(frame.id)
            case wire.Load():
                self._spawn(frame.id, self._load(frame))
            case wire.Query():
                self._spawn(frame.id, self._query(frame))
            case wire.Unload():
                self._host.engines.release(frame.engine, self)
                self._answer(frame.id, None)
            case wire.Subscribe():
                self._spawn(frame.id, self._host.pulse.stream(self, frame))
            case wire.Stop():
                await self._guarded(frame.id, self._stop(frame))
            case wire.Release():
                await self._guarded(frame.id, self._release(frame))
            case wire.Shutdown():
                self._spawn(frame.id, self._shutdown(frame))
            case _:
                raise ProtocolError(f"Frame {type(frame).__name__} was not expected here.")

    def _spawn(self, request: int, work: Coroutine[Any, Any, None]) -> None:
        if len(self._tasks) >= TASK_LIMIT or request in self._tasks:
            work.close()
            self.fail(request, QueueFull(f"Question {request} is one too many (limit {TASK_LIMIT}).", "Await answers."))
            return

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(request, None)
            work.close()  # where it was cancelled before it began
            if task.cancelled() and self._open:
                self.fail(request, RequestCancelled(f"Request {request} was cancelled."))

        task = self._tasks[request] = self._loop.create_task(self._guarded(request, work))
        task.add_done_callback(ended)

    def _cancel(self, request: int) -> None:
        """A run ends with its record; a question or a load with RequestCancelled, unless its answer is under way."""
        if run := self._runs.get(request):
            run.cancel()
        elif task := self._tasks.get(request):
            task.cancel()

    async def _guarded(self, request: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PowerLabError as error:
            self.fail(request, error)
        except Exception as error:  # noqa: BLE001 - a bug in an engine is the client's answer, never the host's end
            self._host.log.error("request %d of %s: %s", request, self.title, where(error))
            self.fail(request, error)

    async def _load(self, frame: wire.Load) -> None:
        def watch(stage: str, done: int, total: int) -> None:
            self.send(wire.Progress(id=frame.id, stage=stage, done=done, total=total))

        if self.observer:
            raise EngineClosed("An observer cannot load an engine.", "Connect as a client.")
        self._host.refuse_when_draining()
        hosted, shared = await self._host.engines.load(frame.config, frame.replaces, self, watch)
        assert hosted.engine is not None
        if self._open:
            self.send(wire.Loaded(id=frame.id, engine=hosted.key, facts=hosted.engine.facts, shared=shared))
        else:
            self._host.engines.forget(self)

    async def _submit(self, frame: wire.Submit) -> None:
        self._host.refuse_when_draining()
        hosted, engine = self._host.engines.held(frame.engine, self)
        if len(self._runs) >= RUN_LIMIT or frame.id in self._runs:
            raise QueueFull(
                f"Request {frame.id} is one too many on this connection (limit {RUN_LIMIT}).", "Wait for results."
            )
        run = self._runs[frame.id] = Run(frame.id, hosted)
        hosted.runs += 1
        try:
            ticket = await on_thread(lambda: self._start(engine, frame, run), f"submit-{frame.id}")
        except BaseException as error:
            self._end(run)
            if isinstance(error, EngineClosed):
                self._host.engines.drop(hosted.key)
            raise
        if run.cancelled or not self._open:
            ticket.cancel()
        self.send(wire.Accepted(id=frame.id, run=ticket.id))

    def _start(self, engine: EngineLike, frame: wire.Submit, run: Run) -> TicketLike:
        """On a thread: tokenizing a long prompt must not hold up other clients."""

        def on_delta(delta: Delta) -> None:
            self._tell(wire.Output(id=frame.id, delta=delta))

        def on_done(record: RunRecord) -> None:
            self._later(self._done, run, record)

        # Here and not on the loop: the engine tells of the run from now on, and a sample names its client by the ticket.
        run.ticket = ticket = engine.submit(
            prompting(frame.prompt),
            frame.params,
            chat=frame.chat,
            tools=frame.tools,
            template_options=frame.template_options,
            cache_key=frame.cache_key,
            deadline_s=frame.deadline_s,
            on_delta=on_delta,
            on_done=on_done,
        )
        return ticket

    def _tell(self, output: wire.Output) -> None:
        """On an engine's thread: what a step says to all runs of this client wakes the loop once and goes out with one write, before what
        is told `_later` than it."""
        self._outputs.append(output)
        if not self._flushing:
            self._flushing = True
            self._later(self._flush)

    def _flush(self) -> None:
        self._flushing = False  # first: what is told from now on asks for a flush of its own, and may find that this one took it along
        frames = []
        while self._outputs:
            frames.append(wire.pack(self._outputs.popleft(), wire.REPLY_LIMIT))
        if frames:
            self._write(b"".join(frames))

    def _later(self, call: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop is closed: the process is ending
            return

    def _done(self, run: Run, record: RunRecord) -> None:
        self._end(run)
        try:
            self.send(wire.Done(id=run.id, record=record))
        except ProtocolError as error:
            self.fail(run.id, error)

    def _end(self, run: Run) -> None:
        if self._runs.pop(run.id, None) is not None:
            run.hosted.runs -= 1
            run.hosted.used = time.monotonic()

    async def _query(self, frame: wire.Query) -> None:
        if frame.kind == "engines":
            self._answer(frame.id, await on_thread(self._host.reporter(), "status"))
            return
        engine = self._host.engines.ready(frame.engine)
        over = threading.Event()
        try:
            self._answer(frame.id, await on_thread(lambda: ask(engine, frame, over.is_set), f"query-{frame.kind}"))
        finally:
            over.set()  # the client may have cancelled the question, or gone

    async def _stop(self, frame: wire.Stop) -> None:
        self._host.stop_runs(frame.engine, self)
        self._answer(frame.id, None)

    async def _release(self, frame: wire.Release) -> None:
        self._host.engines.evict(frame.engine, self.title)
        self._answer(frame.id, None)

    async def _shutdown(self, frame: wire.Shutdown) -> None:
        self._host.refuse_under_others(self)
        self._answer(frame.id, None)
        self._host.stop(drain=frame.drain)

    def _answer(self, request: int, value: object) -> None:
        self.send(wire.Answer(id=request, value=msgspec.Raw(msgspec.msgpack.encode(value))))

    def fail(self, request: int, error: BaseException) -> None:
        """Send a typed error."""
        self.send(wire.failure(request, error, str(self._host.log_path)))

    def send(self, frame: wire.Reply) -> None:
        """Queue a reply."""
        if self._open:
            self._write(wire.pack(frame, wire.REPLY_LIMIT))

    def _write(self, data: bytes) -> None:
        """A client that leaves too much unread is cut off: its requests must not pile up in the host."""
        if not self._open or self._writer.transport.is_closing():
            return
        if self._stalled():
            self._host.log.warning("client %s does not read; it is cut off", self.title)
            self._open = False
            self._writer.transport.abort()
        else:
            self._written += len(data)
            self._writer.write(data)

    def _stalled(self) -> bool:
        waiting, now = self._writer.transport.get_write_buffer_size(), time.monotonic()
        if self._written - waiting != self._read_by_client:
            self._read_by_client, self._moved = self._written - waiting, now
        return waiting > SEND_HARD_LIMIT or (waiting > SEND_LIMIT and now - self._moved > STALL_S)

    @property
    def backlog(self) -> int:
        """Bytes that the client has not read yet."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Its runs in flight."""
        return tuple(self._runs.values())

    def cancel_all(self, hosted: Hosted | None = None) -> None:
        """Cancel every run (of that engine); each still ends with its record."""
        for run in tuple(self._runs.values()):
            if hosted is None or run.hosted is hosted:
                run.cancel()

    def hang_up(self) -> None:
        """End the connection once what was sent is out."""
        self._writer.close()

    async def _leave(self) -> None:
        self._open = False
        self.cancel_all()
        for task in tuple(self._tasks.values()):
            task.cancel()
        self._host.leave(self)
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 5.0)
        except (OSError, TimeoutError):
            self._writer.transport.abort()


def prompting(prompt: wire.Prompt) -> str | list[int] | list[wire.Data]:
    """A prompt as the engine takes it. Raises ConfigError for a mixture."""
    if isinstance(prompt, str):
        return prompt
    tokens = [item for item in prompt if isinstance(item, int)]
    messages = [item for item in prompt if not isinstance(item, int)]
    if tokens and messages:
        raise ConfigError("prompt", "token ids and chat messages cannot be mixed")
    return messages or tokens


def ask(engine: EngineLike, frame: wire.Query, cancelled: Callable[[], bool] | None = None) -> object:
    """The value of a query about an engine. cancelled: whether nobody waits for it any more."""
    if frame.kind == "tokenize":
        return engine.tokenize(frame.text)
    if frame.kind == "continuation":
        return engine.continuation(frame.tokens, frame.output, frame.text)
    if frame.kind == "next_prompt":
        if frame.turn is None:
            raise ConfigError("turn", "is missing")
        return engine.next_prompt(frame.turn)
    if frame.kind == "facts":
        return engine.facts
    if frame.kind == "lookup":
        prompt = prompting(frame.prompt)
        return engine.lookup(prompt, chat=frame.chat, cache_key=frame.cache_key)
    if frame.kind == "lens":
        if frame.lens is None:
            raise ConfigError("lens", "is missing")
        return engine.lens(frame.lens, cancelled)
    # status, explain, memory, blocks, steps, shapes, prefixes: the decoder admits no other kind
    return getattr(engine, frame.kind)()
