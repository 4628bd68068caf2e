"""The GGUF reader: right about sound files, and never more than a ModelFileError about all others."""

from __future__ import annotations

import os
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from power_lab.engine.weights.gguf import MAX_HEADER_BYTES, TYPES, GgufFile
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import GEOMETRY, QuantType
from tests.engine.weights.ggufs import ARRAY, BOOL, F32, I32, STRING, U8, U32, Gguf, Tensor, pair, small, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


def opened(folder: Path, content: Gguf | bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)  # a new inode: mappings of earlier files stay valid
    path.write_bytes(bytes(content))
    return GgufFile.open(path)


def test_reads_every_value_type_and_tensor(folder: Path) -> None:
    file = opened(folder, small())
    assert file.version == 3
    got = {key: value for key, value in file.metadata.items() if not isinstance(value, np.ndarray)}
    assert got == {
        "test.v0": 200, "test.v1": -3, "test.v2": 60000, "test.v3": -3, "test.v4": 1 << 31, "test.v5": -3,
        "test.v6": 0.5, "test.v7": True, "test.v10": 1 << 60, "test.v11": -3, "test.f64": 0.1,
        "general.name": "tiny ⟨é⟩", "llama.block_count": 2, "test.strings": ["", "a", "日本"],
    }  # fmt: skip
    assert [type(value) for value in (got["test.v7"], got["test.v0"], got["test.v6"])] == [bool, int, float]
    assert file.metadata["test.ints"].tolist() == [1, -2, 3] and file.metadata["test.ints"].dtype == np.int32
    assert file.metadata["test.bools"].tolist() == [True, False] and file.metadata["test.none"].size == 0
    a, b, c = file.tensors.values()
    assert (a.name, a.type, a.shape, a.data.shape, a.values) == ("a.weight", QuantType.Q4_1, (3, 32), (3, 20), 96)
    assert a.data.tobytes() == bytes(range(60)) and not a.data.flags.writeable
    assert (b.shape, b.data.view(np.float32).tolist()) == ((5,), [1, 2, 3, 4, 5])
    assert (c.shape, c.data.shape, c.type) == ((2, 3, 2), (2, 3, 4), QuantType.F16)


