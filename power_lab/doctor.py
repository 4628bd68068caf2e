"""What this machine has, what is missing, and what to type.

Nothing here imports torch, which takes seconds: versions are read from the packages' metadata.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import msgspec

from power_lab.engine.config import EngineConfig, Paths, usable_cores
from power_lab.errors import PowerLabError

Status = Literal["ok", "warn", "fail"]

GIB = 1 << 30
_MEMORY_NEEDED = 2 * GIB  # the default model with its cache and a notebook beside it
_DISK_NEEDED = 1 * GIB  # a model and the compiled kernels
_REINSTALL = f"{sys.executable} -m pip install --upgrade power-lab"
_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding.

    Attributes:
        status: `ok`; `warn`, Power Lab works but not as well as it could; `fail`, something that it needs is missing.
        value: what was found.
        remedy: what to do or type; empty when ok.
    """

    name: str
    status: Status
    value: str
    remedy: str = ""


def examine(paths: Paths) -> list[Check]:
    """All checks, in reading order. A check that itself breaks becomes a warning that says so."""
    return [_guarded(name, check, paths) for name, check in CHECKS.items()]


def worst(checks: list[Check]) -> Status:
    """The gravest status among them."""
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    return order[max((order.index(check.status) for check in checks), default=0)]


def _guarded(name: str, check: Callable[[Paths], tuple[Status, str, str]], paths: Paths) -> Check:
    try:
        status, value, remedy = check(paths)
    except PowerLabError as error:
        status, value, remedy = "fail", error.message, error.remedy
    except Exception as error:  # noqa: BLE001 - a doctor that crashes helps nobody
        status, value, remedy = "warn", f"could not be checked: {type(error).__name__}: {error}", "Please report this."
    return Check(name=name, status=status, value=value, remedy=remedy)


def python(paths: Paths) -> tuple[Status, str, str]:
    value = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info < (3, 14):
        return "ok", value, ""
    return "fail", value, "Power Lab needs Python 3.11, 3.12 or 3.13."


def system(paths: Paths) -> tuple[Status, str, str]:
    machine = platform.machine()
    value = f"{platform.system()} {platform.release()} on {machine}"
    if sys.platform == "win32":
        return "fail", value, "Windows is not supported: install WSL2 (`wsl --install`) and run Power Lab inside it."
    if sys.platform == "linux" and machine in ("x86_64", "AMD64"):
        return "ok", value, ""
    return "warn", value, "It takes the portable compute path, which is untested. Linux on x86-64 is supported."


def processor(paths: Paths) -> tuple[Status, str, str]:
    flags, model = _cpuinfo()
    found = [name for name in _FEATURES if name in flags]
    value = ", ".join([model or platform.processor() or platform.machine(), *found])
    if not flags or {"avx2", "fma"} <= set(found):
        return "ok", value, ""
    return "warn", value, "Without AVX2 and FMA the kernels run on a slow portable path."


