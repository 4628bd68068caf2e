"""What the kernel answers while a cell runs, with real kernels."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from power_lab.engine.host.client import HostClient
from power_lab.jupyter._routing import SUBSHELL_CAP
from tests.hosting import eventually
from tests.jupyter.kernels import Kernel
from tests.jupyter.pages import BUSY, Page

SLEEPING, LOOPING = "time.sleep(0.01)", "sum(range(1000))"


@pytest.fixture
def page_of() -> Iterator[Callable[[Kernel], Page]]:
    pages: list[Page] = []

    def make(kernel: Kernel) -> Page:
        pages.append(Page(kernel))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


@contextmanager
def busy(kernel: Kernel, page: Page, folder: Path, body: str = SLEEPING) -> Iterator[None]:
    """A cell runs inside; nothing of what is done there may end it."""
    stop = folder / "stop"
    stop.unlink(missing_ok=True)
    kernel.client.execute(BUSY.format(stop=str(stop), body=body))
    eventually(lambda: page.control("power_lab_request")["busy"])
    try:
        yield
        assert page.control("power_lab_request")["busy"], "the cell ended before its time: nothing was shown"
    finally:
        stop.touch()
    assert kernel.client.get_shell_msg(timeout=60)["content"]["status"] == "ok"


@pytest.mark.parametrize("body", [SLEEPING, LOOPING])
def test_the_kernel_tells_its_state_and_a_page_loads_while_a_cell_runs(start, page_of, tmp_path: Path, body: str):
    kernel = start()
    page = page_of(kernel)
    assert page.control("power_lab_request")["busy"] is False
    with busy(kernel, page, tmp_path, body):
        state = page.control("power_lab_request")
        assert (state["status"], state["busy"], state["waits"]) == ("ok", True, "")
        page_of(kernel).load()
    eventually(lambda: not page.control("power_lab_request")["busy"])
    assert page.control("power_lab_request", {"method": "fly"})["status"] == "error"


def test_a_page_loads_at_the_very_moment_that_a_cell_begins(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    stop = tmp_path / "stop"
    for _ in range(5):  # the question reaches the kernel right behind the cell, before that has begun
        stop.unlink(missing_ok=True)
        page.send("execute_request", {"code": BUSY.format(stop=str(stop), body=SLEEPING), "silent": False})
        assert page.ask("comm_info_request")["comms"] == {}
        # The answer may be here before the cell has begun; that the cell is still to run, or runs, shows that it did not wait.
        eventually(lambda: page.control("power_lab_request")["busy"])
        stop.touch()
        eventually(lambda: not page.control("power_lab_request")["busy"])


def test_a_comm_that_names_no_subshell_is_answered_while_a_cell_runs(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    comm = page.open_comm("power_lab.engine")
    assert page.heard(comm)["busy"] is False
    with busy(kernel, page, tmp_path):
        for number in range(50):
            page.tell(comm, {"method": "state", "id": number})
            reply = page.heard(comm)
            assert (reply["id"], reply["busy"]) == (number, True)
        page.send("comm_close", {"comm_id": comm, "data": {}})
        eventually(lambda: not page.ask("comm_info_request", {"target_name": "power_lab.engine"})["comms"])


WIDGET = """
import anywidget, threading, traitlets
class Probe(anywidget.AnyWidget):
    _esm = 'export default {}'
    answers_while_busy = CHOICE
    x = traitlets.Int(0).tag(sync=True)
probe = Probe()
def hear(widget, content, buffers):
    widget.send({'thread': threading.current_thread().name, 'id': content['id']})
