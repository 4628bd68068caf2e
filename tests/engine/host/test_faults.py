"""What goes wrong around a host, and that nothing of it needs a repair by hand. Real processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig, HostSettings, Paths
from power_lab.engine.host import __main__ as host_main
from power_lab.engine.host import client as client_module
from power_lab.engine.host import protocol as wire
from power_lab.engine.host import server
from power_lab.engine.host.client import HostMismatch
from power_lab.engine.host.place import ENDING_S, HostLock, Place, dial, peer, private_folder
from power_lab.engine.request import SamplingParams
from power_lab.errors import EngineClosed, HostUnavailable
from tests.hosting import HANG_S, Home, eventually, kill, raises

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")


def ok(home: Home) -> bool:
    return home.engine().submit("x", SamplingParams(max_tokens=1)).result().finish == "length"


def test_a_killed_host_is_a_clear_error_and_the_next_call_starts_another(home: Home):
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=100_000))
    pid = engine.client.pid
    kill(pid)
    error = raises(HostUnavailable, run.result)
    assert f"pid {pid}" in str(error)
    assert str(home.paths.state / "host.log") in str(error)
    raises(HostUnavailable, lambda: engine.submit("x", SamplingParams()))
    raises(HostUnavailable, engine.client.status)
    assert not engine.client.open
    assert ok(home)
    assert home.client().pid != pid


def test_a_host_that_crashes_leaves_the_native_stack_in_its_log(home: Home):
    raises(HostUnavailable, home.engine().submit("abort", SamplingParams()).result)
    assert "Fatal Python error: Aborted" in home.log
    assert ok(home)


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(home: Home):
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=50))
    other = home.engine()
    eventually(lambda: engine.status().running == 1)
    os.kill(engine.client.pid, signal.SIGTERM)
    eventually(lambda: not Place.of(home.paths).socket.exists())
    raises(EngineClosed, lambda: other.submit("x", SamplingParams()).result())
    record = run.result()
    assert (record.finish, len(record.tokens)) == ("length", 50)
    eventually(lambda: not engine.client.open)
    assert ok(home)


def test_a_drain_is_bounded_and_still_gives_records(home: Home):
    home.settings = HostSettings(factory=home.settings.factory, drain_s=0.0)
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=100_000))
    eventually(lambda: engine.status().running == 1)
    os.kill(engine.client.pid, signal.SIGTERM)
    assert run.result().finish == "cancelled"


def test_a_start_during_a_drain_waits_and_succeeds(home: Home):
    engine = home.engine()
    run = engine.submit("slow", SamplingParams(max_tokens=50))
    eventually(lambda: engine.status().running == 1)
    os.kill(engine.client.pid, signal.SIGTERM)
    eventually(lambda: not Place.of(home.paths).socket.exists())
    assert ok(home)
    assert run.result().finish == "length"


def test_a_start_waits_as_long_as_a_drain_may_take(tmp_path: Path):
    assert ENDING_S >= 3 * server.CANCEL_S
    here = Place(tmp_path)
    held, other = HostLock(here.lock), HostLock(here.lock)
    assert held.acquire()
    try:
        with pytest.raises(TimeoutError, match="is held by a process"):
            host_main._claim(other, here, 0.1)
        threading.Timer(0.3, held.close).start()
        assert host_main._claim(other, here, HANG_S)
    finally:
        held.close()
        other.close()


def test_terminal_signals_do_not_reach_the_host(home: Home):
    pid = home.client().pid
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(pid, number)
    assert home.client().pid == pid
    assert os.getsid(pid) == pid
    process = Path(f"/proc/{pid}")
    log = home.paths.state / "host.log"
    assert (process / "cwd").readlink() == Path("/")
    assert [(process / "fd" / str(number)).readlink() for number in range(3)] == [Path(os.devnull), log, log]


def test_stale_socket_and_lock_files_do_not_block_a_start(home: Home):
    place = Place.of(home.paths)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(place.socket))
    place.lock.write_text("123")
    assert ok(home)


def test_concurrent_starts_give_one_host(home: Home):
    found: list[int] = []
    lock = threading.Lock()

    def connect() -> None:
        client = home.client()
        with lock:
            found.append(client.pid)

    threads = [threading.Thread(target=connect) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(found) == 6
    assert len(set(found)) == 1
    eventually(lambda: [process.pid for process in home.hosts()] == [found[0]])
    assert not list(home.paths.state.glob("start-*")), "start-up files are gone"


def test_the_runtime_files_belong_to_the_user_alone(home: Home):
    client = home.client()
    place = Place.of(home.paths)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place.folder, place.socket, place.lock)]
    assert modes == [0o700, 0o600, 0o600]
    assert stat.S_IMODE((home.paths.state / "host.log").stat().st_mode) == 0o600
    sock = dial(place)
    assert sock is not None
    with sock:
        assert peer(sock) == (client.pid, os.geteuid())


def test_a_runtime_folder_that_is_too_open_is_closed(tmp_path: Path):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700


def test_a_link_is_no_runtime_folder(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert "is not a folder of user" in str(raises(HostUnavailable, lambda: private_folder(tmp_path / "link")))


@AS_ROOT
def test_somebody_elses_runtime_folder_is_refused(home: Home):
    home.paths.runtime.mkdir(parents=True)
    os.chown(home.paths.runtime, 65534, 65534)
    assert "is not a folder of user 0" in str(raises(HostUnavailable, home.client))


@AS_ROOT
def test_another_users_connection_is_dropped(home: Home):
    client = home.client()
    place = Place.of(home.paths)
    code = (
        "import os, socket, sys; os.chmod(sys.argv[1], 0o711); os.chmod('engine.sock', 0o666); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.connect('engine.sock'); print(len(s.recv(1)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(place.folder)], cwd=place.folder, capture_output=True, text=True, check=False
    )
    assert out.stdout == "0\n" or "ConnectionReset" in out.stderr
    assert "uid 65534 is refused" in home.log
    assert client.status().clients


def test_a_path_too_long_for_a_socket_moves_to_tmp(tmp_path: Path):
    long = tmp_path / ("x" * 120)
    paths = Paths(long / "cache", long / "run", long / "state")
    place = Place.of(paths)
    assert place.folder.parent == Path(f"/tmp/power-lab-{os.geteuid()}")
    assert Place.of(paths) == place
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    place.folder.rmdir()


def test_a_network_file_system_moves_to_tmp(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("power_lab.engine.host.place._networked", lambda folder: True)
    place = Place.of(Paths(tmp_path, tmp_path / "run", tmp_path))
    assert place.folder.parent.name == f"power-lab-{os.geteuid()}"
    place.folder.rmdir()


def test_a_start_that_fails_comes_back_whole(home: Home):
    home.settings = HostSettings(factory="/nowhere/at_all.py:Engine")
    error = raises(HostUnavailable, home.client)
    assert "Traceback" in str(error)
    assert "No such file or directory: '/nowhere/at_all.py'" in str(error)
    assert not list(home.paths.state.glob("start-*"))


def test_a_state_folder_that_cannot_be_made_is_named_with_a_remedy(home: Home):
    home.paths.state.parent.mkdir(parents=True)
    home.paths.state.write_text("a file")
    error = raises(HostUnavailable, home.client)
    assert str(home.paths.state) in error.message
    assert "POWER_LAB_HOME" in error.remedy


def test_a_host_that_does_not_answer_is_named(home: Home, monkeypatch):
    pid = home.client().pid
    monkeypatch.setattr(client_module, "HANDSHAKE_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert f"pid {pid}" in str(raises(HostUnavailable, home.client))
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_host_of_another_version_without_clients_is_replaced_once(home: Home, monkeypatch):
    engine = home.engine()
    pid = engine.client.pid
    engine.client.close()
    monkeypatch.setattr(client_module, "code_digest", lambda: "f" * 64)
    # The new host is of that version too, as far as this client can tell: it says what is the matter and does not try for ever.
    error = raises(HostMismatch, home.client)
    assert "The package has changed since this program began" in str(error)
    assert error.welcome.pid != pid
    assert [process.pid for process in home.hosts()] == [error.welcome.pid]


def test_a_host_of_another_version_that_is_in_use_stays(home: Home, monkeypatch):
    engine = home.engine()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "PROTOCOL", 99)
        error = raises(HostMismatch, home.client)
    assert error.welcome.pid == engine.client.pid
    assert "protocol 1; this is" in str(error)
    assert "lab.replace_host()" in str(error)
    assert engine.submit("x", SamplingParams(max_tokens=1)).result().finish == "length"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_holds_the_connection(home: Home):
    engine = home.engine()
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            engine.client.status()
        except HostUnavailable as error:
            os.write(tell, error.message.encode())
        signal.pause()
        os._exit(0)
    try:
        assert b"belongs to the parent" in os.read(ready, 1000)
        assert engine.submit("x", SamplingParams(max_tokens=1)).result().finish == "length"
        watcher = home.client()
        engine.client.close()
        eventually(lambda: len(watcher.status().clients) == 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def raw(home: Home) -> socket.socket:
    sock = dial(Place.of(home.paths), timeout=HANG_S)
    assert sock is not None
    return sock


def greeted(home: Home) -> socket.socket:
    sock = raw(home)
    hello = wire.Hello(protocol=wire.PROTOCOL, package="0", revision="0", client="raw")
    sock.sendall(wire.pack(hello, wire.HELLO_LIMIT))
    assert wire.receive_frame(sock, wire.REPLY_LIMIT) is not None
    return sock


def said(sock: socket.socket) -> list[wire.Reply]:
    """Everything until the host ends the connection."""
    replies = []
    try:
        while (body := wire.receive_frame(sock, wire.REPLY_LIMIT)) is not None:
            replies.append(wire.reply_of(body))
    except ConnectionResetError:
        pass
    return replies


BAD = {
    "garbage": b"\xff" * 64,
    "huge": struct.pack("<I", (16 << 20) + 1),
    "unknown": struct.pack("<I", 12) + b"\x81\xa5frame\xa4nope",
    "empty": struct.pack("<I", 0),
    "second hello": wire.pack(wire.Hello(protocol=1, package="", revision="", client=""), 4096),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_frame_ends_its_connection_and_no_other(home: Home, data):
    client = home.client()
    with greeted(home) as sock:
        sock.sendall(data)
        (last,) = said(sock)
    assert isinstance(last, wire.Failure)
    assert (last.id, last.error) == (0, "ProtocolError")
    assert len(client.status().clients) == 1


def test_a_first_frame_that_is_no_hello_or_too_large_ends_the_connection(home: Home):
    client = home.client()
    for data in (wire.pack(wire.Bye(), 4096), struct.pack("<I", 5000), b"\x03\x00"):
        with raw(home) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert [type(reply) for reply in said(sock)] == [wire.Failure]
    assert len(client.status().clients) == 1


def test_fuzzed_connections_never_hurt_the_host(home: Home):
    client = home.client()

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=300), st.booleans(), st.booleans())
    def fuzz(data: bytes, greet: bool, framed: bool) -> None:
        with greeted(home) if greet else raw(home) as sock:
            try:
                sock.sendall(struct.pack("<I", len(data)) + data if framed else data)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                return
            said(sock)

    fuzz()
    eventually(lambda: len(client.status().clients) == 1)
    assert ok(home)


def test_a_client_that_does_not_read_is_cut_off_and_its_run_cancelled(home: Home):
    watcher = home.client()
    engine = home.engine(watcher)
    with greeted(home) as sock:
        sock.sendall(wire.pack(wire.Load(id=1, config=EngineConfig(model="fake")), 4096))
        while not isinstance(wire.reply_of(wire.receive_frame(sock, wire.REPLY_LIMIT) or b""), wire.Loaded):
            continue
        flood = wire.Submit(id=2, engine=engine.key, prompt="flood", params=SamplingParams(max_tokens=100_000))
        sock.sendall(wire.pack(flood, 4096))
        eventually(lambda: "does not read" in home.log)
    eventually(lambda: watcher.status().engines[0].runs == 0)
    assert ok(home)


def test_twenty_clients_come_and_go_without_a_trace(home: Home):
    watcher = home.client()

    def cycle(times: int) -> tuple[int, int]:
        for _ in range(times):
            engine = home.engine()
            assert engine.submit("x", SamplingParams(max_tokens=3)).result().finish == "length"
            engine.client.close()
        eventually(lambda: len(watcher.status().clients) == 1)
        process = psutil.Process(watcher.pid)
        eventually(lambda: process.num_threads() <= 2)  # the loop, and what answered the last question
        return process.num_fds(), process.memory_info().rss

    files, memory = cycle(20)
    files_after, memory_after = cycle(20)
    assert files_after == files
    assert memory_after - memory < 4 << 20


def test_the_log_rotates_and_native_output_follows_it(tmp_path: Path):
    code = (
        "import os, sys; from pathlib import Path; from power_lab.engine.config import Paths\n"
        "from power_lab.engine.host import log as module; module._BYTES = 2000\n"
        "root = Path(sys.argv[1]); log = module.open_log(Paths(root, root, root))\n"
        "for number in range(100): log.info('line %d %s', number, 'x' * 50)\n"
        "os.write(2, b'native\\n')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["host.log", "host.log.1", "host.log.2", "host.log.3"]
    assert (tmp_path / "host.log").read_text().endswith("native\n")
