"""What the host needs of an engine. `power_lab.engine.engine.Engine` has it, a test's stand-in too, and so has a client's RemoteEngine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from power_lab.engine.chat import NextPrompt, Turn
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.messages import Options, Tool
from power_lab.engine.report import Decision, EngineStatus, MemoryPlan
from power_lab.engine.request import Prompt, SamplingParams
from power_lab.engine.trace import BlockState, EngineFacts, OnDelta, OnDone, RunRecord
from power_lab.engine.vitals import (
    EngineVitals,
    LensAsk,
    LensReport,
    LookupReport,
    PrefixTree,
    ShapesReport,
    StepRecord,
)

OnProgress = Callable[[str, int, int], None]


class TicketLike(Protocol):
    """One run in flight."""

    @property
    def id(self) -> int: ...
    def cancel(self) -> None: ...
    def result(self, timeout: float | None = None) -> RunRecord: ...


class EngineLike(Protocol):
    """One engine."""

    @property
    def facts(self) -> EngineFacts: ...
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
    ) -> TicketLike: ...
    def explain(self) -> tuple[Decision, ...]: ...
    def memory(self) -> MemoryPlan: ...
    def blocks(self) -> tuple[BlockState, ...]: ...
    def status(self) -> EngineStatus: ...
    def vitals(self) -> EngineVitals: ...
    def steps(self) -> tuple[StepRecord, ...]: ...
    def shapes(self) -> ShapesReport: ...
    def prefixes(self) -> PrefixTree: ...
    def lookup(self, prompt: Prompt, *, chat: bool | None = None, cache_key: str = "") -> LookupReport: ...
    def lens(self, ask: LensAsk) -> LensReport: ...
    def tokenize(self, text: str) -> list[int]: ...
    def continuation(self, prompt_tokens: Sequence[int], output_tokens: Sequence[int], message: str) -> list[int]: ...
    def next_prompt(self, turn: Turn) -> NextPrompt: ...
    def close(self) -> None: ...


class Factory(Protocol):
    """How an engine is made; loading happens in here."""

    def __call__(self, config: EngineConfig, *, paths: Paths, progress: OnProgress) -> EngineLike: ...