probe.on_msg(hear)
print(probe.comm.comm_id)
"""


def test_a_widget_made_in_a_cell_is_answered_while_another_cell_publishes_on_it(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    comm = kernel.run(WIDGET.replace("CHOICE", "False")).text.strip()
    subshell = page.control("create_subshell_request")["subshell_id"]
    with busy(kernel, page, tmp_path, "probe.x += 1; time.sleep(0.005)"):
        heard = []
        for number in range(20):
            page.tell(comm, {"method": "custom", "content": {"id": number}}, subshell)
            while (data := page.heard(comm))["method"] != "custom":
                pass
            heard.append((data["content"]["id"], data["content"]["thread"]))
        assert heard == [(number, f"subshell-{subshell}") for number in range(20)]


def test_a_widget_can_ask_to_be_served_for_front_ends_without_subshells(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    served = kernel.run(WIDGET.replace("CHOICE", "True")).text.strip()
    plain = kernel.run(WIDGET.replace("CHOICE", "False")).text.strip()
    with busy(kernel, page, tmp_path):
        page.tell(plain, {"method": "custom", "content": {"id": 1}})
        page.tell(served, {"method": "custom", "content": {"id": 2}})
        data = page.heard(served)
        assert (data["content"]["id"], data["content"]["thread"][:9]) == (2, "subshell-")
    assert page.heard(plain)["content"] == {"id": 1, "thread": "MainThread"}, (
        "users' handlers stay where their cells run"
    )


def test_a_cell_that_awaits_a_widget_is_served(start, page_of):
    kernel = start()
    page = page_of(kernel)
    comm = kernel.run(WIDGET.replace("CHOICE", "False")).text.strip()
    kernel.run("import asyncio\ncame = asyncio.Event()\nprobe.on_msg(lambda *a: came.set())")
    message = kernel.client.execute("await asyncio.wait_for(came.wait(), 30); print('came')")
    eventually(lambda: page.control("power_lab_request")["busy"])
    page.tell(comm, {"method": "custom", "content": {"id": 1}})
    reply = kernel.client.get_shell_msg(timeout=60)
    assert (reply["parent_header"]["msg_id"], reply["content"]["status"]) == (message, "ok")


def test_mixed_load_loses_no_message(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    subshell = page.control("create_subshell_request")["subshell_id"]
    comms = [page.open_comm("power_lab.engine") for _ in range(3)]
    with busy(kernel, page, tmp_path, LOOPING):
        asked = []
        for number in range(100):
            for comm in comms:
                page.tell(comm, {"id": number})
            asked.append(page.send("kernel_info_request", {}))
            asked.append(page.send("comm_info_request", {}))
            asked.append(page.send("execute_request", {"code": f"{number}", "silent": True}, subshell))
        answered = [page.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] for _ in asked]
        assert sorted(answered) == sorted(asked)
        ids: dict[str, list[int]] = {comm: [] for comm in comms}
        while any(len(got) < 101 for got in ids.values()):
            message = page.client.get_iopub_msg(timeout=60)
            if message["msg_type"] == "comm_msg":
                ids[message["content"]["comm_id"]].append(message["content"]["data"]["id"])
        assert all(got == [None, *range(100)] for got in ids.values()), "each comm's answers come in order"
    cells = [page.send("execute_request", {"code": "1"}) for _ in range(20)]
    assert [page.client.get_shell_msg(timeout=60)["parent_header"]["msg_id"] for _ in cells] == cells


def test_a_hundred_reloads_leak_no_threads_comms_or_files(start, page_of, tmp_path: Path):
    kernel = start()
    kernel.run(
        "import comm; from power_lab.jupyter import _leases\n_leases.LEASE_S.update(dict.fromkeys(_leases.LEASE_S, 0.2))"
    )
    watching = page_of(kernel)
    process = psutil.Process(kernel.pid)

    def reload(times: int) -> None:
        for _ in range(times):
            page = Page(kernel)
            page.load()
            page.close()

    reload(SUBSHELL_CAP)  # to the cap
    with busy(kernel, watching, tmp_path):
        before = process.num_threads(), process.num_fds()
        reload(100)
        eventually(
            lambda: process.num_fds() <= before[1] + 4
        )  # the last pages' sockets close on the kernel's side, too
        assert process.num_threads() <= before[0]
    eventually(lambda: kernel.run("print(len(comm.get_comm_manager().comms))").text.strip() == "0")
    assert len(watching.control("list_subshell_request")["subshell_id"]) <= SUBSHELL_CAP + 1


def test_pages_that_share_a_subshell_do_not_end_it_for_each_other(start, page_of):
    kernel = start()
    page = page_of(kernel)
    made = [page.control("create_subshell_request")["subshell_id"] for _ in range(SUBSHELL_CAP)]
    assert len(set(made)) == SUBSHELL_CAP
    shared = page.control("create_subshell_request")["subshell_id"]
    assert shared in made
    assert page.control("delete_subshell_request", {"subshell_id": shared})["status"] == "ok"
    assert shared in page.control("list_subshell_request")["subshell_id"]
    assert page.control("delete_subshell_request", {"subshell_id": shared})["status"] == "ok"
    assert shared not in page.control("list_subshell_request")["subshell_id"]
    assert page.control("delete_subshell_request", {"subshell_id": "none"})["status"] == "error"


def test_stop_between_cells_ends_the_handlers_and_a_cell_can_be_stopped_as_ever(start, page_of, tmp_path: Path):
    kernel = start()
    page = page_of(kernel)
    kernel.run(
        "import threading\nfrom power_lab.jupyter.cancel import tokens\nended = []\n"
        "def work():\n    with tokens().work('slider') as token: ended.append(token.wait(60))\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n[t.start() for t in threads]"
    )
    eventually(lambda: page.control("power_lab_request")["handlers"] == 1)  # the newer one has cancelled the older one
    os.killpg(kernel.pid, signal.SIGINT)  # as a kernel manager does
    eventually(lambda: page.control("power_lab_request")["handlers"] == 0)
    assert kernel.run("print(ended)").text == "[True, True]\n"
    begun = tmp_path / "begun"
    endless = f"import pathlib; pathlib.Path({str(begun)!r}).touch()\nwhile True: pass"
    assert kernel.interrupted(endless, begun.exists).error == "KeyboardInterrupt"
    assert kernel.run("1 + 1").text == "2"


LENS = """
import msgspec
from power_lab.engine.trace import Round
from power_lab.run import Run
record = lab.generate("x", max_tokens=4, cache_key="slow", stream=False).record
times = dict.fromkeys(("draft_s", "forward_s", "sample_s", "commit_s", "at"), 0.0)
first = len(record.prompt_tokens)
rounds = tuple(
    Round(step=i, start=first + i, drafted=(), accepted=0, emitted=(token,), rows=1, requests=1, **times)
    for i, token in enumerate(record.tokens)
)
view = lab.inspect.lens(Run(msgspec.structs.replace(record, rounds=rounds)), round=0)
print(view.comm.comm_id)
"""
AFTER = {"method": "custom", "content": {"kind": "go", "to": "after"}}


@pytest.mark.parametrize("while_busy", [False, True])
def test_a_second_click_and_stop_end_the_walk_of_a_lens_down_to_the_engine(
    kernel: Kernel, page_of, tmp_path: Path, while_busy: bool
):
    page = page_of(kernel)
    kernel.run("lab.load()")
    comm = kernel.run(LENS).text.strip()
    watcher = HostClient.find(kernel.home.paths, kernel.home.settings)
    assert watcher is not None
    key = watcher.status().engines[0].engine

    def looks() -> tuple[int, int, int]:
        """Looks that were begun in the engine, those under way there, and handlers at work in the kernel."""
        status = watcher.query("status", key)
        return status.requests, status.running, page.control("power_lab_request")["handlers"]

    with busy(kernel, page, tmp_path) if while_busy else nullcontext():
        page.tell(comm, AFTER)
        eventually(lambda: looks() == (2, 1, 1))
        page.tell(comm, AFTER)
        eventually(lambda: looks() == (3, 1, 1))
        if while_busy:  # Stop ends the cell then; the handlers have a question of their own
            assert page.control("power_lab_request", {"method": "cancel"})["cancelled"] == 1
        else:
            os.killpg(kernel.pid, signal.SIGINT)
        eventually(lambda: looks() == (3, 0, 0))
        while (told := page.heard(comm)).get("method") != "custom":
            continue
        assert told["content"] == {"kind": "stopped", "asked": "go"}, "nothing was sent for the click before"
    assert kernel.run("print(view.row, view.round)").text == "0 0\n"
    # The same look by a cell, which Stop ends as any.
    stopped = kernel.interrupted(
        "lab.inspect.lens(view.run, round=1)", lambda: watcher.query("status", key).running == 1
    )
    assert stopped.error == "KeyboardInterrupt"
    eventually(lambda: looks() == (4, 0, 0))
    watcher.close()


def test_without_the_private_names_the_kernel_is_a_stock_one_and_says_so(start, page_of, tmp_path: Path):
    """As under an ipykernel that has moved on."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import power_lab.jupyter._routing as routing\n"
        "routing._NAMES = (*routing._NAMES, (routing.Kernel, ('moved_away',)))\n"
    )
    search = os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")])
    kernel = start(environment={"PYTHONPATH": search})
    page = page_of(kernel)
    assert "moved_away" in page.control("power_lab_request")["waits"]
    assert "Widgets wait for running cells" in kernel.run("%lab status").text
    comm = page.open_comm("power_lab.engine")
    assert page.heard(comm)["status"] == "ok"
