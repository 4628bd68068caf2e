"""The engine host as a lab deals with it: engines asked for, its status, its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import msgspec

from power_lab import models
from power_lab.bars import LoadBar
from power_lab.engine.config import EngineConfig, HostSettings, Paths, names_model
from power_lab.engine.host.api import OnProgress
from power_lab.engine.host.client import HostClient, HostMismatch
from power_lab.engine.host.process import end as end_process
from power_lab.engine.host.protocol import Loaded
from power_lab.errors import EngineInUse, HostUnavailable
from power_lab.tables import Status, shown


def fetch(model: str, paths: Paths) -> None:
    """Bring a catalogue model here, its terms accepted; the host, which nobody can ask, takes only what is here."""
    if model in models.CATALOGUE:
        with LoadBar("Fetched") as bar:
            models.ensure(model, paths, bar, accept_license=True)


def load(
    config: EngineConfig,
    paths: Paths,
    connect: Callable[[], HostClient],
    kept: HostClient | None,
    use: Callable[[HostClient, Loaded], None],
    *,
    replaces: str = "",
    progress: OnProgress | None = None,
) -> None:
    """Load or share an engine, with a bar unless `progress` is told.

    Args:
        connect: gives the lab's connection; kept: the one that it has had so far.
        use: gets the engine and its connection; see `HostClient.load`, also for the errors. replaces: key of the engine to drop for it.
    """
    client = connect()
    draft = models.locate(config.draft, paths) if names_model(config.draft) else config.draft
    found = msgspec.structs.replace(config, model=models.locate(config.model, paths), draft=draft)
    begun: list[str] = []
    with LoadBar() if progress is None else nullcontext(progress) as bar:

        def told(stage: str, done: int, total: int) -> None:
            begun.append(stage)
            bar(stage, done, total)

        try:
            client.load(found, replaces=replaces, progress=told, use=partial(use, client))
        except HostUnavailable:
            if client.open or client is not kept or begun:
                raise
            # The connection had just broken, which only a call finds out: the load is not what ended the host.
            client = connect()
            client.load(found, progress=bar, use=partial(use, client))


def status(client: HostClient | None, paths: Paths, settings: HostSettings) -> Status | None:
    """Of the host that `client` is connected to, else of the running one, or None. Starts nothing."""
    if client is not None and client.open:
        return shown(Status, client.status())
    onlooker = HostClient.find(paths, settings)
    if onlooker is None:
        return None
    try:
        return shown(Status, onlooker.status())
    finally:
        onlooker.close()


def end(client: HostClient | None, paths: Paths, settings: HostSettings, *, force: bool) -> str:
    """End the host, unless others use it, and say what became of it. Raises EngineInUse with `force` where it goes on."""
    if client is None or not client.open:
        client = HostClient.find(paths, settings, observer=False)
    if client is None:
        return "No engine host is running."
    try:
        client.shutdown()
    except EngineInUse as error:
        if force:
            raise
        client.close()
        return f"This notebook's lease is dropped. {error.message}"
    return "The engine host has ended."


def replace(paths: Paths, settings: HostSettings) -> None:
    """End the running host, of whatever version, after its running requests. Raises EngineInUse naming other live clients."""
    try:
        client = HostClient.find(paths, settings)
    except HostMismatch as error:
        welcome, pid = error.welcome, error.pid
    else:
        if client is None:
            return
        welcome, pid = client.welcome, client.pid
        client.close()
    if welcome.clients:
        raise EngineInUse(f"The engine host is also used by {', '.join(welcome.clients)}.", "Close those notebooks.")
    end_process(pid)
