"""Device memory: it comes back, it is refused with numbers where it is not there, and other engines do not notice.

Models are real files, written by the `gguf` package and loaded as any other, but for their tokenizer: llama.cpp wants a merge in it that
the engine would refuse.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from power_lab.engine import loader
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.errors import CapacityError, ExactnessError
from power_lab.kernels.triton.ops import TritonOps
from tests import tiny, tiny_gguf

SMALL = tiny.Shape.wide("Q4_K", layers=2)
LARGE = tiny.Shape.wide("Q8_0", layers=12, ffn=2048)  # 20 MB of weights, 6 KB of keys and values a token
LOADS = 50
MIB = 1 << 20
PROMPT = list(range(100))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tiny.Shape, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {shape: folder / f"{shape.stored}.gguf" for shape in (SMALL, LARGE)}
    for shape, path in paths.items():
        tiny_gguf.write(path, shape)
    return paths


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    root = tmp_path_factory.mktemp("home")
    return Paths(root / "cache", root / "run", root / "state")


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_tokenizer", lambda checkpoint: tiny.tokenizer())


def start(file: Path, paths: Paths, **settings: Any) -> Engine:
    options = {"kv_tokens": 4096, "context": tiny.CONTEXT, **settings}
    return Engine(EngineConfig(model=str(file), device="cuda", **options), paths=paths, threaded=False)


def said(engine: Engine, count: int = 12) -> tuple[int, ...]:
    record = engine.generate(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True, temperature=1.0, seed=3))
    assert record.finish == "length", record.finish_detail
    return record.tokens


def held() -> int:
    """Bytes of live tensors, when nothing that Python could drop is left."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def free() -> int:
    """Bytes that the driver has for anybody."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def at_most() -> Iterator[Callable[[int], None]]:
    """Torch gets so many bytes beside those that it holds already, and no more."""

    def limit(nbytes: int) -> None:
        free()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_close_gives_back_all_that_the_engine_took(files: dict[tiny.Shape, Path], paths: Paths) -> None:
    start(files[SMALL], paths).close()  # what a process needs once: the driver's context, compiled kernels
    before = held()
    engine = start(files[SMALL], paths)
    said(engine)
    assert held() > before + engine.memory().pool
    engine.close()
    assert held() == before, "though the closed engine is still there to be asked what it was"


def test_fifty_loads_and_closes_leave_nothing_behind(files: dict[tiny.Shape, Path], paths: Paths) -> None:
    baseline: tuple[int, int] | None = None
    tokens = set()
    for _ in range(LOADS):
        engine = start(files[SMALL], paths)
        tokens.add(said(engine))
        assert any(shape.recordings for shape in engine.shape_stats()), "graphs are what is easily kept"
        engine.close()
        del engine
        baseline = baseline or (held(), free())
    assert baseline is not None and len(tokens) == 1
    assert held() == baseline[0]
    assert free() >= baseline[1] - 8 * MIB, "less than a fifth of a MiB a load"


def test_a_pool_that_cannot_fit_is_refused_with_the_numbers(files: dict[tiny.Shape, Path], paths: Paths) -> None:
    other = start(files[SMALL], paths)
    want, before = said(other), held()
    with pytest.raises(CapacityError, match=r"kv_tokens.*67,108,864 tokens.*GiB") as refused:
        start(files[LARGE], paths, kv_tokens=1 << 26)
    assert re.search(r"kv_tokens=\d+", refused.value.remedy), "what would fit"
    del refused
    assert held() == before
    assert said(other) == want
    other.close()


@pytest.mark.parametrize("what", ["table", "weights", "activations"])
def test_no_room_at_load_raises_with_the_numbers(
    what: str, files: dict[tiny.Shape, Path], paths: Paths, at_most: Callable[[int], None]
) -> None:
    other = start(files[SMALL], paths)
    want = said(other)
    start(files[LARGE], paths).close()  # has its kernels compiled and its probe passed
    before = held()
    table = TritonOps()
    room = {"table": 0, "weights": held() - before + 8 * MIB, "activations": held() - before + 64 * MIB}
    table.close()
    del table
    assert held() == before
    at_most(room[what])
    with pytest.raises(CapacityError, match=r"[0-9.]+ of [0-9.]+ GiB") as refused:
        start(files[LARGE], paths, step_tokens=1 << 16)
    del refused
    assert held() == before, "nothing stays half-loaded"
    assert said(other) == want
    other.close()


def test_no_room_for_a_graph_leaves_the_engine_running(
    files: dict[tiny.Shape, Path], paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = start(files[SMALL], paths)
    want = said(other)

    class Full(torch.cuda.CUDAGraph):
        """A graph for which the driver has no memory, as it says when a capture ends."""

        def capture_end(self) -> None:
            super().capture_end()
            raise torch.OutOfMemoryError("CUDA out of memory. (planted)")

    with monkeypatch.context() as planted:
        planted.setattr(torch.cuda, "CUDAGraph", Full)
        engine = start(files[SMALL], paths)
        assert said(engine) == want
    reasons = {why for shape in engine.shape_stats() for why in shape.eager}
    assert any(re.search(r"could not be captured.*\d+ bytes", why) for why in reasons), reasons
    assert not any(shape.recordings for shape in engine.shape_stats())
    assert said(engine) == want and said(other) == want
    engine.check()
    engine.close()
    other.close()


def test_a_kernel_that_depends_on_its_neighbours_refuses_exact_mode(
    files: dict[tiny.Shape, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planted(TritonOps):
        """A linear whose last bit depends on how many rows there are."""

        def linear(self, x: Any, weights: Any, out: Any, bias: Any = None) -> None:
            super().linear(x, weights, out, bias)
            if len(x) > 1:
                out[-1, 0] = torch.nextafter(out[-1, 0], torch.tensor(np.inf, device=out.device))

    home = Paths(tmp_path / "cache", tmp_path / "run", tmp_path / "state")
    before = held()
    monkeypatch.setattr(loader, "select", lambda *_: Planted())
    with pytest.raises(ExactnessError, match="linear") as refused:
        start(files[SMALL], home)
    del refused
    assert not (home.kernels / "proved").exists()
    assert held() == before
