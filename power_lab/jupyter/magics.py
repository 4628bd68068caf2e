"""`%%generate` and `%lab`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from power_lab.jupyter.options import Options, generate_options, sampling_of, settings_of
from power_lab.jupyter.tracebacks import shorten
from power_lab.lab import Lab


@magics_class
class PowerLabMagics(Magics):
    """The magics of a shell. They use its variable `lab` while that is a Lab, else the one given here."""

    def __init__(self, shell: Any, lab: Lab) -> None:
        super().__init__(shell)
        self._own = lab
        self._generate = generate_options()
        self._verbs: dict[str, Callable[[list[str]], Any]] = {
            "status": self._status,
            "load": self._load,
            "configure": lambda words: self._lab.configure(**settings_of(words)),
            "explain": _plain(lambda: self._lab.explain()),
            "memory": _plain(lambda: self._lab.memory()),
            "models": _plain(lambda: self._lab.models()),
            "unload": _plain(lambda: self._lab.unload()),
            "shutdown": self._shutdown,
        }

    @property
    def _lab(self) -> Lab:
        named = self._space.get("lab")
        return named if isinstance(named, Lab) else self._own

    @property
    def _space(self) -> dict[str, Any]:
        assert self.shell is not None
        return self.shell.user_ns

    @property
    def verbs(self) -> list[str]:
        """What `%lab` can do."""
        return list(self._verbs)

    @property
    def options(self) -> Options:
        """The options of `%%generate`."""
        return self._generate

    @cell_magic
    def generate(self, line: str, cell: str) -> None:
        """Generate from the cell's text. `%%generate --help` lists the options; the Run is in `run` or in what --to names."""
        options = self._generate.read(line)
        if options.help:
            print(self._generate.format_help())
            return
        if not options.to.isidentifier():
            raise UsageError(f"%%generate: --to {options.to!r} is not a variable name.")
        prompt = cell.removesuffix("\n")
        if not prompt.strip():
            raise UsageError("%%generate: the cell below this line is the prompt, and it is empty.")
        run = self._lab.generate(
            prompt,
            stream=options.stream,
            chat=options.chat,
            tools=self._variable("--tools", options.tools),
            template_options=settings_of(options.template_option),
            cache_key=options.cache_key,
            deadline_s=options.deadline_s,
            **sampling_of(options),
        )
        self._space[options.to] = run
        if options.stream is False:
            from IPython.display import display

            display(run)

    def _variable(self, option: str, name: str | None) -> Any:
        if name is not None and name not in self._space:
            raise UsageError(f"%%generate: {option} {name!r} is not a variable.")
        return None if name is None else self._space[name]

    @line_magic
    def lab(self, line: str) -> Any:
        """The engine: `%lab status | load [MODEL] [key=value ...] | configure key=value ... | explain | memory | models | unload |
        shutdown [--force]`."""
        try:
            verb, *words = shlex.split(line) or ["status"]
        except ValueError as error:
            raise UsageError(f"%lab: {error}.") from None
        act = self._verbs.get(verb)
        if act is None:
            raise UsageError(f"%lab: {verb!r} is not known. Use one of: {', '.join(self._verbs)}.")
        return act(words)

    def _status(self, words: list[str]) -> Any:
        _none(words)
        status = self._lab.status()
        if status is None:
            print("No engine host is running; the next call that needs one starts it.")
        if waits := getattr(getattr(self.shell, "kernel", None), "waits", ""):
            print(f"Widgets wait for running cells: {waits}.")
        return status

    def _load(self, words: list[str]) -> Lab:
        named = bool(words) and "=" not in words[0]
        model = {"model": words[0]} if named else {}
        return self._lab.load(**model, **settings_of(words[named:]))

    def _shutdown(self, words: list[str]) -> None:
        force = words == ["--force"]
        if not force:
            _none(words)
        print(self._lab.shutdown(force=force))


def install(shell: Any) -> None:
    """Add `lab` and the magics to any IPython shell, and shorten the tracebacks of our errors."""
    lab = shell.user_ns.get("lab")
    if not isinstance(lab, Lab):
        lab = Lab()
    shell.user_ns.setdefault("lab", lab)
    shell.register_magics(PowerLabMagics(shell, lab))
    add_completions(shell)
    shorten(shell)


def add_completions(shell: Any) -> None:
    """Complete the options of `%%generate` and the verbs of `%lab`."""

    def options(shell: Any, event: Any) -> list[str]:
        return _of(shell).options.names

    def verbs(shell: Any, event: Any) -> list[str]:
        return _of(shell).verbs

    shell.set_hook("complete_command", options, str_key="%%generate")
    shell.set_hook("complete_command", verbs, str_key="%lab")


def _of(shell: Any) -> PowerLabMagics:
    return shell.magics_manager.registry["PowerLabMagics"]


def _plain(act: Callable[[], Any]) -> Callable[[list[str]], Any]:
    def run(words: list[str]) -> Any:
        _none(words)
        return act()

    return run


def _none(words: list[str]) -> None:
    if words:
        raise UsageError(f"%lab: {words[0]!r} has no meaning here.")