@pytest.mark.parametrize("alignment", [32, 64, 1024])
def test_agrees_with_the_gguf_package(folder: Path, alignment: int) -> None:
    rng = np.random.default_rng(0)
    path = folder / f"oracle{alignment}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_block_count(7)
    writer.add_token_list(["a", "é", "Ġthe"])
    writer.add_token_types([1, 3, 4])
    for number, (name, values, size) in TYPES.items():
        data = rng.integers(0, 256, (6, 512 // values * size), np.uint8)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile.open(path), gguf.GGUFReader(path)
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "é", "Ġthe"]
    assert ours.metadata["tokenizer.ggml.token_type"].tolist() == [1, 3, 4]
    assert ours.require("llama.block_count", int) == 7
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensor(tensor.name).kind == tensor.tensor_type.name
        assert ours.tensor(tensor.name).shape == (6, 512)
        assert ours.tensor(tensor.name).stored.tobytes() == tensor.data.tobytes()


def test_type_table_is_the_formats() -> None:
    for kind, (name, values, size) in TYPES.items():
        assert gguf.GGMLQuantizationType(kind).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (values, size)
    for kind, geometry in GEOMETRY.items():
        assert TYPES[kind] == (kind.name, *geometry)


def test_default_model(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        assert len(file.tensors) == 272 and file.require("llama.block_count", int, 1, 1000) == 30
        assert file.tensor("token_embd.weight").shape == (49152, 576)
        assert file.tensor("blk.0.ffn_down.weight").data.shape == (576, 1536 // 32 * 20)
        calls: list[tuple[int, int]] = []
        assert file.sha256(lambda *done: calls.append(done)) == (
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        )
        assert calls[-1] == (98_362_432, 98_362_432) and calls == sorted(calls)


def test_views_outlive_the_file(folder: Path) -> None:
    file = opened(folder, small())
    view = file.tensor("a.weight").data
    file.close()
    file.close()
    (folder / "model.gguf").unlink()
    assert view.tobytes() == bytes(range(60))
    with pytest.raises(ModelFileError, match=r"'a\.weight' is missing"):
        file.tensor("a.weight")
    with pytest.raises(ModelFileError, match="closed"):
        file.sha256()


def test_version_2_reads_the_same(folder: Path) -> None:
    content = small()
    content.version = 2
    assert opened(folder, content).metadata["test.strings"] == ["", "a", "日本"]


def test_typed_getters(folder: Path) -> None:
    nan = pair("test.nan", F32, float("nan"))
    file = opened(folder, Gguf([nan, pair("n", U32, 5), pair("flag", BOOL, True), pair("x", F32, 0.5)]))
    assert file.require("n", int, 1, 5) == 5 and file.get("absent", int, 9) == 9 and file.get("n", int, 9) == 5
    assert file.require("flag", bool) is True and file.require("x", float, 0, 1) == 0.5
    for key, kind, low, high, said in [
        ("absent", int, None, None, "'absent' is missing"),
        ("n", str, None, None, "'n' is int 5, but str is expected"),
        ("n", float, None, None, "float is expected"),
        ("flag", int, None, None, "'flag' is bool True, but int is expected"),
        ("n", int, 6, None, "'n' is int 5, outside 6"),
        ("n", int, None, 4, "outside None..4"),
        ("x", float, 0.6, 1, "outside"),
        ("test.nan", float, None, None, "not a finite number"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            file.require(key, kind, low, high)


def test_known_types_without_arithmetic_are_refused_by_name(folder: Path) -> None:
    file = opened(folder, Gguf(tensors=[Tensor("iq1", (256, 2), 19, bytes(100))]))
    assert file.tensor("iq1").shape == (2, 256) and file.tensor("iq1").kind == "IQ1_S"
    for ask in ("type", "data"):
        with pytest.raises(ModelFileError, match="'iq1' is stored as IQ1_S"):
            getattr(file.tensor("iq1"), ask)


def tensor(**changes) -> Gguf:
    return Gguf(tensors=[Tensor(**({"name": "t", "dims": (4,), "kind": 0, "data": bytes(16)} | changes))])


ONE = Tensor("t", (4,), 0, bytes(16))
HUGE = (1 << 64) - 1
REFUSED = {
    "magic": (Gguf(magic=b"GGML"), "first four bytes"),
    "version 1": (Gguf(version=1, pairs=[pair("a", U32, 1)]), "version 1"),
    "version 4": (Gguf(version=4), "version 4"),
    "big-endian": (Gguf(version=3 << 24), "big-endian"),
    "keys": (Gguf(keys=HUGE), "key count"),
    "keys beyond the file": (Gguf(keys=1000), "key count"),
    "tensors": (Gguf(count=HUGE), "tensor count"),
    "tensors beyond the file": (Gguf(count=70), "tensor count"),
    "key length": (Gguf([text("k", HUGE)]), "name of metadata key 0"),
    "key beyond the file": (Gguf([text("k", 60000) + bytes(9)]), "name of metadata key 0 needs 60000"),
    "key bytes": (Gguf([pair(b"\xff", U32, 1)]), "name of metadata key 0 is not UTF-8"),
    "key twice": (Gguf([pair("k", U32, 1), pair("k", U32, 2)]), "'k' comes twice"),
    "value type": (Gguf([text("k") + struct.pack("<IQ", 13, 0)]), "'k' has the unknown value type 13"),
    "string length": (Gguf([text("k") + struct.pack("<IQ", STRING, HUGE)]), "'k'"),
    "string bytes": (Gguf([pair("k", STRING, b"\xff\xfe")]), "'k' is not UTF-8"),
    "bool": (Gguf([text("k") + struct.pack("<IB", BOOL, 2)]), "'k' has a bool"),
    "array length": (Gguf([text("k") + struct.pack("<IIQ", ARRAY, I32, 1 << 61)]), "'k' needs"),
    "array length wraps": (Gguf([text("k") + struct.pack("<IIQ", ARRAY, I32, 1 << 62)]), "'k' needs"),
    "string array length": (Gguf([text("k") + struct.pack("<IIQ", ARRAY, STRING, HUGE)]), "'k': array length"),
    "string array item": (Gguf([text("k") + struct.pack("<IIQ", ARRAY, STRING, 1) + text("", HUGE)]), "item 0"),
    "string array bytes": (Gguf([pair("k", ARRAY, (STRING, ["a", b"\xff"]))]), "'k': item 1 is not UTF-8"),
    "array of arrays": (Gguf([pair("k", ARRAY, (ARRAY, [(U8, [1])]))]), "'k' is an array of arrays"),
    "array type": (Gguf([text("k") + struct.pack("<IIQ", ARRAY, 99, 0)]), "unknown value type 99"),
    "alignment 0": (Gguf([pair("general.alignment", U32, 0)], [ONE]), "general.alignment"),
    "alignment 48": (Gguf([pair("general.alignment", U32, 48)], [ONE]), "general.alignment"),
    "alignment huge": (Gguf([pair("general.alignment", U32, 1 << 31)], [ONE]), "general.alignment"),
    "alignment type": (Gguf([pair("general.alignment", STRING, "32")], [ONE]), "general.alignment"),
    "tensor name": (tensor(name="t" * 65), "name of tensor 0 has 65 bytes"),
    "tensor twice": (Gguf(tensors=[ONE, ONE]), "'t' comes twice"),
    "rank 0": (tensor(dims=(), rank=0), "'t' has 0 dimensions"),
    "rank 5": (tensor(dims=(1,) * 5), "'t' has 5 dimensions"),
    "dimension 0": (tensor(dims=(4, 0)), "'t' has the impossible shape"),
    "dimensions wrap": (tensor(dims=(1 << 32, 1 << 32)), "'t' has the impossible shape"),
    "dimensions beyond the file": (tensor(dims=(1 << 40,)), "'t' needs"),
    "tensor type": (tensor(kind=99), "'t' has the unknown type 99"),
    "retired tensor type": (tensor(kind=31), "'t' is stored as Q4_0_4_4"),
    "part of a block": (tensor(dims=(33,), kind=3), "'t': rows of 33 values are not whole Q4_1 blocks"),
    "offset": (tensor(offset=8), "'t': offset 8 is not a multiple"),
    "offset beyond the file": (tensor(offset=1 << 63), "'t' needs 16 bytes"),
    "overlap": (Gguf(tensors=[ONE, Tensor("u", (4,), 0, bytes(16), offset=0)]), "'t' and 'u' overlap"),
    "overlap inside": (
        Gguf(tensors=[Tensor("t", (64,), 0, bytes(256)), Tensor("u", (4,), 0, b"", offset=32)]),
        "'t' and 'u' overlap",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_by_name_before_anything_is_made(folder: Path, case: str) -> None:
    content, said = REFUSED[case]
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=said) as caught:
            opened(folder, bytes(content).ljust(24, b"\0"))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("kind", [U8, STRING])
def test_a_large_file_cannot_put_itself_into_memory(folder: Path, kind: int) -> None:
    """Its bytes are really there, but as one value of the header."""
    size = MAX_HEADER_BYTES + 1
    head = text("k") + struct.pack("<IIQ", ARRAY, kind, size if kind == U8 else 1)
    path = folder / "large.gguf"
    path.write_bytes(bytes(Gguf([head if kind == U8 else head + struct.pack("<Q", size)])))
    os.truncate(path, 2 * size)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=r"'k'.*header"):
            GgufFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        path.unlink()


def test_what_is_no_file_is_refused(folder: Path) -> None:
    (folder / "empty").write_bytes(b"")
    os.mkfifo(folder / "fifo")
    for name, said in [("empty", "0 bytes"), ("fifo", "regular"), (".", "regular"), ("absent", "No such file")]:
        with pytest.raises(ModelFileError, match=said):
            GgufFile.open(folder / name)


def test_every_truncation_is_refused(folder: Path) -> None:
    ending_in_a_string = bytes(Gguf([pair("k", ARRAY, (STRING, ["some", "strings"]))], alignment=1))
    for whole in (bytes(small()), ending_in_a_string):
        opened(folder, whole)
        for length in range(len(whole)):
            with pytest.raises(ModelFileError):
                opened(folder, whole[:length])


WHOLE = bytes(small())


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@example([(len(WHOLE) - 1, 255)])
@settings(max_examples=400, deadline=None)
def test_flipped_bytes_end_in_an_error_or_a_sound_file(folder: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for at, byte in flips:
        content[at] = byte
    try:
        file = opened(folder, bytes(content))
    except ModelFileError:
        return
    spans = []
    for info in file.tensors.values():
        assert info.stored.nbytes == len(info.stored.tobytes()) <= len(WHOLE)
        spans.append(info.stored.nbytes)
    assert sum(spans) <= len(WHOLE)
    assert sum(len(value) for value in file.metadata.values() if isinstance(value, (str, list, np.ndarray))) < len(
        WHOLE
    )


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_random_headers_end_in_an_error(folder: Path, noise: bytes) -> None:
    with suppress(ModelFileError):
        opened(folder, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + noise)
