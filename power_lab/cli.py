"""The command line: `power-lab lab | run | models | doctor | warm`.

Each command has `--json`: its result on stdout as one JSON document, errors included. Progress and errors for people go to
stderr. Exit status: 0 done; 1 the command ran and the answer is no (a cell failed, something is missing); 2 wrong use or a
refused input; 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from power_lab import __version__
from power_lab.engine.config import EngineConfig, Paths
from power_lab.errors import ConfigError, EngineInUse, LicenseNotAccepted, PowerLabError

if TYPE_CHECKING:
    from power_lab.jupyterlab import LabServer
    from power_lab.models import ModelEntry, Verified
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
    """List the models of this machine."""
    from power_lab.model_table import Models
    from power_lab.models import list_models

    listed = list_models(Paths.default(), tuple(folder.absolute() for folder in options.path))
    _show(options, listed, lambda: repr(Models(listed)))
    return 0


def models_add(options: argparse.Namespace) -> int:
    """Bring a model into our store; on a terminal its terms of use are asked for."""
    from power_lab.models import CATALOGUE, add

    def bring(accepted: bool) -> ModelEntry:
        with _progress(options, "Added") as progress:
            return add(options.model, Paths.default(), progress, link=options.link, accept_license=accepted)

    try:
        entry = bring(options.accept_license)
    except LicenseNotAccepted as error:
        if options.json or not sys.stdin.isatty():
            raise
        print(error.message)
        if not _agreed("Do you accept these terms?"):
            raise
        entry = bring(True)
    terms = CATALOGUE[entry.name].terms if entry.name in CATALOGUE else None
    kept = "" if terms is None else f"\n{terms.name}: {entry.path.with_name(terms.file)} and {terms.url}"
    _show(options, entry, lambda: f"{entry.name}: {entry.path}\nSHA-256 {entry.sha256}{kept}")
    return 0


def models_remove(options: argparse.Namespace) -> int:
    """Delete a model from our store."""
    from power_lab.models import removable, remove

    paths = Paths.default()
    entry = removable(options.model, paths)
    _refuse_in_use(entry, paths)
    if not options.yes:
        if options.json or not sys.stdin.isatty():
            raise ConfigError("models remove", f"would delete {entry.path}", "To do it without being asked: --yes")
        if not _agreed(f"Delete {entry.path} ({entry.size / 1e6:,.0f} MB)?"):
            return 1
    remove(options.model, paths)
    _show(options, {"removed": entry}, lambda: f"Removed {entry.name}: {entry.path}")
    return 0


def models_verify(options: argparse.Namespace) -> int:
    """Read every byte of models and compare with what is known."""
    from power_lab.models import verify

    with _progress(options, "Verified") as progress:
        done = verify(options.models, Paths.default(), progress)
    _show(options, done, lambda: "\n".join(map(_verdict, done)) or "There are no models in the store yet.")
    return 1 if any(one.status == "damaged" for one in done) else 0


def _verdict(one: Verified) -> str:
    known = {
        "ok": f"every byte as expected ({one.against})",
        "new": "nothing was known of it; remembered now",
        "damaged": one.detail,
    }
    return f"{one.status:7}  {one.name}: {known[one.status]}"


def _refuse_in_use(entry: ModelEntry, paths: Paths) -> None:
    """Raises EngineInUse when an engine of the running host has the model loaded. Starts none."""
    from power_lab.lab import Lab
    from power_lab.models.files import real_path

    status = Lab(paths=paths).status()
    for engine in status.engines if status is not None else ():
        models = {engine.config.model, engine.config.draft}
        places = (entry.path, real_path(entry.path))
        if entry.name in models or any(Path(model).is_relative_to(path) for model in models for path in places):
            raise EngineInUse(
                f"Model {entry.name!r} is loaded in engine {engine.engine}.",
                "Unload it first: lab.unload() or lab.shutdown().",
            )


def _agreed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


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


def _progress(
    options: argparse.Namespace, done: str = "Loaded"
) -> AbstractContextManager[Callable[[str, int, int], None]]:
    """Called as (stage, done, total): nothing with --json, bars on a terminal, lines anywhere else."""
    if options.json:
        return nullcontext(lambda stage, done, total: None)
    if not sys.stderr.isatty():
        return nullcontext(_StageLines())
    from power_lab.bars import LoadBar

    return LoadBar(done)


def _show(options: argparse.Namespace, value: Any, text: Callable[[], str]) -> None:
    if options.json:
        _print_json(value)
    else:
        print(text())


def _print_json(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2) + b"\n")
    sys.stdout.flush()


def _plain(value: Any) -> str:
    """Paths as text; a name that is not UTF-8 cannot be said exactly in JSON."""
    return os.fsencode(value).decode(errors="replace") if isinstance(value, Path) else str(value)


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

    sub = command("models", models, "List the models of this machine; add, remove or verify some.")
    sub.add_argument("--path", type=Path, action="append", default=[], help="look in this folder too (may be repeated)")
    _models_actions(sub.add_subparsers(metavar="ACTION"), shared)

    command("doctor", doctor, "Say what this machine has, what is missing and what to type.")
    command("warm", warm, "Fetch the default model and compile the kernels.")
    return parser


def _models_actions(actions: Any, shared: argparse.ArgumentParser) -> None:
    def action(name: str, function: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, parents=[shared], help=about, description=about)
        added.set_defaults(command=function)
        return added

    sub = action("add", models_add, "Fetch a model of the catalogue, or bring a file or folder into the store.")
    sub.add_argument("model", help="a name of the list, a .gguf file or a folder")
    sub.add_argument("--link", action="store_true", help="keep a symbolic link instead of a copy")
    sub.add_argument("--accept-license", action="store_true", help="accept the model's terms of use")
    sub = action("remove", models_remove, "Delete a model from the store, never from another program's folder.")
    sub.add_argument("model")
    sub.add_argument("--yes", action="store_true", help="do not ask")
    sub = action("verify", models_verify, "Read every byte of models and compare with what is known of them.")
    sub.add_argument("models", nargs="*", metavar="model", help="names or paths (default: all in the store)")


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
