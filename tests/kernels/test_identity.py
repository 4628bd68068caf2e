"""The arithmetic digest, the kernel cache, the operation table, the probe, the thread team."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import power_lab
from power_lab.errors import ConfigError, ExactnessError
from power_lab.kernels.numba import identity
from power_lab.kernels.numba.ops import NumbaOps
from power_lab.kernels.ops import Array, Weight
from power_lab.kernels.probe import AttentionShape, Shapes, probe, random_weight
from power_lab.kernels.quants import QuantType
from power_lab.kernels.table import select
from tests.kernels import data

SMALL = Shapes(
    frozenset((type, 48, 256) for type in QuantType),
    frozenset({AttentionShape(4, 2, 16)}),
    frozenset({"silu", "gelu_tanh"}),
)

ONE_KERNEL = """
import sys
from pathlib import Path
import numpy as np
from power_lab.kernels.numba import catalogue, identity, norm
folder = Path(sys.argv[1]) / identity.digest()[:16]
assert catalogue.open_cache(folder) == ""
with catalogue.cache_at(folder):
    norm.chunk.enable_caching()
x, out = np.arange(48, dtype=np.float32)[None], np.zeros((1, 48), np.float32)
norm.chunk(np.array(norm.job(x, None, None, np.ones(48, np.float32), 1e-5, out)[1:]), 0, 0)
print(sum(norm.chunk.stats.cache_hits.values()), out.tobytes().hex())
"""


def test_an_edited_shared_file_never_meets_stale_code(tmp_path: Path) -> None:
    """Numba's own cache looks at the kernel's file alone; norms take their code from `vector`."""
    source = Path(power_lab.__file__).parent
    shutil.copytree(source / "kernels", tmp_path / "power_lab" / "kernels")
    for name in ("__init__.py", "errors.py"):
        shutil.copy(source / name, tmp_path / "power_lab")

    def run() -> list[str]:
        command = [sys.executable, "-c", ONE_KERNEL, str(tmp_path / "cache")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()

    first, again = run(), run()
    assert (first[0], again[0]) == ("0", "1")
    assert first[1] == again[1]
    vector = tmp_path / "power_lab" / "kernels" / "numba" / "vector.py"
    text = vector.read_text()
    assert "return b.fadd(shuffle(b, x, y, low)" in text
    vector.write_text(text.replace("return b.fadd(shuffle(b, x, y, low)", "return b.fsub(shuffle(b, x, y, low)"))
    edited = run()
    assert edited[0] == "0"
    assert edited[1] != first[1]


def test_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert data.one_thread().digest() == data.two_threads().digest() == identity.digest()
    assert len(bytes.fromhex(identity.digest())) == 32
    path = identity.instruction_path()
    monkeypatch.setattr(identity, "instruction_path", lambda: path + "+other")
    assert identity.digest() != data.two_threads().digest()


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ops = NumbaOps(tmp_path / "file", 1)
    assert "cannot be written" in ops.cache_reason
    assert any("cannot be written" in reason for reason in ops.reasons())
    assert data.two_threads().cache_reason == ""


def test_table() -> None:
    assert select("cpu", "exact", 1, data.CACHE).name == "numba"
    for key, arguments in {
        "device": ("tpu", "exact", 1),
        "mode": ("cpu", "quick", 1),
        "threads": ("cpu", "exact", 0),
    }.items():
        with pytest.raises(ConfigError, match="Use ") as error:
            select(*arguments, data.CACHE)
        assert error.value.key == key


def test_exact_mode_loads_no_torch() -> None:
    code = "import sys; from pathlib import Path; from power_lab.kernels.table import select; import power_lab.kernels.probe\n"
    code += f"select('cpu', 'exact', 1, Path({str(data.CACHE)!r})); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_fast_mode(ops: NumbaOps) -> None:
    fast = select("cpu", "fast", 2, data.CACHE)
    assert (fast.mode, fast.digest() == ops.digest()) == ("fast", False)
    gate, up = (random_weight(ops, QuantType.Q4_1, 40, 64, np.random.default_rng(i)) for i in (0, 1))
    x = data.normal(5, 64)
    for _ in range(2):  # before and after close()
        mine, theirs = data.poison(5, 80), data.poison(5, 80)
        ops.linear(x, (gate, up), mine)
        fast.linear(x, (gate, up), theirs)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        mine, theirs = data.poison(5, 40), data.poison(5, 40)
        ops.gate_up(x, gate, up, mine)
        fast.gate_up(x, gate, up, theirs)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
        assert fast._unpacked  # type: ignore[attr-defined]
        fast.close()
        assert not fast._unpacked, "f32 copies of all weights"  # type: ignore[attr-defined]


def test_probe_passes(ops: NumbaOps) -> None:
    probe(ops, SMALL)


class Broken(NumbaOps):
    """A linear whose many-row path rounds differently."""

    def linear(self, x: Array, weights: tuple[Weight, ...], out: Array) -> None:
        super().linear(x, weights, out)
        if x.shape[0] > 8:
            out[-1] = np.nextafter(out[-1], np.float32(np.inf))


def test_probe_names_the_kernel_that_breaks_the_promise() -> None:
    with pytest.raises(ExactnessError, match=r"linear F32 \[48, 256\].*row 32.*among 33"):
        probe(Broken(data.CACHE, 1), SMALL)


class BrokenReader(NumbaOps):
    """A norm that adds otherwise beside many rows: what sums of splits that are left to it could do."""

    def add_rms_norm(
        self, x: Array, delta: Array, post: Array | None, weight: Array | None, eps: float, out: Array
    ) -> None:
        super().add_rms_norm(x, delta, post, weight, eps, out)
        if x.shape[0] > 8:
            x[-1] = np.nextafter(x[-1], np.float32(np.inf))


def test_probe_runs_the_norm_behind_products_as_wide_as_what_is_normed() -> None:
    with pytest.raises(ExactnessError, match=r"linear and norm Q8_0 \[256, 512\]: row 32.*among 33"):
        probe(
            BrokenReader(data.CACHE, 1),
            Shapes(frozenset({(QuantType.Q8_0, 256, 512), (QuantType.Q8_0, 512, 256)}), frozenset()),
        )
    probe(BrokenReader(data.CACHE, 1), Shapes(frozenset({(QuantType.Q8_0, 512, 256)}), frozenset()))


def test_workers_sleep_wake_and_end() -> None:
    ops = NumbaOps(data.CACHE, 3)
    weight, _ = data.weight(QuantType.Q8_0, 96, 576)
    x, want, out = data.normal(20, 576), data.poison(20, 96), data.poison(20, 96)
    data.one_thread().linear(x, (weight,), want)
    for pause in (0.0, 0.05, 0.0, 0.05):  # the workers are spinning, then asleep
        time.sleep(pause)
        for _ in range(200):
            out[:] = np.nan
            ops.linear(x, (weight,), out)
            assert out.tobytes() == want.tobytes()
    before = threading.active_count()
    ops.close()
    deadline = time.monotonic() + 30
    while threading.active_count() > before - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before - 2
    ops.linear(x, (weight,), out)
    assert out.tobytes() == want.tobytes()


def test_two_teams_work_side_by_side() -> None:
    weight, _ = data.weight(QuantType.Q4_1, 96, 576)
    x, want = data.normal(9, 576), data.poison(9, 96)
    data.one_thread().linear(x, (weight,), want)
    wrong: list[int] = []

    def work() -> None:
        ops, out = NumbaOps(data.CACHE, 2), data.poison(9, 96)
        mine = ops.weight(QuantType.Q4_1, 96, 576, weight.data)
        for i in range(300):
            out[:] = np.nan
            ops.linear(x, (mine,), out)
            if out.tobytes() != want.tobytes():
                wrong.append(i)
        ops.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
