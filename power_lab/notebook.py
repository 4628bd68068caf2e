"""Run a notebook from top to bottom in a fresh kernel, keep its outputs, and say exactly what failed."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from power_lab.errors import PowerLabError

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode

KERNEL = "power_lab"
"""Name of the Power Lab kernel's spec."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

CellStarted = Callable[[int, int, str], None]
"""Called with (code cells done, code cells in all, first line of the next one)."""


class CellFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One cell that did not finish well.

    Attributes:
        cell: position among all cells, from 1, as a reader counts them.
        source: the cell's first line.
        error: the exception's name, or `Timeout`, `KernelDied`.
        message: one line.
        traceback: as the kernel sent it, without terminal colours; empty when the kernel sent none.
    """

    cell: int
    source: str
    error: str
    message: str
    traceback: str = ""


class NotebookRun(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a notebook.

    Attributes:
        notebook, output: where it was read and written.
        cells: code cells with something in them; executed: those that were run, the failing one included.
        seconds: from the kernel's start to its end.
        failures: what went wrong, in order; more than one only where errors are allowed.
        interrupted: whether Ctrl-C ended the run.
        ok: whether every cell ran and none failed, save where errors are allowed.
    """

    notebook: str
    output: str
    kernel: str
    cells: int
    executed: int
    seconds: float
    failures: list[CellFailure]
    interrupted: bool
    ok: bool


def run_notebook(
    notebook: Path,
    output: Path | None = None,
    *,
    kernel: str = KERNEL,
    timeout: float | None = None,
    allow_errors: bool = False,
    on_cell: CellStarted | None = None,
) -> NotebookRun:
    """Execute `notebook` and write it with its outputs to `output` (default: in place).

    The first Ctrl-C interrupts the running cell, as Stop does in JupyterLab, and ends the run with the outputs so far.

    Args:
        kernel: name of the kernelspec to run it in.
        timeout: seconds that one cell may take; None sets no limit.
        allow_errors: go on after a cell that raised.

    Raises:
        PowerLabError: the notebook cannot be read or written, or the kernel does not start.
    """
    target = output or notebook
    document = _read(notebook)
    session = _Session(document, notebook, kernel, timeout, allow_errors, on_cell)
    started = time.monotonic()
    asyncio.run(session.run())
    seconds = time.monotonic() - started
    _write(document, target)
    done = session.executed == len(session.code) and not session.interrupted
    return NotebookRun(
        notebook=str(notebook),
        output=str(target),
        kernel=kernel,
        cells=len(session.code),
        executed=session.executed,
        seconds=round(seconds, 3),
        failures=session.failures,
        interrupted=session.interrupted,
        ok=done and (allow_errors or not session.failures),
    )


