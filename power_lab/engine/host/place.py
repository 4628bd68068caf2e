"""Where the socket and the lock are: a private local directory, the same for every process of the user."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from power_lab.engine.config import Paths
from power_lab.errors import HostUnavailable

ENDING_S = 30.0  # how long a host may hold the lock after its drain: three waits of server.CANCEL_S
SOCKET_PATH_LIMIT = 107  # bytes of sun_path on Linux without its closing zero
_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "glusterfs")


@dataclass(frozen=True, slots=True)
class Place:
    """The host's runtime directory."""

    folder: Path

    @property
    def socket(self) -> Path:
        return self.folder / "engine.sock"

    @property
    def lock(self) -> Path:
        return self.folder / "engine.lock"

    @classmethod
    def of(cls, paths: Paths) -> Place:
        """The directory that all clients of `paths` agree on; made when missing.

        It is `paths.runtime`, or a folder below /tmp named by it when that is too long for a socket, on a network file system (whose
        locks and sockets other machines would see) or unable to hold a lock and a socket. Raises HostUnavailable.
        """
        if sys.platform == "win32":
            raise HostUnavailable("The engine host needs Unix sockets.", "On Windows, run Power Lab inside WSL2.")
        wanted = paths.runtime
        if _fits(wanted) and not _networked(wanted) and _usable(wanted):
            return cls(wanted)
        name = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:12]
        shared = private_folder(Path("/tmp") / f"power-lab-{os.geteuid()}")  # noqa: S108 - ownership and mode are checked
        return cls(private_folder(shared / name))


def private_folder(folder: Path) -> Path:
    """Make `folder` for this user alone (0700). Raises HostUnavailable when it is somebody else's or a link."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise HostUnavailable(f"The folder {folder} cannot be used: {error.strerror}.", _CHOOSE) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise HostUnavailable(f"{folder} is not a folder of user {os.geteuid()}.", f"Remove it. {_CHOOSE}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


_CHOOSE = "Or set POWER_LAB_HOME to a local folder of your own."


def _fits(folder: Path) -> bool:
    return len(os.fsencode(Place(folder).socket)) <= SOCKET_PATH_LIMIT


def _usable(folder: Path) -> bool:
    """Whether the file system gives this folder locks and sockets. A folder of another user is an error, not a reason to move."""
    import fcntl

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # read-only or missing mount
        return False
    private_folder(folder)
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as probe, socket.socket(socket.AF_UNIX) as sock:
            if len(os.fsencode(probe)) < SOCKET_PATH_LIMIT - 2:
                sock.bind(f"{probe}/s")
            with open(f"{probe}/l", "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _networked(folder: Path) -> bool:
    """Whether the mount that holds `folder` is a network file system, by /proc; False where that is not told."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    best, kind = 0, ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split(" ")[4].replace("\\040", " ")
        if (mount == "/" or f"{folder}/".startswith(f"{mount}/")) and len(mount) >= best:
            best, kind = len(mount), right.split(" ")[0]
    return kind.startswith(_NETWORK)


class HostLock:
    """The lock that makes one host per directory. It dies with its process, so no stale lock can block a start."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - held as long as the process lives
        path.chmod(0o600)

    def acquire(self) -> bool:
        """Try once."""
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    def close(self) -> None:
        """Let go."""
        self._file.close()


def dial(place: Place, timeout: float = 10.0) -> socket.socket | None:
    """Connect to the host that listens at `place`, or None when there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(os.fspath(place.socket))
    except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise HostUnavailable(f"The engine socket {place.socket} cannot be reached: {error}.") from None
    return sock


def listen(place: Place) -> socket.socket:
    """Bind the socket (0600). Only the holder of the lock calls this, so a socket found there is stale and is removed."""
    place.socket.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(os.fspath(place.socket))
    finally:
        os.umask(before)
    sock.listen(128)
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end as the kernel knows them; (0, own uid) on systems without SO_PEERCRED, where 0700 alone protects."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0, os.geteuid()
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid
