"""What panels and inspectors are told of an engine at work. Plain structs that cross the engine socket and become JSON unchanged."""

from __future__ import annotations

import msgspec

from power_lab.engine.inspection import (
    BucketReport,
    LensAsk,
    LensDraft,
    LensReport,
    LensToken,
    LookupReport,
    PrefixNode,
    PrefixTree,
    ShapeRow,
    ShapesReport,
    StepRecord,
)
from power_lab.errors import ConfigError

__all__ = [
    "BucketReport",
    "DeviceVitals",
    "EngineVitals",
    "LensAsk",
    "LensDraft",
    "LensReport",
    "LensToken",
    "LookupReport",
    "PrefixNode",
    "PrefixTree",
    "RunVitals",
    "ShapeRow",
    "ShapesReport",
    "StepRecord",
    "Vitals",
    "checked",
    "rated",
]


SLOWEST_HZ, FASTEST_HZ = 0.2, 20.0


def checked(hz: float) -> float:
    """Raises ConfigError for a rate of samples that is not offered."""
    if not SLOWEST_HZ <= hz <= FASTEST_HZ:  # also refuses NaN
        raise ConfigError("hz", f"{hz} is outside {SLOWEST_HZ}..{FASTEST_HZ:.0f} samples a second")
    return hz


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all reports."""


# --- live: Sample frames ----------------------------------------------------------------------------------------------------------------


class RunVitals(_Report, frozen=True, kw_only=True):
    """One run in flight.

    Attributes:
        run: its number in the engine; client: who submitted it ("" where the engine is in this process).
        state: `waiting` or `running`.
        tokens: output tokens so far; prompt_tokens: of which `cached_tokens` came from the prefix cache.
        drafted, accepted: draft tokens so far; drafter: as asked ("off", "auto", ...).
        age_s: seconds since it was submitted.
    """

    run: int
    client: str
    tokens: int
    prompt_tokens: int
    drafted: int
    accepted: int
    age_s: float
    state: str = "running"
    cached_tokens: int = 0
    drafter: str = ""


class EngineVitals(_Report, frozen=True, kw_only=True):
    """One engine now. Counters are since it began; rates are over the time since this subscriber's last sample (0 or None in the first).

    Attributes:
        engine: its key in the host; model, device, mode: what runs; state: `loading` or `ready`; stage: what loading does.
        clients: who holds it.
        running, waiting: requests now; rows: token rows of the last step.
        steps, requests, tokens, prompt_tokens, cached_tokens, drafted, accepted: counters.
        passes: rounds of the target model that gave tokens; tokens / passes is tokens a pass.
        preempted: how often a request gave its blocks up.
        tokens_per_s, prompt_tokens_per_s: rates; acceptance: accepted/drafted; tokens_per_pass; hit_rate: cached/prompt tokens. None where
            nothing was counted in the time.
        free_blocks, cached_blocks, used_blocks: of the KV pool, of 64 tokens each.
        weights_bytes, pool_bytes, graph_bytes, workspace_bytes: the memory plan.
        captures, replays, eager: steps whose graph was recorded for them, that replayed one, and that ran operation by operation; together
            they are all of the engine's forward steps. graph_hit_rate: share of the last steps that replayed a graph that was there.
        drafter: the best one that is loaded ("" where none).
        last_step_s: age of the last step in seconds (-1 before the first); ends_in_s: seconds until it is closed for idleness.
        runs: in flight, in order of submission, at most 64.
    """

    engine: str
    model: str
    device: str
    mode: str
    state: str
    stage: str
    clients: tuple[str, ...]
    running: int = 0
    waiting: int = 0
    rows: int = 0
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    preempted: int = 0
    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    hit_rate: float | None = None
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    weights_bytes: int = 0
    pool_bytes: int = 0
    graph_bytes: int = 0
    workspace_bytes: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    graph_hit_rate: float | None = None
    drafter: str = ""
    last_step_s: float = -1.0
    ends_in_s: float | None = None
    runs: tuple[RunVitals, ...] = ()


def rated(now: EngineVitals, before: EngineVitals | None, seconds: float) -> EngineVitals:
    """`now` with its rates over the `seconds` since `before`, of the same engine."""
    if before is None or seconds <= 0 or now.steps < before.steps:
        return now
    tokens, passes = now.tokens - before.tokens, now.passes - before.passes
    prompt, drafted = now.prompt_tokens - before.prompt_tokens, now.drafted - before.drafted
    return msgspec.structs.replace(
        now,
        tokens_per_s=max(0, tokens) / seconds,
        prompt_tokens_per_s=max(0, prompt) / seconds,
        acceptance=min(1.0, (now.accepted - before.accepted) / drafted) if drafted > 0 else None,
        tokens_per_pass=tokens / passes if passes > 0 else None,
        hit_rate=min(1.0, max(0, now.cached_tokens - before.cached_tokens) / prompt) if prompt > 0 else None,
    )


class DeviceVitals(_Report, frozen=True, kw_only=True):
    """The device that the host's engines share. What cannot be read is None.

    Attributes:
        name: "cpu" or the GPU's name; memory_used, memory_total: bytes; utilisation: 0 to 1.
        temperature_c: degrees Celsius; power_w: watts.
    """

    name: str
    memory_used: int | None = None
    memory_total: int | None = None
    utilisation: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class Vitals(_Report, frozen=True, kw_only=True):
    """One sample of a host (or of one engine in this process).

    Attributes:
        at: unix seconds; seq: number of the sample in its subscription, from 1.
        pid, package, revision, uptime_s, resident: of the host's process; resident in bytes.
        clients: names of all that are connected; ends_in_s: seconds until the host ends, None while it is needed.
    """

    at: float
    seq: int
    pid: int
    package: str
    revision: str
    uptime_s: float
    resident: int
    clients: tuple[str, ...]
    ends_in_s: float | None
    engines: tuple[EngineVitals, ...]
    device: DeviceVitals

    def of(self, engine: str) -> EngineVitals | None:
        """The engine of that key; None where there is none."""
        return next((one for one in self.engines if one.engine == engine), None)
