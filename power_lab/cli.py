"""The command line: `power-lab lab | run | models | doctor | warm`.

Each command has `--json`: its result on stdout as one JSON document, errors included. Progress and errors for people go to
stderr. Exit status: 0 done; 1 the command ran and the answer is no (a cell failed, something is missing); 2 wrong use or a
refused input; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab import __version__
from power_lab.engine.config import EngineConfig, Paths
from power_lab.errors import PowerLabError

if TYPE_CHECKING:
    from power_lab.jupyterlab import LabServer
    from power_lab.models import ModelEntry
    from power_lab.notebook import CellFailure, NotebookRun


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except PowerLabError as error:
        if options.json:
            _print_json({"error": {"kind": type(error).__name__, "message": error.message, "remedy": error.remedy}})
        else:
            print(f"power-lab: {error.message}", file=sys.stderr)
            if error.remedy:
                print(f"  {error.remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def lab(options: argparse.Namespace) -> int:
    """JupyterLab on the tour."""
    from power_lab.jupyterlab import serve

    def on_ready(server: LabServer) -> None:
        if options.json:
            _print_json(server)
            return
        print(f"JupyterLab runs, with the tour open:\n\n    {server.url}\n")
        print("The address holds a secret token: do not share it. Stop with Ctrl-C.", flush=True)

    if not options.json:
        print("Starting JupyterLab ...", flush=True)
    return serve(
        options.folder, paths=Paths.default(), port=options.port, browser=not options.no_browser, on_ready=on_ready
    )


def run(options: argparse.Namespace) -> int:
    """Execute a notebook."""
    from power_lab.notebook import run_notebook

    with _progress(options) as progress:
        done = run_notebook(
            options.notebook,
            options.output,
            kernel=options.kernel,
            timeout=options.timeout,
            allow_errors=options.allow_errors,
            on_cell=lambda done, total, line: progress(f"{options.notebook.name}: {line[:40]}", done, total),
        )
    if options.json:
        _print_json(done)
    else:
        _tell(done)
    return 130 if done.interrupted else 0 if done.ok else 1


def _tell(done: NotebookRun) -> None:
    for failure in done.failures:
        print(_described(done.notebook, failure), file=sys.stderr)
    state = "stopped by Ctrl-C" if done.interrupted else "finished" if done.ok else "failed"
    errors = f", {len(done.failures)} with errors" if done.failures else ""
    print(f"{done.notebook}: {state}, {done.executed} of {done.cells} cells in {done.seconds:.1f} s{errors}")
    print(f"outputs in {done.output}")


def _described(notebook: str, failure: CellFailure) -> str:
    head = f"{notebook}: cell {failure.cell} failed: {failure.error}: {failure.message}\n    {failure.source}"
    return f"{head}\n{failure.traceback}" if failure.traceback else head


def models(options: argparse.Namespace) -> int:
    """List, fetch or verify models."""
    from power_lab import models as store

    paths = Paths.default()
    if options.action == "list":
        listed = store.list_models(paths)
        _show(options, listed, lambda: "\n".join(map(_model_line, listed)))
        return 0
    with _progress(options) as progress:
        act = store.fetch if options.action == "fetch" else store.verify
        entry = act(options.name, paths, progress)
    _show(options, entry, lambda: f"{entry.name}: {entry.path}\nSHA-256 {entry.sha256}")
    return 0


def _model_line(entry: ModelEntry) -> str:
    where = str(entry.path) if entry.present else f"not here yet: power-lab models add {entry.name}"
    return f"{entry.name:12}  {entry.size / 1e6:8.1f} MB  {entry.license or 'licence in the file':20}  {where}"


_VERDICTS = {
    "ok": "All is well.",
    "warn": "Power Lab works; the lines marked warn say what would be better.",
    "fail": "The lines marked fail say what is missing.",
}


def doctor(options: argparse.Namespace) -> int:
    """What this machine has, what is missing, what to type."""
    from power_lab.doctor import examine, worst

    checks = examine(Paths.default())
    verdict = worst(checks)
    if options.json:
        _print_json({"status": verdict, "version": __version__, "checks": checks})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.status:4}  {check.name:{width}}  {check.value}")
            if check.remedy:
                print(f"{'':4}  {'':{width}}  -> {check.remedy}")
        print(f"\npower-lab {__version__}. {_VERDICTS[verdict]}")
    return 1 if verdict == "fail" else 0


def warm(options: argparse.Namespace) -> int:
    """Fetch the default model and compile the kernels, so that the first notebook does not wait for either."""
    from power_lab import models as store
    from power_lab.engine.engine import Engine

    config, paths = EngineConfig(), Paths.default()
    with _progress(options) as progress:
        entry = store.ensure(config.model, paths, progress)
        Engine(config, paths=paths, progress=progress).close()
    ready = {"model": entry, "kernels": paths.kernels}
    _show(options, ready, lambda: f"Ready: {entry.name}; compiled kernels in {paths.kernels}")
    return 0


class _StageLines:
    """Progress for logs: one line when a stage begins; `kernels: rope` is a step of the stage `kernels`."""

    def __init__(self) -> None:
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        name = stage.partition(": ")[0]
        if name != self._stage:
            self._stage = name
            print(f"{name} ...", file=sys.stderr, flush=True)


def _progress(options: argparse.Namespace) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Called as (stage, done, total): nothing with --json, bars on a terminal, lines anywhere else."""
    if options.json:
        return nullcontext(lambda stage, done, total: None)
    if not sys.stderr.isatty():
        return nullcontext(_StageLines())
    from power_lab.bars import LoadBar

    return LoadBar()


def _show(options: argparse.Namespace, value: Any, text: Callable[[], str]) -> None:
    if options.json:
        _print_json(value)
    else:
        print(text())


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2) + b"\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print the result as JSON")
    parser = argparse.ArgumentParser(prog="power-lab", description="A Jupyter lab with an exact LLM engine inside.")
    parser.add_argument("--version", action="version", version=f"power-lab {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[shared], help=about, description=about)
        added.set_defaults(command=function)
        return added

    sub = command("lab", lab, "Open JupyterLab on the tour: a checkout's own, else a copy in the working folder.")
    sub.add_argument("folder", nargs="?", type=Path, help="root folder to copy the notebooks into (default: see above)")
    sub.add_argument("--port", type=_port, default=0, help="port on 127.0.0.1 (default: a free one)")
    sub.add_argument("--no-browser", action="store_true", help="print the address and open nothing")

    sub = command("run", run, "Execute a notebook in a fresh Power Lab kernel and keep its outputs.")
    sub.add_argument("notebook", type=Path)
    sub.add_argument("-o", "--output", type=Path, help="where to write it (default: in place)")
    sub.add_argument("--timeout", type=_seconds, help="seconds that one cell may take (default: no limit)")
    sub.add_argument("--allow-errors", action="store_true", help="go on after a cell that raised")
    sub.add_argument("--kernel", default="power_lab", help="another Jupyter kernel (default: %(default)s)")

    sub = command("models", models, "List the models, fetch one, or check one's bytes.")
    sub.set_defaults(action="list")
    actions = sub.add_subparsers(metavar="ACTION")
    for action, about in (("fetch", "Fetch a model into the cache."), ("verify", "Check a model's SHA-256.")):
        added = actions.add_parser(action, parents=[shared], help=about, description=about)
        added.add_argument("name")
        added.set_defaults(action=action)

    command("doctor", doctor, "Say what this machine has, what is missing and what to type.")
    command("warm", warm, "Fetch the default model and compile the kernels.")
    return parser


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..65535")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return seconds
