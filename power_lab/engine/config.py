"""Settings: the engine's configuration and the machine's paths. The only place that reads the environment."""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import platformdirs

from power_lab.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

OWNERS: dict[str, str] = {
    "model": "model",
    "draft": "model",
    "draft_vocabulary": "runtime",
    "draft_ranking": "artifact",
    "device": "backend",
    "mode": "backend",
    "threads": "host",
    "context": "runtime",
    "kv_tokens": "runtime",
    "step_tokens": "runtime",
    "max_batch": "runtime",
    "queue_limit": "runtime",
    "prefix_cache": "runtime",
    "overlap": "runtime",
    "graph_mb": "runtime",
    "buckets": "backend",
    "host_profile": "host",
}
"""Which kind of decision each setting is (DESIGN section 5); shown by `lab.explain()`."""

AUTO_DRAFT = "auto"
TRAINED_DRAFTS = ("dflash", "dflash2", "dspark", "mtp", "eagle")
"""What `draft` may say beside a model's name or path and a drafter's path."""

MOST_BUCKETS = 128
LEAST_SAID = 64  # tokens of a drafter: some choose among the likeliest 20
CPU_KV_TOKENS = 8192
"""The KV pool where none is asked for and the device shares the machine's memory with everything else."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine is made from. Two engines with equal resolved configurations are the same engine.

    Attributes:
        model: a name from `lab.models()`, the path of a .gguf file or of a SafeTensors folder.
        draft: what drafts for the model, one of: a second, smaller model with the same vocabulary, named as `model` is, for
            `speculate="draft-model"`; a drafter that was trained for it, by its path (.safetensors) or, of those that come with the
            package, by its name (`dflash`, `dflash2`, `mtp`). `auto` takes the one that comes with the model, if one does, else the layers
            for multi-token prediction that the model's own files have, which are `mtp`, too; empty is none.
        draft_vocabulary: how many tokens a trained drafter may say at most, the first ones that it can by their ids, which a BPE vocabulary
            has in the order of its merges, the frequent ones first: a smaller output head. 0 is all that it can say.
        draft_ranking: path of a text file of token ids between spaces, the most wanted first: then these, or the first
            `draft_vocabulary` of these, in place of the first by id.
        device: `cpu`, `cuda` (an NVIDIA GPU), or `auto`, which takes a GPU that the kernels are tested on, and else the CPU.
        mode: `exact` keeps every output bit for bit independent of batch, chunking, cache, speculation and preemption; `fast` does not.
        threads: CPU threads; 0 takes all cores.
        context: longest request in tokens (prompt and output); 0 takes the model's own limit.
        kv_tokens: size of the KV pool in tokens, a multiple of 64; 0 is 8192 on the CPU, where it becomes that number, and on a GPU as
            much as is useful (`max_batch` requests of `context` tokens) and fits its memory.
        step_tokens: token budget of one step; prompts are cut into chunks that fit it.
        max_batch: requests that may run at once.
        queue_limit: requests that may wait; one more raises QueueFull.
        prefix_cache: whether full blocks are kept and reused by later requests.
        overlap: whether the next step is planned and launched while a GPU works on this one.
        graph_mb: MiB that recorded graphs may take; those that were not used for longest make room. 0 records none.
        buckets: row counts, ascending, that the model's steps are padded to before they are recorded; longer steps run operation by
            operation. Empty is the device's own: a table on a GPU; on a CPU, where nothing is padded, every count of up to 64. Drafters
            keep the device's.
        host_profile: whether the engine's thread asks the system for priority and for cores of its own, and a GPU for a stream that is
            served first; `lab.explain()` says what it got.
    """

    model: str = "smollm2"
    draft: str = AUTO_DRAFT
    draft_vocabulary: int = 0
    draft_ranking: str = ""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Literal["exact", "fast"] = "exact"
    threads: int = 0
    context: int = 0
    kv_tokens: int = 0
    step_tokens: int = 512
    max_batch: int = 16
    queue_limit: int = 256
    prefix_cache: bool = True
    overlap: bool = True
    graph_mb: int = 512
    buckets: tuple[int, ...] = ()
    host_profile: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError("device", f"{self.device!r} has no engine in this version", "Use auto, cpu or cuda.")
        _between("draft_vocabulary", self.draft_vocabulary, 0, 1 << 24)
        if 0 < self.draft_vocabulary < LEAST_SAID:
            raise ConfigError(
                "draft_vocabulary",
                f"{self.draft_vocabulary} tokens are fewer than {LEAST_SAID}",
                "Use more, or 0 for all.",
            )
        _between("threads", self.threads, 0, 1024)
        _between("context", self.context, 0, 1 << 24)
        _between("kv_tokens", self.kv_tokens, 0, 1 << 26)
        _between("step_tokens", self.step_tokens, 1, 1 << 16)
        _between("max_batch", self.max_batch, 1, 4096)
        _between("queue_limit", self.queue_limit, 1, 1 << 20)
        _between("graph_mb", self.graph_mb, 0, 1 << 20)
        self._check_buckets()
        if self.kv_tokens % 64:
            raise ConfigError(
                "kv_tokens", f"{self.kv_tokens} is not a multiple of 64", f"Use {-(-self.kv_tokens // 64) * 64}."
            )
        if not self.kv_tokens and self.device == "cpu":  # so that equal engines have equal configurations
            msgspec.structs.force_setattr(self, "kv_tokens", CPU_KV_TOKENS)

    def _check_buckets(self) -> None:
        """Raises ConfigError for buckets that are none, that no step fits in, or that nothing is recorded in."""
        rows = self.buckets
        if not isinstance(rows, tuple) or any(type(one) is not int for one in rows):
            raise ConfigError("buckets", f"{rows!r} is not a tuple of row counts", "Write buckets=(1, 2, 4, 8).")
        if not rows:
            return
        if len(rows) > MOST_BUCKETS:
            raise ConfigError(
                "buckets", f"{len(rows)} are more than the {MOST_BUCKETS} graphs that are kept", "Use fewer."
            )
        if rows[0] < 1 or any(low >= high for low, high in pairwise(rows)):
            told = "Write each count once, from 1 on, the smallest first."
            raise ConfigError("buckets", f"{rows} is not ascending from 1 on", told)
        if rows[-1] > self.step_tokens:
            told = f"Leave out what is above {self.step_tokens}, or raise step_tokens."
            raise ConfigError("buckets", f"no step has {rows[-1]} rows: step_tokens is {self.step_tokens}", told)
        if self.mode == "fast" or not self.graph_mb:
            why = "graph_mb is 0" if not self.graph_mb else "mode is fast"
            raise ConfigError("buckets", f"no step is recorded: {why}", "Leave buckets out, or change that.")

    @classmethod
    def of(cls, settings: dict[str, Any]) -> EngineConfig:
        """Make one from plain settings. Raises ConfigError naming an unknown key or a wrong value."""
        return strict(cls, settings)

    def told(self) -> dict[str, str | int | float | bool]:
        """All settings as a run's facts have them: one plain value each."""
        return {**msgspec.to_builtins(self), "buckets": ", ".join(map(str, self.buckets))}

    def asked(self) -> dict[str, Any]:
        """The device, and the settings that are not its defaults: what a changed configuration starts from, on another device too."""
        defaults = msgspec.structs.asdict(EngineConfig(device=self.device))
        mine = msgspec.structs.asdict(self)
        return {key: value for key, value in mine.items() if key == "device" or value != defaults[key]}


