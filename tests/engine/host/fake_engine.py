"""A stand-in with the engine's API and no model: words come at a pace, faults on request.

The model's name says how it behaves: `fake`, `slow-load` (a second of loading), `broken` (a typed error while loading), `bug` (an untyped
one), `exits` (SystemExit while loading). Prompts may ask for faults: `raise typed`, `raise bug`, `abort` (the process dies),
`fail` (the run ends with finish `error`). A prompt that holds `slow` takes 20 ms a token; `flood` gives
a megabyte every 100 ms.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from power_lab.engine.chat import NextPrompt, Turn
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.host.api import OnProgress
from power_lab.engine.messages import Options, Tool
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Prompt, SamplingParams
from power_lab.engine.trace import BlockState, Delta, EngineFacts, OnDelta, OnDone, RunRecord
from power_lab.engine.vitals import (
    EngineVitals,
    LensAsk,
    LensReport,
    LookupReport,
    PrefixTree,
    RunVitals,
    ShapesReport,
    StepRecord,
)
from power_lab.errors import CapacityError, ConfigError, EngineClosed, ModelFileError, RequestCancelled


class FakeTicket:
    def __init__(self, number: int) -> None:
        self.id = number
        self.record: RunRecord | None = None
        self.cancelled = threading.Event()
        self.done = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()

    def result(self, timeout: float | None = None) -> RunRecord:
        if not self.done.wait(timeout) or self.record is None:
            raise TimeoutError
        return self.record


class FakeEngine:
    def __init__(self, config: EngineConfig, *, paths: Paths, progress: OnProgress) -> None:
        progress("weights", 0, 4)
        if config.model == "broken":
            raise ModelFileError("broken.gguf: truncated at byte 12", "Fetch it again.")
        if config.model == "bug":
            raise ZeroDivisionError("a bug while loading")
        if config.model == "exits":
            raise SystemExit(3)
        for done in range(1, 5):
            time.sleep(0.25 if config.model == "slow-load" else 0.0)
            progress("weights", done, 4)
        self.facts = EngineFacts(
            model=config.model,
            file="fake.gguf",
            sha256=hashlib.sha256(config.model.encode()).hexdigest(),
            license="none",
            architecture="fake",
            parameters=0,
            context=2048,
            vocab=1000,
            quantisation={},
            config={"pid": os.getpid(), "kv_tokens": config.kv_tokens},
            mode=config.mode,
            device="cpu",
            threads=1,
            digest="d" * 16,
            revision="r" * 16,
            versions={},
        )
        self._draft = config.draft
        self._numbers = itertools.count()
        self._closed = False
        self._live: dict[int, FakeTicket] = {}
        self._tokens = self._looks = 0

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
    ) -> FakeTicket:
        if self._closed:
            raise EngineClosed("The engine is closed.", "Load it again.")
        if prompt == "raise typed":
            raise CapacityError("needs 9 blocks, 8 are there", "Use less.")
        if prompt == "raise bug":
            raise ZeroDivisionError(f"a bug with the prompt {prompt!r}")
        if prompt == "abort":
            os.abort()
        if prompt == "echo":
            raise CapacityError(repr((list(tools or ()), template_options)))
        ticket = FakeTicket(next(self._numbers))
        self._live[ticket.id] = ticket
        pace = 0.1 if "flood" in str(prompt) else 0.02 if "slow" in str(prompt) else 0.0
        work = threading.Thread(
            target=self._work, args=(ticket, prompt, params, cache_key, pace, on_delta, on_done), daemon=True
        )
        work.start()
        return ticket

    def _work(
        self,
        ticket: FakeTicket,
        prompt: Prompt,
        params: SamplingParams,
        cache_key: str,
        pace: float,
        on_delta: OnDelta | None,
        on_done: OnDone | None,
    ) -> None:
        tokens = [prompt] if isinstance(prompt, str) else prompt
        seed = hashlib.sha256(repr((tokens, params.seed)).encode()).digest()
        out: list[int] = []
        finish = "length"
        start = time.monotonic()
        while len(out) < params.max_tokens:
            if ticket.cancelled.is_set() or self._closed:
                finish = "cancelled"
                break
            out.append(seed[len(out) % 32])
            self._tokens += 1
            if on_delta is not None:
                on_delta(self._delta(ticket.id, out, time.monotonic() - start, "flood" in str(prompt)))
            if pace:
                time.sleep(pace)
        if prompt == "fail":
            finish = "error"
        ids = tuple(t for t in tokens if isinstance(t, int)) or tuple(self.tokenize(str(tokens)))
        ticket.record = RunRecord(
            id=ticket.id,
            prompt_tokens=ids,
            tokens=tuple(out),
            text="".join(f"w{token} " for token in out),
            pieces=tuple(f"w{token} " for token in out),
            finish=finish,
            finish_detail=f"{len(out)} tokens",
            params=msgspec.to_builtins(params, str_keys=True),
            namespace=cache_key,
            cached=0,
            preemptions=0,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=time.monotonic() - start,
            rounds=(),
            steps=(),
            engine=self.facts,
        )
        self._live.pop(ticket.id, None)
        if on_done is not None:
            on_done(ticket.record)
        ticket.done.set()

    @staticmethod
    def _delta(number: int, out: list[int], at: float, flood: bool) -> Delta:
        text = "x" * (1 << 20) if flood else f"w{out[-1]} "
        return Delta(id=number, text=text, tokens=len(out), drafted=0, accepted=0, cached=0, at=at)

    def explain(self) -> tuple[Decision, ...]:
        return (
            Decision(key="mode", value="exact", owner="backend", reason="the default"),
            Decision(key="draft", value=self._draft, owner="model", reason="a fake has any"),
        )

    def memory(self) -> MemoryPlan:
        return MemoryPlan(
            weights=1, pool=2, pages=3, page_bytes=4, states=0, graphs=0, workspace=5, resident=6, reason="fake"
        )

    def blocks(self) -> tuple[BlockState, ...]:
        return (BlockState(id=0, state="dummy", refs=0, hash="", owners=(), tokens=0, parent=-1, depth=0),)

    def status(self) -> EngineStatus:
        return EngineStatus(
            running=len(self._live),
            waiting=0,
            steps=0,
            requests=self._looks,
            tokens=0,
            drafted=0,
            accepted=0,
            cached_tokens=0,
            prompt_tokens=0,
            free_blocks=1,
            cached_blocks=0,
            used_blocks=0,
            last_step_s=0.0,
        )

    def vitals(self) -> EngineVitals:
        return EngineVitals(
            engine="",
            model=self.facts.model,
            device="cpu",
            mode=self.facts.mode,
            state="ready",
            stage="",
            clients=(),
            running=len(self._live),
            tokens=self._tokens,
            steps=self._tokens,
            runs=tuple(
                RunVitals(run=number, client="", tokens=0, prompt_tokens=0, drafted=0, accepted=0, age_s=0.0)
                for number in list(self._live)
            ),
        )

    def steps(self) -> tuple[StepRecord, ...]:
        return ()

    def shapes(self) -> ShapesReport:
        counts = {"steps": 0, "captures": 0, "replays": 0, "eager": 0, "evictions": 0, "graphs": 0}
        told = {"hit_rate": None, "window": 0, "history": (), "demand": {}, "planned": None}
        return ShapesReport(enabled=False, why="a fake has none", shapes=(), nbytes=0, budget=0, **counts, **told)

    def prefixes(self) -> PrefixTree:
        raise ConfigError("prefixes", "a fake has none")

    def lookup(self, prompt: Prompt, *, chat: bool | None = None, cache_key: str = "") -> LookupReport:
        raise ConfigError("lookup", repr((prompt, chat, cache_key)))

    def lens(self, ask: LensAsk, cancelled: Callable[[], bool] | None = None) -> LensReport:
        """With cache key `slow` the first token of an output is answered, and the others are looked at until nobody wants them."""
        if ask.namespace != "slow":
            raise ConfigError("lens", repr(ask.position))
        number, said = next(self._numbers), ask.tokens[ask.position]
        self._looks += 1
        self._live[number] = FakeTicket(number)
        try:
            while ask.position != ask.prompt:
                if cancelled is not None and cancelled():
                    raise RequestCancelled("Nobody wants it.")
                time.sleep(0.01)
        finally:
            del self._live[number]
        facts = {
            "seed": 0,
            "temperature": 0.0,
            "candidates": (),
            "piece": "",
            "context": "",
            "draft": None,
            "why": "",
            "noise": "",
        }
        return LensReport(position=ask.position, index=0, chosen=said, said=said, exact=True, **facts)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def continuation(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], message: str) -> list[int]:
        return [*prompt_tokens, *output_tokens, *message.encode()]

    def next_prompt(self, turn: Turn) -> NextPrompt:
        kept, answer = (*turn.prompt, *turn.output), "".join(f"w{token} " for token in turn.output)
        reason = repr(turn) if turn.tools else ""
        return NextPrompt(
            tokens=(*kept, *turn.message["content"].encode()), answer=answer, kept=len(kept), reason=reason
        )

    def close(self) -> None:
        self._closed = True