class _Session:
    """One execution: the nbclient client and what was seen."""

    def __init__(
        self,
        document: NotebookNode,
        path: Path,
        kernel: str,
        timeout: float | None,
        allow_errors: bool,
        on_cell: CellStarted | None,
    ) -> None:
        self.document = document
        self.path = path
        self.kernel = kernel
        self.timeout = timeout
        self.allow_errors = allow_errors
        self.on_cell = on_cell or (lambda done, total, line: None)
        self.code = [i for i, cell in enumerate(document.cells) if cell.cell_type == "code" and cell.source.strip()]
        self.executed = 0
        self.failures: list[CellFailure] = []
        self.interrupted = False
        self.log: IO[bytes]

    async def run(self) -> None:
        from jupyter_client.kernelspec import NoSuchKernel
        from nbclient import NotebookClient

        client = NotebookClient(
            self.document,
            kernel_name=self.kernel,
            timeout_func=lambda cell: self.timeout,  # the plain option takes whole seconds only
            allow_errors=self.allow_errors,
            record_timing=False,  # times would make every run of the same notebook a different file
            coalesce_streams=True,
            resources={"metadata": {"path": str(self.path.absolute().parent)}},
        )
        client.on_cell_error = self._note_error
        client.reset_execution_trackers()
        begun = False
        # The kernel process's own messages are of interest only when it dies, so they are kept aside until then.
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, after the messages of a failed start
        try:
            async with client.async_setup_kernel(stderr=self.log):
                begun = True
                await self._set_language(client)
                await self._run_cells(client)
                client.set_widgets_metadata()
                _forget_own_views(self.document.metadata)
        except NoSuchKernel:
            raise PowerLabError(
                f"The Jupyter kernel {self.kernel!r} is not installed.",
                "Run `power-lab doctor` for the kernels of this Python, or `make setup` in a checkout.",
            ) from None
        except RuntimeError as error:
            if begun:
                raise
            raise PowerLabError(
                f"The kernel {self.kernel!r} did not start: {error}\n{self._last_words()}",
                "Run `power-lab doctor` to see what is missing.",
            ) from None
        finally:
            self.log.close()

    async def _run_cells(self, client: NotebookClient) -> None:
        from jupyter_core.utils import ensure_async
        from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

        loop = asyncio.get_running_loop()
        stopping: set[asyncio.Task[None]] = set()  # holds the tasks, which the loop itself refers to only weakly

        async def stop(insist: bool) -> None:
            assert client.km is not None
            await ensure_async(client.km.shutdown_kernel(now=True) if insist else client.km.interrupt_kernel())

        def on_interrupt() -> None:
            # A second Ctrl-C means that the cell does not heed the first: end the kernel.
            stopping.add(loop.create_task(stop(insist=self.interrupted)))
            self.interrupted = True

        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        for index in self.code:
            cell = self.document.cells[index]
            self.on_cell(self.executed, len(self.code), _first_line(cell.source))
            self.executed += 1
            try:
                await client.async_execute_cell(cell, index, execution_count=self.executed)
            except CellExecutionError:
                return  # noted by the hook
            except CellTimeoutError:
                self._fail(index, "Timeout", f"the cell took longer than {self.timeout:g} s")
                return
            except DeadKernelError:
                if not self.interrupted:
                    self._fail(index, "KernelDied", "the kernel's process ended while the cell ran", self._last_words())
                return
            if self.interrupted:
                return

    def _note_error(self, *, cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        if "raises-exception" in cell.metadata.get("tags", []):
            return  # the notebook's author says that this cell is meant to raise
        content = execute_reply["content"]
        traceback = _ANSI.sub("", "\n".join(content.get("traceback", [])))
        self._fail(cell_index, content.get("ename", "Error"), _first_line(content.get("evalue", "")), traceback)

    def _fail(self, index: int, error: str, message: str, traceback: str = "") -> None:
        source = _first_line(self.document.cells[index].source)
        failure = CellFailure(cell=index + 1, source=source, error=error, message=message, traceback=traceback)
        self.failures.append(failure)

    def _last_words(self) -> str:
        """The end of what the kernel's process wrote to stderr."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return _ANSI.sub("", "\n".join(lines[-20:]))

    async def _set_language(self, client: NotebookClient) -> None:
        """What the kernel says of itself; saved notebooks carry it so that viewers can colour the code."""
        assert client.kc is not None
        reply = await client.async_wait_for_reply(client.kc.kernel_info())
        if reply is not None:
            self.document.metadata["language_info"] = reply["content"]["language_info"]


def _read(path: Path) -> NotebookNode:
    import nbformat

    try:
        document = nbformat.read(path, as_version=4)
        nbformat.validate(document)
    except FileNotFoundError:
        raise PowerLabError(f"{path}: no such notebook.", "Give the path of an .ipynb file.") from None
    except OSError as error:
        raise PowerLabError(f"{path}: cannot be read: {error.strerror}.") from None
    except Exception as error:  # noqa: BLE001 - nbformat raises many unrelated kinds
        raise PowerLabError(f"{path}: not a notebook: {_first_line(str(error))}", "Give an .ipynb file.") from None
    return document


def _write(document: NotebookNode, path: Path) -> None:
    """Write whole or not at all: a full disk must not cost the user the notebook that was there.

    A link stays a link, and a notebook that others could not read stays so.
    """
    import nbformat

    target = path.resolve()
    draft = target.with_name(f".{target.name}.part")
    try:
        draft.touch()
        if target.exists():
            shutil.copymode(target, draft)
        draft.write_text(nbformat.writes(document) + "\n", encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise PowerLabError(f"{path}: cannot be written: {error.strerror}.", "Give another --output.") from None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _forget_own_views(metadata: Any) -> None:
    """Our inspectors are HTML in the outputs and need no saved state, which would hold script and style of each."""
    saved = metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    for name, model in [*saved.items()]:
        if str(model["state"].get("_anywidget_id", "")).startswith("power_lab."):
            del saved[name]
            saved.pop(str(model["state"].get("layout", "")).removeprefix("IPY_MODEL_"), None)
    if not saved:
        metadata.pop("widgets", None)
