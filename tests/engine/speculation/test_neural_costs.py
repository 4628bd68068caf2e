"""What trained drafters take of memory, and what of their arithmetic is proved to be independent of the batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from power_lab.engine.models.probed import linear_shape
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural import Room
from power_lab.errors import ExactnessError
from power_lab.kernels.ops import Array, Ops, Weight
from power_lab.kernels.probe import LinearShape, probe
from tests import drafters, tiny
from tests.engine.test_exactness import prompt_of

SHAPE = tiny.Shape()
ALL = [
    *drafters.KINDS.items(),
    ("heads", lambda shape, ops: drafters.mtp_drafter(shape, ops, layers=3, said=90)),
    ("normed", lambda shape, ops: drafters.eagle_drafter(shape, ops, normed_hidden=True, said=90)),
]
KINDS = pytest.mark.parametrize("make", [make for _, make in ALL], ids=[name for name, _ in ALL])


class Counting:
    """The operations of `ops`; counts the bytes of arrays and notes the matrices that are multiplied, and those that gate."""

    def __init__(self, ops: Any) -> None:
        self._ops, self.nbytes = ops, 0
        self.linears: set[LinearShape] = set()
        self.gates: set[LinearShape] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self._counted(self._ops.empty(shape, dtype))

    def asarray(self, host: np.ndarray) -> Array:
        return self._counted(self._ops.asarray(host))

    def rope_tables(self, *args: Any) -> Array:
        return self._counted(self._ops.rope_tables(*args))

    def linear(self, x: Array, weights: Sequence[Weight], out: Array, *rest: Any) -> None:
        self.linears |= set(map(linear_shape, weights))
        self._ops.linear(x, weights, out, *rest)

    def gate_up(self, x: Array, gate: Weight, up: Weight, *rest: Any) -> None:
        self.gates |= {linear_shape(gate), linear_shape(up)}
        self._ops.gate_up(x, gate, up, *rest)

    def _counted(self, array: Array) -> Array:
        self.nbytes += array.nbytes
        return array


@KINDS
@pytest.mark.parametrize("late", [False, True])
def test_a_companion_tells_all_that_it_has_allocated(
    numba_ops: Callable[[int], Ops], behind: Callable[[Ops], Ops], late: bool, make: Callable[..., Any]
) -> None:
    counting = Counting(behind(numba_ops(2)) if late else numba_ops(2))
    trained = make(SHAPE, counting).trained
    tables = getattr(trained, "tables", None) or {0: getattr(trained, "table", None)}
    tabled = sum(table.nbytes for table in tables.values() if table is not None)
    if hasattr(trained, "decoder"):
        tabled = trained.decoder.table_bytes
    before = counting.nbytes
    companion = trained.companion(Room(rows=24, batch=3, context=128, clock=time.monotonic, graph_bytes=0))
    scalars = 64  # stand-ins for arrays that a launch has none of
    assert tabled and 0 <= counting.nbytes - before + tabled - companion.nbytes <= scalars


@KINDS
def test_what_a_drafter_multiplies_is_probed(numba_ops: Callable[[int], Ops], make: Callable[..., Any]) -> None:
    counting = Counting(numba_ops(2))
    loaded = make(SHAPE, counting)
    target = {linear_shape(weight) for weight in loaded.model.weights.matrices()}
    lab = drafters.engine(loaded)
    for name in loaded.trained.serves:
        params = SamplingParams(max_tokens=8, speculate=name, controller="fixed", width=4, ignore_eos=True, seed=0)
        assert any(entry.drafted for entry in lab.submit(prompt_of(1, 20), params).result().rounds)
    shapes = loaded.trained.shapes
    own = (counting.linears | counting.gates) - target
    assert own <= shapes.linears <= counting.linears | counting.gates
    assert shapes.gates <= counting.gates and counting.gates - target <= shapes.gates
    assert shapes.linears and shapes.gates and shapes.attentions and shapes.activations
    probe(numba_ops(2), shapes)


@pytest.mark.parametrize("kernel", ["linear", "gate_up", "attention"])
def test_a_drafters_kernel_that_depends_on_its_neighbours_is_found(
    numba_ops: Callable[[int], Ops], kernel: str
) -> None:
    """Planted: its last bit depends on how many rows there are."""
    planted = Counting(numba_ops(2))
    operation = getattr(planted, kernel)

    def spoilt(x: Array, *rest: Any) -> None:
        operation(x, *rest)
        out = next(array for array in reversed(rest) if isinstance(array, np.ndarray) and len(array) == len(x))
        if len(x) > 1:
            out[-1, 0] = np.nextafter(out[-1, 0], np.float32(np.inf))

    setattr(planted, kernel, spoilt)
    shapes = drafters.KINDS["dflash"](SHAPE, numba_ops(2)).trained.shapes  # type: ignore[union-attr]
    with pytest.raises(ExactnessError, match=kernel):
        probe(planted, shapes)  # type: ignore[arg-type]
