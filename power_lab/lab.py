"""The lab: what a notebook or script talks to. It finds or starts the engine host by itself, whenever it is needed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab.conversation import TURN_OPTIONS, Conversation
from power_lab.engine.config import EngineConfig, HostSettings, Paths, user_path
from power_lab.errors import EngineClosed, EngineInUse
from power_lab.keywords import listed, plain, sampling
from power_lab.many import as_finished, derived_seed, sound

if TYPE_CHECKING:
    from power_lab.companions import Taken
    from power_lab.engine.chat import History
    from power_lab.engine.host.api import OnProgress
    from power_lab.engine.host.client import HostClient
    from power_lab.engine.host.protocol import Loaded
    from power_lab.engine.host.remote import RemoteEngine, RemoteRun
    from power_lab.engine.messages import Options, Tool
    from power_lab.engine.request import Prompt
    from power_lab.engine.trace import BlockState, EngineFacts, RunRecord
    from power_lab.model_table import Models
    from power_lab.run import Run
    from power_lab.tables import Decisions, Memory, Status
    from power_lab.tuning.sweep import Sweep
    from power_lab.widgets.inspect import Inspect
    from power_lab.widgets.watch import Watch

IN_FLIGHT = 64  # requests of one generate_many call at a time


def connect(*, paths: Paths | None = None, settings: HostSettings | None = None) -> Lab:
    """A lab. It talks to the engine host at its first call, not before."""
    return Lab(paths=paths, settings=settings)


class Lab:
    """Loads models, generates, and shows what the engine does.

    Begin with `lab.generate("...")`, which loads the default model; `lab.models()` names others. `lab.chat()` goes on from turn to turn,
    `lab.watch()` is a live dashboard, `lab.inspect` has the inspectors, `lab.sweep(...)` measures settings against each other.

    Interrupting any call is safe: the run is cancelled at the next step boundary, the model stays loaded, the next call works.
    When the host has gone, the next call starts a new one and loads the same model.

    Attributes:
        last: the latest finished run, also when it was interrupted.
        last_many: the runs of the latest `generate_many` by its prompts. Where that was interrupted: those that had finished, what those
            under way had by then (finish `cancelled`), and None for those that had not begun.
    """

    def __init__(self, *, paths: Paths | None = None, settings: HostSettings | None = None) -> None:
        self._given = paths, settings
        self._config = EngineConfig()  # the user's settings
        self._taken: Taken | None = None  # the drafter in their place that the lab took by itself
        self._client: HostClient | None = None
        self._engine: RemoteEngine | None = None
        self._lock = threading.RLock()
        self.last: Run | None = None
        self.last_many: list[Run | None] = []
        self._watch: Watch | None = None

    @cached_property
    def _paths(self) -> Paths:
        return self._given[0] or Paths.default()

    @cached_property
    def _settings(self) -> HostSettings:
        return self._given[1] or HostSettings.default()

    # --- models -----------------------------------------------------------------------------------------------------------------

    def load(self, model: str = "smollm2", *, accept_license: bool = False, **settings: Any) -> Lab:
        """Load a model, or share the engine that another notebook has with the same settings. Replaces this lab's engine.

        Args:
            model: a name from `models()`, the path of a .gguf file or of a SafeTensors folder.
            accept_license: that you accept the terms of use of a model that has some and is not on this machine yet.
            settings: fields of EngineConfig.

        Raises:
            ConfigError naming an unknown key or a wrong value; LicenseNotAccepted naming the terms; what loading raises;
            HostUnavailable.
        """
        from power_lab import hosting

        config = EngineConfig.of({"model": str(model), **plain(settings)})
        with self._lock:
            for needed in (config.model, config.draft) if accept_license else ():
                hosting.fetch(needed, self._paths)
            self._load(config)
        return self

    def configure(self, **changes: Any) -> Lab:
        """Change settings of the engine in use. Raises ConfigError, or EngineInUse when other live clients hold that engine."""
        with self._lock:
            config = EngineConfig.of({**self._config.asked(), **plain(changes)})
            self._load(config, replaces=self._held())
        return self

    def unload(self) -> None:
        """Drop the lease on the engine, which ends now unless other notebooks use it. A later call loads it again."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    @property
    def engine(self) -> RemoteEngine:
        """The engine in use, loaded (again) where it is not there."""
        with self._lock:
            if not self._held():
                self._load(self._config, taken=self._taken)
            assert self._engine is not None
            return self._engine

    @property
    def loaded(self) -> RemoteEngine | None:
        """The engine in use where it is there; loads nothing."""
        engine = self._engine
        return engine if engine is not None and engine.client.open else None

    @property
    def facts(self) -> EngineFacts:
        """What the engine is: model, file digest, licence, arithmetic, versions."""
        return self.engine.facts

    def _held(self) -> str:
        """The key of the engine in use, or nothing."""
        engine = self.loaded
        return engine.key if engine is not None else ""

    def _load(
        self, config: EngineConfig, replaces: str = "", progress: OnProgress | None = None, taken: Taken | None = None
    ) -> None:
        from power_lab import companions, hosting
        from power_lab.engine.host.remote import RemoteEngine

        def use(client: HostClient, loaded: Loaded) -> None:
            before, self._engine = self._engine, RemoteEngine(client, loaded)
            self._config, self._taken = config, taken
            if before is not None and before.key != loaded.engine:
                before.close()

        found = companions.with_drafter(config, taken)
        hosting.load(found, self._paths, self._connected, self._client, use, replaces=replaces, progress=progress)

    def _equip(self, speculate: str) -> None:
        """Have the drafter that a request names, where the model comes with it and the user chose none. Raises ConfigError."""
        from power_lab import companions

        with self._lock:
            if not companions.may_choose(speculate, self._config):
                return
            known = self._engine.facts.sha256 if self._engine is not None else companions.identity(self._config.model)
            taken = companions.wanted(speculate, known or self.facts.sha256, self._taken, loaded=bool(self._held()))
            if taken is None:
                return
            try:
                self._load(self._config, replaces=self._held(), taken=taken.kept)
            except EngineInUse as error:
                raise companions.refused(taken, self._config.model, error) from error
        companions.tell(taken)

    def _connected(self) -> HostClient:
        from power_lab.engine.host.client import HostClient

        if self._client is None or not self._client.open:
            self._client = HostClient.connect(self._paths, self._settings)
        return self._client

    # --- generating -------------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        stream: bool | None = None,
        chat: bool | None = None,
        tools: Sequence[Tool] | None = None,
        template_options: Options | None = None,
        cache_key: str = "",
        deadline_s: float | None = None,
        **params: Any,
    ) -> Run:
        """Run one request and wait for it.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"}; also `tool_calls`, `reasoning_content`, ...).
            stream: show output as it comes; None does so in notebooks only.
            chat: whether text is wrapped as a user's message; None does so where the model has a chat template.
            tools: JSON schemas of functions that the model may call. Refused where the chat template has no tools.
            template_options: further variables of the chat template, such as {"enable_thinking": False}. One that it
                does not use changes nothing, so that a notebook serves several models.
            cache_key: namespace of the prefix cache.
            deadline_s: seconds from now to the last token; a run that misses it ends with finish `deadline` and what it has.
            params: fields of SamplingParams. Where `speculate` names a trained drafter that comes with the model and the engine has
                another one, the engine is loaded anew with it, unless `draft` was chosen or others use that engine.

        Raises:
            ConfigError, CapacityError, QueueFull; StepFailed when the engine's step raised; HostUnavailable.
            KeyboardInterrupt comes through once the run is cancelled; `last` then has the partial output.
        """
        from power_lab.display import stream_for

        wanted = sampling(params)
        self._equip(wanted.speculate)
        out = stream_for(stream)
        extras = {"chat": chat, "tools": tools, "template_options": template_options}
        run = self.engine.submit(prompt, wanted, **extras, cache_key=cache_key, deadline_s=deadline_s)
        done: Run | None = None  # and not `last`, which another thread may set
        try:
            with self._closing_noticed():
                run.result(on_delta=out.delta)
        finally:
            run.settle()  # nothing to do for a finished run
            if run.record is not None:
                done = self._keep(run.record)
                out.done(done)
        assert done is not None
        return sound(done)

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        progress: bool = True,
        chat: bool | None = None,
        tools: Sequence[Tool] | None = None,
        template_options: Options | None = None,
        cache_key: str = "",
        deadline_s: float | None = None,
        **params: Any,
    ) -> list[Run]:
        """Run many requests as a continuous batch; the runs come back in the order of the prompts.

        Run `i` uses the seed `derived_seed(seed, i)`, so each can be repeated alone; `seed=None` draws the common one. Other arguments
        and errors as for `generate`; an error or interrupt cancels the rest, and `last_many` has what there is.
        """
        from power_lab.bars import CountBar
        from power_lab.run import Run

        wanted = sampling(params)
        asked = listed(prompts)
        if asked:
            self._equip(wanted.speculate)
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        extras = {"chat": chat, "tools": tools, "template_options": template_options}
        keys = {**extras, "cache_key": cache_key, "deadline_s": deadline_s}

        def submit(index: int) -> RemoteRun:
            return self.engine.submit(
                asked[index], msgspec.structs.replace(wanted, seed=derived_seed(seed, index)), **keys
            )

        records: list[RunRecord | None] = [None] * len(asked)
        try:
            with self._closing_noticed(), CountBar(len(asked), progress, "lab.last_many") as bar:
                for _, record in as_finished(submit, IN_FLIGHT, records):
                    sound(self._keep(record))
                    bar.update()
        finally:
            self.last_many = [None if record is None else Run(record) for record in records]
        runs = [run for run in self.last_many if run is not None]
        self.last = runs[-1] if runs else self.last
        return runs

    def sweep(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        repeats: int = 3,
        warmup: int = 1,
        seed: int = 0,
        chat: bool | None = None,
        progress: bool = True,
        **settings: Any,
    ) -> Sweep:
        """Measure settings against each other: `lab.sweep(prompts, width=[1, 3, 7], speculate=["off", "ngram"], kv_tokens=[4096, 8192])`.

        Settings with several values become dimensions of a cube. Each engine that they need is loaded once, the one in use first; then
        the lab has its own settings again. A point that fails keeps its reason; an interrupt gives back what is finished.

        Args:
            prompts: one, or several, that every point runs.
            repeats: counted passes over the prompts; warmup: passes before them that do not count.
            seed: run `i` of each pass has the seed `derived_seed(seed, i)`, as in `generate_many`.
            chat: as of `generate`. progress: whether to show a bar.
            settings: fields of SamplingParams and EngineConfig, and the sweep's own: `cache` (`cold`: each pass begins with an empty
                namespace; `warm`: after a pass over the same prompts) and `batch` (requests in flight).

        Raises ConfigError naming a setting that is unknown or has a wrong value, before anything is loaded.
        """
        from power_lab.tuning.sweep import sweep

        options = {"repeats": repeats, "warmup": warmup, "seed": seed, "chat": chat, "progress": progress}
        return sweep(self, prompts, base=self._config, **options, **settings)

    @contextmanager
    def borrowed(self, progress: OnProgress) -> Iterator[Callable[[EngineConfig], RemoteEngine]]:
        """For work that needs engines of other settings for a while: gives what loads one, in the place of the one before.

        Afterwards the lab's own settings are in force again. If its engine had to go, the next call loads it.
        """
        own, taken = self._config, self._taken

        def engine_of(config: EngineConfig) -> RemoteEngine:
            with self._lock:
                if config != self._config or self._taken is not None:
                    self.unload()  # first, since both may not fit the device
                    self._load(config, progress=progress)
                return self.engine

        try:
            with self._closing_noticed():
                yield engine_of
        finally:
            with self._lock:
                if (self._config, self._taken) != (own, taken):
                    self.unload()
                    self._config, self._taken = own, taken

    def chat(self, system: str | None = None, *, history: History = "auto", **params: Any) -> Conversation:
        """A conversation.

        Args:
            system: the system message.
            history: how earlier turns come back: `keep` their exact tokens, `render` them anew by the chat template, or
                `auto`, which keeps them unless the template shows earlier answers otherwise (see `Conversation`).
            params: defaults for every turn: fields of SamplingParams, and `stream`, `tools`, `template_options`, `cache_key`, `deadline_s`.
        """
        sampling({key: value for key, value in params.items() if key not in TURN_OPTIONS})
        return Conversation(self, system, params, history)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of raw text."""
        return self.engine.tokenize(text)

    def _keep(self, record: RunRecord) -> Run:
        from power_lab.run import Run

        self.last = run = Run(record)
        return run

    @contextmanager
    def _closing_noticed(self) -> Iterator[None]:
        """An engine that turns out to be closed is forgotten, so that the next call loads it again."""
        try:
            yield
        except EngineClosed:
            self._engine = None
            raise

    # --- looking ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def inspect(self) -> Inspect:
        """The inspectors: `acceptance(run)`, `lens(run)`, `timeline()`, `shapes()`, `prefixes()`, `blocks()`."""
        from power_lab.widgets.inspect import Inspect

        return Inspect(self)

    def watch(self, hz: float = 10.0) -> Watch:
        """A live dashboard of the engine; it starts none. Calling again closes the one before.

        Args:
            hz: samples a second while a page shows it, 1..20. Out of sight it keeps one a second, for a quarter of an hour.
        """
        from power_lab.widgets.watch import HostSource, Watch

        if self._watch is not None:
            self._watch.close()
        self._watch = Watch(HostSource(self._paths, self._settings), self._engine_key, hz)
        return self._watch

    def _engine_key(self) -> str:
        engine = self._engine
        return engine.key if engine is not None else ""

    def models(self, *folders: str | PathLike[str]) -> Models:
        """The models of this machine: the catalogue's, our own, those in other programs' caches and in the given folders."""
        from power_lab import models
        from power_lab.model_table import Models

        return Models(models.list_models(self._paths, tuple(user_path(str(folder), "folder") for folder in folders)))

    def explain(self) -> Decisions:
        """Every setting and mechanism in force, who owns it and why it is as it is."""
        from power_lab.companions import explained
        from power_lab.tables import Decisions

        return Decisions(explained(self.engine.explain(), self._taken))

    def memory(self) -> Memory:
        """The engine's memory plan in bytes."""
        from power_lab.tables import Memory, shown

        return shown(Memory, self.engine.memory())

    def blocks(self) -> tuple[BlockState, ...]:
        """A snapshot of every KV block."""
        return self.engine.blocks()

    def status(self) -> Status | None:
        """The host with its clients and engines, or None when none runs; starts nothing."""
        from power_lab import hosting

        return hosting.status(self._client, self._paths, self._settings)

    # --- ending -----------------------------------------------------------------------------------------------------------------

    def shutdown(self, *, force: bool = False) -> str:
        """Drop this lab's lease. The host ends too unless others are connected; says which.

        With `force` the host must end: raises EngineInUse naming the other live clients when there are any.
        """
        from power_lab import hosting

        with self._lock:
            said = hosting.end(self._client, self._paths, self._settings, force=force)
            self._client = self._engine = None
            return said

    def replace_host(self) -> None:
        """End the running host, of whatever version, after its running requests; the next call starts one of this version.

        Raises EngineInUse naming other live clients.
        """
        from power_lab import hosting

        self.disconnect()
        hosting.replace(self._paths, self._settings)

    def disconnect(self) -> None:
        """Leave the host. The engine stays loaded for its idle time, for this or another notebook."""
        with self._lock:
            client, self._client, self._engine = self._client, None, None
            if client is not None:
                client.close()

    def __repr__(self) -> str:
        engine = self._engine
        if engine is None or not engine.client.open:
            return f"<Lab: no engine yet; the next call loads {self._config.model!r}>"
        facts = engine.facts
        return f"<Lab: {facts.model} ({facts.file}), {facts.mode} on {facts.device}, {facts.threads} threads, host pid {engine.client.pid}>"