def strict(kind: type[T], settings: dict[str, Any]) -> T:
    """Convert plain settings to a struct. Raises ConfigError that names the key and lists the known ones."""
    known = kind.__struct_fields__
    for key in settings:
        if key not in known:
            raise ConfigError(key, "unknown setting", f"Known settings: {', '.join(known)}.")
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):  # from a __post_init__: it names its own key
            raise error.__cause__ from None
        message, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        raise ConfigError(key or kind.__name__, message, _choices(kind, key)) from None


def _choices(kind: type[msgspec.Struct], key: str) -> str:
    """The values of a key that takes one of a few words, as a remedy."""
    hint = get_type_hints(kind).get(key)
    return f"Use one of {', '.join(get_args(hint))}." if get_origin(hint) is Literal else ""


def _between(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(key, f"{value} is outside {low}..{high}")


def names_model(draft: str) -> bool:
    """Whether a setting `draft` means a model, and not a trained drafter or none."""
    return bool(draft) and draft not in (AUTO_DRAFT, *TRAINED_DRAFTS) and not draft.endswith(".safetensors")


def user_path(text: str, key: str) -> Path:
    """A path as the user writes it, `~` included. Raises ConfigError naming `key` for a home that does not exist."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(
            key, f"{text!r} begins with the home of a user who is not there", "Write the whole path."
        ) from None


def usable_cores() -> int:
    """Cores that this process may use; not every system can tell them from all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """Where other programs keep models, and where the user says that some lie. Nothing is ever written there.

    Attributes:
        hub: the Hugging Face hub's cache, or None; llama_cpp: llama.cpp's cache, or None.
        extra: the folders of `POWER_LAB_MODEL_PATH`, separated as in PATH.
    """

    hub: Path | None = None
    llama_cpp: Path | None = None
    extra: tuple[Path, ...] = ()

    @classmethod
    def default(cls) -> ModelFolders:
        """As those programs' own documentation tells: HF_HUB_CACHE, HF_HOME, LLAMA_CACHE, XDG_CACHE_HOME."""
        try:
            user = Path.home()
        except RuntimeError:  # a container's user without a home
            user = Path("/nonexistent")
        cache = _folder("XDG_CACHE_HOME") or user / ".cache"
        hugging_face = _folder("HF_HOME") or cache / "huggingface"
        hub = _folder("HF_HUB_CACHE") or _folder("HUGGINGFACE_HUB_CACHE") or hugging_face / "hub"
        own = user / "Library" / "Caches" if sys.platform == "darwin" else cache
        llama_cpp = _folder("LLAMA_CACHE") or own / "llama.cpp"
        listed = os.environ.get("POWER_LAB_MODEL_PATH", "").split(os.pathsep)
        return cls(hub, llama_cpp, tuple(user_path(part, "POWER_LAB_MODEL_PATH").absolute() for part in listed if part))


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return user_path(value, variable).absolute() if value else None


@dataclass(frozen=True, slots=True)
class Paths:
    """Where this user's files live.

    Attributes:
        cache: models and compiled kernels; may be deleted at any time.
        runtime: sockets and locks, private to the user (0700).
        state: logs.
        others: model folders that are not ours.
    """

    cache: Path
    runtime: Path
    state: Path
    others: ModelFolders = field(default_factory=ModelFolders)

    @property
    def models(self) -> Path:
        return self.cache / "models"

    @property
    def kernels(self) -> Path:
        return self.cache / "numba"

    @classmethod
    def default(cls) -> Paths:
        """The user's directories; `POWER_LAB_HOME` puts all three under one folder (tests, several installations)."""
        home = os.environ.get("POWER_LAB_HOME")
        if home:
            root = user_path(home, "POWER_LAB_HOME").absolute()
            return cls(root / "cache", root / "run", root / "state", ModelFolders.default())
        dirs = platformdirs.PlatformDirs("power-lab", appauthor=False)
        session = os.environ.get("XDG_RUNTIME_DIR", "")  # absent in containers and over ssh without a login session
        if session and Path(session).is_dir():
            runtime = Path(session, "power-lab")
        else:
            runtime = Path("/tmp", f"power-lab-{os.getuid()}")  # and not TMPDIR: all of a user's processes meet here
        return cls(dirs.user_cache_path, runtime, dirs.user_state_path, ModelFolders.default())


class HostSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine host (owner: host) and of a client's introduction to it.

    Attributes:
        idle_s: seconds after which an engine without client and work is closed.
        linger_s: seconds after which a host without engine and client ends.
        drain_s: longest wait for running requests when the host is asked to end.
        client: how this program is named to others; empty takes the notebook's or the program's name.
        factory: FILE.py:NAME of another engine class, for tests; empty is the real engine.
    """

    idle_s: float = 900.0
    linger_s: float = 120.0
    drain_s: float = 30.0
    client: str = ""
    factory: str = ""

    def __post_init__(self) -> None:
        _between("idle_s", self.idle_s, 0, 1e9)
        _between("linger_s", self.linger_s, 0, 1e9)
        _between("drain_s", self.drain_s, 0, 1e6)

    @classmethod
    def default(cls) -> HostSettings:
        """From the environment: `POWER_LAB_IDLE_MINUTES`. Raises ConfigError."""
        minutes = os.environ.get("POWER_LAB_IDLE_MINUTES")
        if not minutes:
            return cls()
        try:
            return cls(idle_s=float(minutes) * 60)
        except ValueError:
            raise ConfigError("POWER_LAB_IDLE_MINUTES", f"{minutes!r} is not a number of minutes") from None

    def client_name(self) -> str:
        """Who this process is: the notebook's path where Jupyter tells it, else the program's name."""
        script = Path(sys.argv[0] if sys.argv else "python")
        program = script.name if script.name != "__main__.py" else script.parent.name
        return (self.client or os.environ.get("JPY_SESSION_NAME") or program)[:512]


def child_environment(package_root: Path) -> dict[str, str]:
    """Environment of a child interpreter that must import the same `power_lab` as this one."""
    inherited = os.environ.get("PYTHONPATH")
    path = f"{package_root}{os.pathsep}{inherited}" if inherited else str(package_root)
    installed = package_root in {Path(entry) for entry in site.getsitepackages()}
    return dict(os.environ) if installed else {**os.environ, "PYTHONPATH": path}


_PAGES = "POWER_LAB_PAGES"


def announce_pages() -> None:
    """In a Jupyter server: tell the kernels that it will start that its pages can load our files."""
    os.environ[_PAGES] = "1"


def pages_served() -> bool:
    """In a kernel: whether the server that started it serves our files to its pages."""
    return os.environ.get(_PAGES) == "1"
