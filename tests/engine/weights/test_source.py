"""Weight sources: same arrays from file and memory, strict about names and shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from power_lab.engine.weights.gguf import GgufFile
from power_lab.engine.weights.source import FileSource, MemorySource, WeightSource, refuse_unused, unused
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType
from tests.engine.weights.ggufs import Gguf, Tensor

F32 = np.arange(6, dtype=np.float32).reshape(2, 3)
F16 = F32.astype(np.float16)
BF16 = (F32.view(np.uint32) >> 16).astype(np.uint16)
Q8 = np.arange(2 * 68, dtype=np.uint8).reshape(2, 68)
NORM = np.ones(3, np.float32)


@pytest.fixture(params=["file", "memory"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> WeightSource:
    if request.param == "memory":
        return MemorySource(
            {"f32": F32, "f16": F16, "bf16": (QuantType.BF16, BF16), "q8": (QuantType.Q8_0, Q8), "norm": NORM}
        )
    parts = [("f32", (3, 2), 0, F32), ("f16", (3, 2), 1, F16), ("bf16", (3, 2), 30, BF16), ("q8", (64, 2), 8, Q8)]
    tensors = [Tensor(name, dims, kind, data.tobytes()) for name, dims, kind, data in parts]
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(Gguf(tensors=[*tensors, Tensor("norm", (3,), 0, NORM.tobytes())])))
    return FileSource(GgufFile.open(path))


def test_arrays_come_as_the_kernels_want_them(source: WeightSource) -> None:
    assert source.names() == ["f32", "f16", "bf16", "q8", "norm"]
    for name, cols, kind, want in [
        ("f32", 3, QuantType.F32, F32),
        ("f16", 3, QuantType.F16, F16),
        ("bf16", 3, QuantType.BF16, BF16),
        ("q8", 64, QuantType.Q8_0, Q8),
    ]:
        got = source.matrix(name, 2, cols)
        assert got[0] is kind and got[1].dtype == want.dtype and np.array_equal(got[1], want)
    kind, norm = source.vector("norm", 3)
    assert kind is QuantType.F32 and np.array_equal(norm, NORM)


def test_wrong_shapes_name_tensor_found_and_expected(source: WeightSource) -> None:
    for ask, said in [
        (lambda: source.matrix("f32", 3, 2), r"'f32' has shape \[2, 3\], but \[3, 2\]"),
        (lambda: source.matrix("q8", 2, 32), r"'q8' has shape \[2, 64\], but \[2, 32\]"),
        (lambda: source.vector("f32", 6), r"'f32' has shape \[2, 3\], but \[6\]"),
        (lambda: source.matrix("norm", 1, 3), r"'norm' has shape \[3\], but \[1, 3\]"),
        (lambda: source.vector("absent", 3), "'absent' is missing"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            ask()


def test_unused_names_are_refused(source: WeightSource) -> None:
    assert unused(source, ["f32", "norm", "q8"]) == ["f16", "bf16"]
    refuse_unused(source, ["f32", "norm", "q8", "f16"], ignored=["bf16"])
    with pytest.raises(ModelFileError, match="does not use these tensors of the file: 'f16', 'bf16'"):
        refuse_unused(source, ["f32", "norm", "q8"])


def test_memory_refuses_what_no_file_could_hold() -> None:
    with pytest.raises(ModelFileError, match="'x' is float64"):
        MemorySource({"x": np.ones(3)})
    with pytest.raises(ModelFileError, match="not rows of Q8_0"):
        MemorySource({"x": (QuantType.Q8_0, np.zeros((2, 35), np.uint8))})
    with pytest.raises(ModelFileError, match="not rows of BF16"):
        MemorySource({"x": (QuantType.BF16, np.zeros((2, 4), np.uint8))})


def test_file_views_are_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(Gguf(tensors=[Tensor("f32", (3, 2), 0, F32.tobytes())])))
    file = GgufFile.open(path)
    _, data = FileSource(file).matrix("f32", 2, 3)
    assert np.shares_memory(data, file.tensor("f32").data) and not data.flags.writeable
