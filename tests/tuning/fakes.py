"""A lab whose engines answer at once with synthetic records, and which writes down what it was asked for."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

from power_lab.engine.config import EngineConfig
from power_lab.engine.report import MemoryPlan
from power_lab.engine.request import SamplingParams
from power_lab.errors import CapacityError, ConfigError
from tests.factories import run_record

DRAFTERS = ("off", "lookup", "ngram", "mtp")


class FakeRun:
    def __init__(self, make) -> None:
        self._make = make
        self.record = None

    def when_over(self, told) -> None:
        told()

    def result(self):
        self.record = self._make()
        return self.record

    def cancel(self) -> None: ...

    def settle(self) -> None: ...


class FakeEngine:
    def __init__(self, lab, config: EngineConfig) -> None:
        self.lab, self.config = lab, config
        self.steps = 0

    def submit(self, prompt, params: SamplingParams, *, chat, cache_key):
        lab = self.lab
        lab.submitted.append((self.config, prompt, params, cache_key))

        def make():
            lab.before_result(len(lab.submitted))
            if params.speculate not in DRAFTERS:
                raise ConfigError(
                    "speculate", f"{params.speculate!r} needs a drafter that this engine has not", "Load one."
                )
            self.steps += 3
            tokens = params.max_tokens
            drafter = params.speculate
            record = run_record(tokens, drafter=drafter, width=params.width, seed=params.width)
            changed = lab.other_output(self.config, params)
            return record if not changed else _changed(record)

        return FakeRun(make)

    def memory(self) -> MemoryPlan:
        pool = self.config.kv_tokens * 1000
        return MemoryPlan(
            weights=10**8,
            pool=pool,
            pages=3,
            page_bytes=4,
            states=0,
            graphs=self.steps,
            workspace=5,
            resident=6,
            reason="fake",
        )

    def shapes(self):
        return SimpleNamespace(enabled=self.lab.graphs, steps=self.steps, replays=self.steps * 2 // 3, nbytes=77)


class FakeLab:
    """Loads engines at once. `broken` configurations do not fit; `before_result(n)` is called before the n-th run's result."""

    def __init__(self, *, broken=lambda config: False, other_output=lambda config, params: False, graphs=False) -> None:
        self.config = EngineConfig(kv_tokens=8192, draft="")
        self.broken, self.other_output, self.graphs = broken, other_output, graphs
        self.loads: list[EngineConfig] = []
        self.submitted: list = []
        self.before_result = lambda number: None
        self.given_back = 0

    @contextmanager
    def borrowed(self, progress):
        def engine_of(config):
            self.loads.append(config)
            progress("weights", 1, 2)
            if self.broken(config):
                raise CapacityError("needs 9 blocks, 8 are there", "Use less.")
            return FakeEngine(self, config)

        try:
            yield engine_of
        finally:
            self.given_back += 1


def _changed(record):
    """The same with another token at index 5."""
    import msgspec

    tokens = (*record.tokens[:5], record.tokens[5] + 1, *record.tokens[6:])
    return msgspec.structs.replace(record, tokens=tokens)