def _cpuinfo() -> tuple[set[str], str]:
    """(CPU feature flags, model name) as Linux tells them; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set(), ""
    entries = dict(line.split(":", 1) for line in text.partition("\n\n")[0].splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in entries.items()}
    return set(named.get("flags", "").split()), named.get("model name", "")


def cores(paths: Paths) -> tuple[Status, str, str]:
    import psutil

    usable = usable_cores()
    value = f"{usable} usable ({psutil.cpu_count(logical=False) or usable} physical)"
    if usable > 1:
        return "ok", value, ""
    return "warn", value, "With one core the engine and the notebook take turns; give the machine or container two."


def memory(paths: Paths) -> tuple[Status, str, str]:
    import psutil

    from power_lab.models.fit import container_limit, free_memory

    found, limit, free = psutil.virtual_memory(), container_limit(), free_memory()
    value = f"{free / GIB:.1f} GiB free of {found.total / GIB:.1f} GiB"
    if limit is not None and limit < found.total:
        value += f", container limit {limit / GIB:.1f} GiB"
    if free >= _MEMORY_NEEDED:
        return "ok", value, ""
    return "warn", value, "The default model wants about 2 GiB. Close other programs or notebooks."


def disk(paths: Paths) -> tuple[Status, str, str]:
    free = shutil.disk_usage(_existing(paths.cache)).free
    value = f"{free / GIB:.1f} GiB free for {paths.cache}"
    if free >= _DISK_NEEDED:
        return "ok", value, ""
    return "warn", value, "Models and compiled kernels need about 1 GiB: free some, or point POWER_LAB_HOME elsewhere."


def folders(paths: Paths) -> tuple[Status, str, str]:
    named = {"cache": paths.cache, "state": paths.state}
    blocked = [str(folder) for folder in named.values() if not _writable(_existing(folder))]
    value = ", ".join(f"{name} {folder}" for name, folder in named.items())
    if blocked:
        remedy = "Give them to your user, or set POWER_LAB_HOME to a folder of yours."
        return "fail", f"not writable: {', '.join(blocked)}", remedy
    return "ok", value, ""


def _existing(folder: Path) -> Path:
    """The folder itself or its nearest parent that exists."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def _writable(folder: Path) -> bool:
    """Tried, not asked: permission bits say nothing about full, read-only or remote disks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"x")
    except OSError:
        return False
    return True


def packages(paths: Paths) -> tuple[Status, str, str]:
    """The packages that Power Lab declares, each installed in a release that it accepts."""
    from packaging.requirements import Requirement

    shown = ("numba", "numpy", "torch", "jupyterlab", "ipykernel", "ipywidgets", "bokeh")
    try:
        declared = metadata.requires("power-lab") or []
    except metadata.PackageNotFoundError:
        return "warn", "Power Lab runs from a folder and is not installed", "Run `make setup`, or `pip install -e .`"
    wrong = []
    for text in declared:
        need = Requirement(text)
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        have = _version(need.name)
        if have is None or not need.specifier.contains(have, prereleases=True):
            wrong.append(f"{need.name} {have or 'missing'} (needs {need.specifier or 'any'})")
    if wrong:
        return "fail", "; ".join(wrong), f"Run: {_REINSTALL}"
    return "ok", ", ".join(f"{name} {_version(name)}" for name in shown), ""


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def ipykernel(paths: Paths) -> tuple[Status, str, str]:
    """Checked apart, since another program's install may move it: 7.0 to 7.3 lose messages under load."""
    have = _version("ipykernel")
    window = tuple(int(part) for part in (have or "0").split(".")[:2] if part.isdigit())
    if (7, 4) <= window < (8,):
        return "ok", f"{have}, within >=7.4,<8", ""
    remedy = f"Run: {sys.executable} -m pip install 'ipykernel>=7.4,<8'"
    return "fail", f"{have or 'missing'}, not within >=7.4,<8", remedy


def pip(paths: Paths) -> tuple[Status, str, str]:
    if util.find_spec("pip"):
        return "ok", f"pip {_version('pip')}", ""
    remedy = f"Models are fetched by pip. Run: {sys.executable} -m ensurepip --upgrade"
    return "warn", "this environment has no pip", remedy


def model(paths: Paths) -> tuple[Status, str, str]:
    """The default model and its SHA-256, which is computed once and remembered while the file stays as it is."""
    from power_lab.models import CATALOGUE, resolve

    name = EngineConfig().model
    if not (paths.models / CATALOGUE[name].file).is_file():
        return "warn", f"{name} is not on this machine", f"Run: power-lab models add {name}"
    found = resolve(name, paths)  # raises when the bytes are not the catalogue's
    return "ok", f"{name}, {found.path}, SHA-256 as expected", ""


def model_folders(paths: Paths) -> tuple[Status, str, str]:
    """Where models are looked for, beside our own store, and how many lie there. Opens none."""
    from power_lab.models.places import OWN, find

    found, notes = find(paths)
    counts = Counter(model.source for model in found)
    value = ", ".join(f"{count} in {'our store' if source == OWN else source}" for source, count in counts.items())
    if notes:
        return "warn", "; ".join([value, *notes] if value else notes), "See POWER_LAB_MODEL_PATH in the README."
    return "ok", value or "no models yet", ""


