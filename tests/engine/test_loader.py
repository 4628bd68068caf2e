"""Loading: what is refused and why, and that exact mode needs no torch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine import loader
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.models.describe import describe
from power_lab.engine.models.probed import linear_shape, probed_shapes
from power_lab.engine.trace import DraftFacts
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.errors import ConfigError, ExactnessError, ModelFileError
from power_lab.kernels.numba.ops import NumbaOps

SHIPPED = Path(loader.__file__).parents[1] / "drafters" / "b179c9523d0e" / "mtp.safetensors"


@pytest.fixture
def paths(tmp_path: Path, smollm2_path: Path) -> Paths:
    """Fresh folders with the user's model and compiled kernels in them."""
    (tmp_path / "cache" / "numba").mkdir(parents=True)
    (tmp_path / "cache" / "models").symlink_to(smollm2_path.parent)
    for folder in Paths.default().kernels.glob("*"):
        if folder.name != "proved":
            (tmp_path / "cache" / "numba" / folder.name).symlink_to(folder)
    return Paths(tmp_path / "cache", tmp_path / "run", tmp_path / "state")


def load(paths: Paths, **settings: Any) -> loader.Loaded:
    return loader.load(EngineConfig(**settings), paths, lambda *_: None)


def test_the_default_model_loads_with_its_facts(paths: Paths, smollm2_path: Path) -> None:
    loaded = load(paths)
    facts = loaded.facts
    assert facts.sha256.startswith("b179c952") and facts.license == "Apache-2.0"
    assert (facts.architecture, facts.vocab, facts.parameters) == ("llama", 49152, 134_515_008)
    assert set(facts.quantisation) == {"Q4_1", "Q8_0", "F32"}
    assert sum(facts.quantisation.values()) < smollm2_path.stat().st_size
    assert len(list((paths.kernels / "proved").iterdir())) == 2, "the passed probes of model and drafter are remembered"
    assert loaded.trained is not None
    assert (facts.draft.kind, facts.draft.sha256) == ("mtp", loaded.trained.sha256)
    assert facts.draft.sha256 == hashlib.sha256(SHIPPED.read_bytes()).hexdigest()
    loaded.model.ops.close()


def test_a_draft_model_and_none_are_told_as_what_they_are(paths: Paths, smollm2_path: Path) -> None:
    assert load(paths, draft="").facts.draft == DraftFacts()
    facts = load(paths, draft=str(smollm2_path)).facts
    assert facts.draft == DraftFacts(kind="model", name=smollm2_path.stem, sha256=facts.sha256)


def test_a_kernel_that_depends_on_its_neighbours_refuses_exact_mode(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planted(NumbaOps):
        """A linear whose last bit depends on how many rows there are."""

        def linear(self, x: Any, weights: Any, out: Any, bias: Any = None) -> None:
            super().linear(x, weights, out, bias)
            if len(x) > 1:
                out[-1, 0] = np.nextafter(out[-1, 0], np.float32(np.inf))

    monkeypatch.setattr(loader, "select", lambda device, mode, threads, cache, *_: Planted(cache, threads))
    with pytest.raises(ExactnessError, match="linear"):
        load(paths)
    assert not (paths.kernels / "proved").exists()


def test_a_drafters_kernel_that_depends_on_its_neighbours_refuses_exact_mode(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(paths)
    assert loaded.trained is not None
    own = loaded.trained.shapes.linears - probed_shapes(loaded.model.spec, loaded.model.weights).linears

    class Planted(NumbaOps):
        """The same, of matrices that only the drafter has."""

        def linear(self, x: Any, weights: Any, out: Any, bias: Any = None) -> None:
            super().linear(x, weights, out, bias)
            if len(x) > 1 and linear_shape(weights[0]) in own:
                out[-1, 0] = np.nextafter(out[-1, 0], np.float32(np.inf))

    for proof in (paths.kernels / "proved").iterdir():
        proof.unlink()
    monkeypatch.setattr(loader, "select", lambda device, mode, threads, cache, *_: Planted(cache, threads))
    load(paths, draft="")
    with pytest.raises(ExactnessError, match="linear"):
        load(paths)


def test_contexts_that_do_not_fit_are_refused_with_the_numbers(paths: Paths) -> None:
    with pytest.raises(ConfigError, match=r"context: 9000 .*8192"):
        load(paths, context=9000)
    with pytest.raises(ConfigError, match=r"kv_tokens: a KV pool of 67,108,864 tokens needs 2,880\.0 GiB.*Use at most"):
        load(paths, kv_tokens=1 << 26)
    with pytest.raises(ConfigError, match=r"kv_tokens to 4096"):
        load(paths, context=4096, kv_tokens=1024)
    loaded = load(paths, kv_tokens=1024)
    assert loaded.context == 1024 and "kv_tokens" in loaded.reasons["context"]


def test_before_a_gpus_memory_is_known_no_pool_limits_the_context(smollm2_path: Path) -> None:
    with open_checkpoint(smollm2_path) as checkpoint:
        spec = describe(checkpoint, 49152).spec
    assert loader._context(0, 0, spec) == (spec.context, "the model's own limit")
    assert loader._context(100, 0, spec) == (100, "as asked")


def test_an_unknown_architecture_is_named(paths: Paths, smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(smollm2_path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma", 1))
    with pytest.raises(ModelFileError, match="'lamma' is not supported"):
        load(paths, model=str(other))


def test_the_probes_weights_are_not_kept(paths: Paths) -> None:
    loaded = load(paths, threads=1)
    kept = [weight for stacked in loaded.model.ops._plans for weight in stacked]  # type: ignore[attr-defined]
    assert sum(weight.data.nbytes for weight in kept) < 1 << 20, "only norm vectors were read"


def test_a_system_that_tells_no_affinity_uses_all_cores(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    assert load(paths).facts.threads == os.cpu_count()


def test_two_engines_load_at_once(paths: Paths) -> None:
    code = (
        "import threading; from pathlib import Path\n"
        "from power_lab.engine.config import Paths, EngineConfig; from power_lab.engine import loader\n"
        f"paths = Paths(*map(Path, {[str(paths.cache), str(paths.runtime), str(paths.state)]!r}))\n"
        "done = []\n"
        "load = lambda: done.append(loader.load(EngineConfig(threads=1), paths, lambda *_: None).facts.model)\n"
        "threads = [threading.Thread(target=load) for _ in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]; print(done)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(["smollm2"] * 3), done.stderr


def test_exact_mode_imports_no_torch(paths: Paths) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from power_lab.engine.config import Paths, EngineConfig; from power_lab.engine.engine import Engine\n"
        f"paths = Paths(*map(Path, {[str(paths.cache), str(paths.runtime), str(paths.state)]!r}))\n"
        "engine = Engine(EngineConfig(), paths=paths); print(engine.generate('Hi').finish); engine.close()\n"
        "print(sorted({'torch', 'xarray', 'bokeh', 'ipykernel', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["stop", "[]"], done.stderr
