"""`python -m power_lab.engine.host`: the engine host process. Started by a client (process.py), never by hand."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import importlib
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from power_lab.engine.config import EngineConfig, HostSettings, Paths
from power_lab.engine.host.api import EngineLike, Factory, OnProgress
from power_lab.engine.host.log import open_log
from power_lab.engine.host.place import ENDING_S, HostLock, Place, dial, listen, private_folder
from power_lab.engine.host.server import Host


def main() -> int:
    """Serve until nobody needs the host. Returns the exit status; start-up errors go to stderr, which the starter reads."""
    options = _options()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Stop belongs to the clients
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")  # hold no file system that the user may want to unmount
    os.umask(0o077)
    paths = Paths(options.cache, options.runtime, options.state)
    place = Place(private_folder(options.runtime))
    lock = HostLock(place.lock)
    if not _claim(lock, place, options.drain_s + ENDING_S):
        _forget(options.startup)
        return 0
    settings = HostSettings(idle_s=options.idle_s, linger_s=options.linger_s, drain_s=options.drain_s)
    factory = _named_factory(options.factory) if options.factory else _engine
    _serve(settings, paths, place, factory, options.startup)
    return 0


def _serve(settings: HostSettings, paths: Paths, place: Place, factory: Factory, startup: Path | None) -> None:
    listener = listen(place)
    log = open_log(paths)
    faulthandler.enable()

    def ready() -> None:
        _forget(startup)
        if factory is _engine:  # so that the first load does not wait for imports
            threading.Thread(target=_warm, name="imports", daemon=True).start()

    async def serve() -> None:
        await Host(settings, paths, factory, log).run(listener, ready)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(serve())
    except BaseException:
        log.exception("the host failed")
        raise


def _forget(startup: Path | None) -> None:
    if startup is not None:
        startup.unlink(missing_ok=True)


def _claim(lock: HostLock, place: Place, wait_s: float) -> bool:
    """Become the host of this directory; False when another one serves there. An ending host is waited for."""
    deadline = time.monotonic() + wait_s
    while not lock.acquire():
        serving = dial(place)
        if serving is not None:
            serving.close()
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"{place.lock} is held by a process that does not serve {place.socket}")
        time.sleep(0.02)
    return True


def _engine(config: EngineConfig, *, paths: Paths, progress: OnProgress) -> EngineLike:
    from power_lab.engine.engine import Engine

    return Engine(config, paths=paths, progress=progress)


def _warm() -> None:
    """Import the engine. An error here is not lost: it comes again, to its user, at the first load."""
    with contextlib.suppress(Exception):
        importlib.import_module("power_lab.engine.engine")


def _named_factory(name: str) -> Factory:
    """Another engine class, FILE.py:NAME (tests)."""
    file, _, attribute = name.rpartition(":")
    spec = importlib.util.spec_from_file_location("power_lab_factory", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"--factory {name} is not FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="power_lab.engine.host", description=__doc__)
    for name in ("cache", "runtime", "state"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("idle-s", "linger-s", "drain-s"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--startup", type=Path, help="file that holds stdout and stderr until the host serves")
    parser.add_argument("--factory", default="", help="FILE.py:NAME of an engine class (tests)")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a thread that is still loading or importing must not hold up, or crash, the end of the process