def gpu(paths: Paths) -> tuple[Status, str, str]:
    """What `nvidia-smi` shows, which torch is installed, and what an engine would run on."""
    torch = f"torch {_version('torch') or 'missing'}"
    program = shutil.which("nvidia-smi")
    if program is None:
        return "ok", f"no NVIDIA GPU; the CPU path is used ({torch})", ""
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=False)
    names = [line.partition(" (UUID")[0] for line in listed.stdout.splitlines() if line.startswith("GPU")]
    if not names:
        return (
            "warn",
            f"nvidia-smi finds no GPU ({torch})",
            "See what `nvidia-smi` says; the driver may not be running.",
        )
    from power_lab.engine.device import choose

    device, why = choose(EngineConfig())
    if device == "cpu":
        return (
            "warn",
            f"{'; '.join(names)}, not used: {why} ({torch})",
            "Use a torch built for CUDA, and a GPU from Hopper on.",
        )
    return "ok", f"{'; '.join(names)}, used by default ({torch})", ""


def kernelspec(paths: Paths) -> tuple[Status, str, str]:
    """The Power Lab kernel that Jupyter would start, and whether it belongs to this Python."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    from power_lab.notebook import KERNEL

    repair = "Run `make setup` in a checkout, or: " + _REINSTALL
    try:
        spec = KernelSpecManager().get_kernel_spec(KERNEL)
    except NoSuchKernel:
        return "fail", "the Power Lab kernel is not installed", repair
    place = Path(spec.resource_dir)
    program = spec.argv[0]
    if Path(program).is_absolute() and not _same_file(Path(program), Path(sys.executable)):
        return "fail", f"{place} starts another Python: {program}", f"Remove that folder. {repair}"
    if not place.is_relative_to(sys.prefix) and not place.is_relative_to(Path(sys.prefix).resolve()):
        return "warn", f"{place} stands before the one of this Python", f"Remove that folder if it is old. {repair}"
    return "ok", f"{spec.display_name}, in {place}", ""


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)


def labextension(paths: Paths) -> tuple[Status, str, str]:
    """The side panel and status bar: prebuilt in releases, built by pip in a checkout, for which it wants Node.js."""
    from jupyter_core.paths import jupyter_path

    places = [Path(folder) / "power-lab" for folder in jupyter_path("labextensions")]
    found = next((place for place in places if (place / "package.json").is_file()), None)
    if found is not None:
        return "ok", f"in {found}", ""
    checkout = Path(__file__).parents[1]
    repair = f"{sys.executable} -m pip install -e {checkout}" if (checkout / "labextension").is_dir() else _REINSTALL
    value = "not installed: notebooks work, without side panel and status bar"
    if shutil.which("npm") is None:
        return "warn", value, f"Install Node.js 20 or newer (Debian: apt-get install nodejs npm), then run: {repair}"
    return "warn", value, f"Run: {repair}"


def routing(paths: Paths) -> tuple[Status, str, str]:
    """Whether our kernel can answer widgets while a cell runs, which leans on private names of ipykernel."""
    from power_lab.jupyter._routing import missing

    if absent := missing():
        remedy = f"Run: {sys.executable} -m pip install --upgrade power-lab 'ipykernel>=7.4,<8'"
        return "warn", f"wait for the running cell: ipykernel lacks {', '.join(absent)}", remedy
    return "ok", "answered while a cell runs", ""


def host(paths: Paths) -> tuple[Status, str, str]:
    """Where the engine host listens, and whether it runs. `Place` minds socket lengths and network disks."""
    from power_lab.engine.host.log import log_path
    from power_lab.engine.host.place import Place, dial, peer

    place = Place.of(paths)
    log = f"log {log_path(paths)}"
    moved = "" if place.folder == paths.runtime else f" (moved from {paths.runtime}, where a socket cannot be)"
    sock = dial(place, timeout=5)
    if sock is None:
        return "ok", f"not running, starts with the first load; socket {place.socket}{moved}; {log}", ""
    with sock:
        process, _ = peer(sock)
    return "ok", f"running as process {process}; socket {place.socket}{moved}; {log}", ""


CHECKS: dict[str, Callable[[Paths], tuple[Status, str, str]]] = {
    "Python": python,
    "system": system,
    "processor": processor,
    "cores": cores,
    "memory": memory,
    "disk": disk,
    "folders": folders,
    "packages": packages,
    "ipykernel": ipykernel,
    "pip": pip,
    "GPU": gpu,
    "default model": model,
    "model folders": model_folders,
    "Jupyter kernel": kernelspec,
    "JupyterLab extension": labextension,
    "widgets": routing,
    "engine host": host,
}
"""Name of each check and what does it."""
