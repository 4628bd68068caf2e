"""The SafeTensors reader: the same bytes as the format's own package, and never more than a ModelFileError about what is not sound."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from power_lab.engine.weights.safetensors import DTYPES, MAX_HEADER_BYTES, SafeTensorsFile, SafeTensorsModel
from power_lab.engine.weights.source import FileSource
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType
from tests.fuzz.originals import safe

ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("safetensors")


def opened(folder: Path, content: bytes) -> SafeTensorsFile:
    path = folder / "model.safetensors"
    path.unlink(missing_ok=True)  # a new inode: mappings of earlier files stay valid
    path.write_bytes(content)
    return SafeTensorsFile.open(path)


def file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_reads_what_the_formats_own_package_writes(folder: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        f"{np.dtype(kind).name}.{len(shape)}": rng.integers(0, 100, shape).astype(kind)
        for kind in ("f4", "f2", "f8", "i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8", "?", "c8")
        for shape in ((), (3,), (2, 5), (2, 3, 4), (0, 2))
    }
    with opened(folder, safetensors.numpy.save(arrays, metadata={"format": "np"})) as model:
        assert model.metadata == {"format": "np"} and model.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = model.tensors[name]
            assert tensor.shape == array.shape and tensor.stored.tobytes() == array.tobytes()
            assert DTYPES[tensor.kind] == 8 * array.itemsize and not tensor.stored.flags.writeable
            if array.ndim:
                assert tensor.stored.shape == (*array.shape[:-1], array.shape[-1] * array.itemsize)


def test_dtypes_are_the_formats(folder: Path) -> None:
    for kind, bits in DTYPES.items():
        content = file({"t": {"dtype": kind, "shape": [2, 4], "data_offsets": [0, bits]}}, bytes(bits))
        ((name, read),) = safetensors.deserialize(content)
        assert (name, read["dtype"]) == ("t", kind)
        assert opened(folder, content).tensors["t"].kind == kind
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(file({"t": {**ONE, "dtype": "?"}}, bytes(8)))
    said = str(caught.value)
    assert {part for part in said.split("`") if part.isupper()} == set(DTYPES)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard", ["10GB", "30KB"])
def test_a_transformers_folder_bit_for_bit(tmp_path: Path, dtype: str, shard: str) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    network = LlamaForCausalLM(config).to(getattr(torch, dtype))
    network.save_pretrained(tmp_path, max_shard_size=shard)
    model = SafeTensorsModel.open(tmp_path)
    assert len(model.files) == (1 if shard == "10GB" else len(list(tmp_path.glob("*.safetensors"))) + 1) != 2
    assert model.size == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    source = FileSource(model)
    state = network.state_dict()
    assert sorted(source.names()) == sorted(state)
    for name, value in state.items():
        kind, data = source.matrix(name, *value.shape) if value.ndim == 2 else source.vector(name, *value.shape)
        bits = value.view(torch.uint16) if dtype == "bfloat16" else value
        assert kind.name == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
        assert data.dtype == bits.numpy().dtype and data.tobytes() == bits.numpy().tobytes()
        assert data.base is not None and not data.flags.writeable  # the mapping itself
    model.close()
    assert model.tensors == {} and data.tobytes() == bits.numpy().tobytes()


def test_views_outlive_the_file(folder: Path) -> None:
    model = opened(folder, safe({"a": ("F32", [2], b"abcdefgh")}))
    view = model.tensors["a"].stored
    model.close()
    model.close()
    (folder / "model.safetensors").unlink()
    assert view.tobytes() == b"abcdefgh" and model.tensors == {}
    with pytest.raises(ModelFileError, match="closed"):
        model.sha256()


def test_only_three_dtypes_are_computed_on(folder: Path) -> None:
    for kind, bits in DTYPES.items():
        source = FileSource(opened(folder, safe({"t.weight": (kind, [2, 4], bytes(bits))})))
        if kind in ("F32", "F16", "BF16"):
            assert source.matrix("t.weight", 2, 4)[0] is QuantType[kind]
        else:
            with pytest.raises(ModelFileError, match=rf"'t\.weight' is stored as {kind}, which is not supported.*BF16"):
                source.matrix("t.weight", 2, 4)
    for shape in ([], [2, 2, 2]):
        source = FileSource(opened(folder, safe({"t": ("F32", shape, bytes(4 * 2 ** len(shape)))})))
        with pytest.raises(ModelFileError, match="'t' has shape"):
            source.matrix("t", 2, 4)
        with pytest.raises(ModelFileError, match="'t' has shape"):
            source.vector("t", 8)


@pytest.mark.parametrize("odd", range(8))
def test_values_at_odd_addresses_come_aligned(folder: Path, odd: int) -> None:
    """The format aligns nothing; such tensors alone are copied."""
    values = np.arange(6, dtype=np.float32)
    header = {"pad": {"dtype": "U8", "shape": [odd], "data_offsets": [0, odd]}}
    header["t"] = {"dtype": "F32", "shape": [2, 3], "data_offsets": [odd, odd + 24]}
    text = json.dumps(header).encode()
    model = opened(folder, file(text + b" " * (-len(text) % 8), bytes(odd) + values.tobytes()))
    _, data = FileSource(model).matrix("t", 2, 3)
    assert data.flags.aligned and data.ravel().tolist() == values.tolist()
    assert np.shares_memory(data, model.tensors["t"].stored) == (odd % 4 == 0)


def entry(**changes: Any) -> bytes:
    return file({"t": ONE | changes}, bytes(8))


def pair(one: tuple[int, int], other: tuple[int, int], size: int) -> bytes:
    spans = {"a": one, "b": other}
    return file(
        {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in spans.items()
        },
        bytes(size),
    )


BIG = 1 << 62
REFUSED: dict[str, tuple[bytes, str]] = {
    "length beyond the file": (file({"t": ONE}, length=1000), "header's length 1000 exceeds"),
    "length beyond everything": (file({}, b"x" * 8, length=(1 << 64) - 1), "header's length"),
    "length 0": (file(b"", b"{}", length=0), "does not begin with"),
    "length short": (file({"t": ONE}, bytes(8), length=20), "not JSON"),
    "leading space": (file(b" {}"), "does not begin with"),
    "not an object": (file(b"[1]"), "does not begin with"),
    "trailing noise": (file(b"{}x"), "not JSON"),
    "not UTF-8": (file(b'{"\xff": 1}'), "not UTF-8"),
    "tensor twice": (file(b'{"t": 1, "t": 2}'), "key 't' comes twice"),
    "field twice": (file(b'{"t": {"dtype": "F32", "dtype": "F32"}}'), "key 'dtype' comes twice"),
    "deep": (file(b'{"t": ' + b"[" * 100000 + b"]" * 100000 + b"}"), "nested deeper"),
    "metadata no object": (file({"__metadata__": [1]}), "__metadata__"),
    "metadata no text": (file({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry no object": (file({"t": 3}), "'t' does not have exactly"),
    "entry null": (file({"t": None}), "'t' does not have exactly"),
    "field missing": (file({"t": {"dtype": "F32", "shape": [2]}}), "'t' does not have exactly"),
    "unknown field": (entry(scale=1), "'t' does not have exactly"),
    "no name": (file({"": ONE}, bytes(8)), "a tensor has no name"),
    "unknown dtype": (entry(dtype="F31"), "'t' has the unknown dtype 'F31'"),
    "dtype no text": (entry(dtype=["F32"]), "'t' has the unknown dtype"),
    "dtype long": (entry(dtype="x" * 5000), "'t' has the unknown dtype 'x{40}'"),
    "shape no list": (entry(shape=2), "'t' has an impossible shape"),
    "shape negative": (entry(shape=[-2]), "'t' has an impossible shape"),
    "shape float": (entry(shape=[2.0]), "'t' has an impossible shape"),
    "shape bool": (entry(shape=[True, 2]), "'t' has an impossible shape"),
    "shape wraps": (entry(shape=[1 << 32, 1 << 32, 1 << 32]), "'t' has an impossible shape"),
    "shape wraps beside 0": (entry(shape=[0, BIG - 1, BIG - 1], data_offsets=[0, 0]), "'t' has an impossible shape"),
    "shape of nothing wraps as bytes": (
        entry(shape=[0, 1 << 61], data_offsets=[0, 0]),
        "'t' has an impossible shape",
    ),  # seed 1001817
    "rank 17": (entry(shape=[1] * 16 + [2]), "'t' has an impossible shape"),
    "rank 100000": (entry(shape=[BIG - 1] * 100000), "'t' has an impossible shape"),
    "offsets reversed": (entry(data_offsets=[8, 0]), "'t' has impossible offsets"),
    "offsets three": (entry(data_offsets=[0, 8, 8]), "'t' has impossible offsets"),
    "offsets text": (entry(data_offsets=["0", "8"]), "'t' has impossible offsets"),
    "offsets huge": (entry(data_offsets=[0, 10**30]), "'t' has impossible offsets"),
    "offsets beyond the file": (entry(shape=[4], data_offsets=[0, 16]), "'t' needs bytes to"),
    "bytes too few": (entry(shape=[3]), r"'t', F32 \[3\], does not have the 8 bytes"),
    "bytes too many": (entry(shape=[1]), "does not have the 8 bytes"),
    "half a byte": (
        file({"t": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"x"),
        "does not have the 1 bytes",
    ),
    "hole at the start": (entry(data_offsets=[4, 12]) + bytes(4), "header and tensor 't' leave a hole of 4"),
    "hole at the end": (entry() + b"x", "1 bytes after tensor 't' belong to no tensor"),
    "data without tensors": (file({}, b"x"), "1 bytes after the header belong to no tensor"),
    "overlap": (pair((0, 4), (3, 7), 7), "'a' and tensor 'b' overlap"),
    "inside": (pair((0, 8), (2, 4), 8), "'a' and tensor 'b' overlap"),
    "same place": (pair((0, 4), (0, 4), 4), "'a' and tensor 'b' overlap"),
    "hole between": (pair((0, 4), (6, 8), 8), "'a' and tensor 'b' leave a hole of 2"),
    "NaN": (entry(shape=[float("nan")]), "nan is not a finite"),
    "infinite": (file(b'{"t": 1e999}'), "1e999 is not a finite"),
    "surrogate": (file(b'{"\\ud800": 1}'), "not UTF-8 text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nonsense_is_refused_by_name_before_anything_is_made(folder: Path, case: str) -> None:
    content, said = REFUSED[case]
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match=f"(?i){said}") as caught:
            opened(folder, content)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "model.safetensors" in str(caught.value) and len(str(caught.value)) < 500


def test_a_large_file_cannot_put_itself_into_memory(folder: Path) -> None:
    """Its bytes are really there, but as a header beyond the format's bound."""
    path = folder / "large.safetensors"
    path.write_bytes(file(b"{", length=MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError, match="header's length 100000001 exceeds"):
            SafeTensorsFile.open(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
        path.unlink()


def test_every_truncation_is_refused(folder: Path) -> None:
    whole = safe({"a": ("F32", [2], bytes(8)), "b": ("U8", [1], b"x")}, {"k": "v"})
    opened(folder, whole)
    for length in range(len(whole)):
        with pytest.raises(ModelFileError):
            opened(folder, whole[:length])


WHOLE = safe({"a": ("F32", [2, 2], bytes(16)), "b": ("BF16", [3], bytes(6)), "c": ("U8", [2], b"xy")}, {"k": "v"})


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6))
@example([(len(WHOLE) - 1, 255)])
@settings(max_examples=400, deadline=None)
def test_flipped_bytes_end_in_an_error_or_in_what_the_package_reads(folder: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for at, byte in flips:
        content[at] = byte
    try:
        model = opened(folder, bytes(content))
    except ModelFileError:
        return
    theirs = {
        name: (read["dtype"], read["shape"], read["data"]) for name, read in safetensors.deserialize(bytes(content))
    }
    assert {name: (t.kind, list(t.shape), t.stored.tobytes()) for name, t in model.tensors.items()} == theirs


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_sound_file_is_read(folder: Path, wanted: dict[str, tuple[str, list[int]]]) -> None:
    whole = {name: (kind, [*shape, 8]) for name, (kind, shape) in wanted.items()}
    content = safe(
        {
            name: (kind, shape, os.urandom(int(np.prod(shape)) * DTYPES[kind] // 8))
            for name, (kind, shape) in whole.items()
        }
    )
    theirs = {name: (read["dtype"], read["shape"], read["data"]) for name, read in safetensors.deserialize(content)}
    model = opened(folder, content)
    assert {name: (t.kind, list(t.shape), t.stored.tobytes()) for name, t in model.tensors.items()} == theirs


NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PARTS = {
    NAMES[0]: safe({"a": ("F32", [1], bytes(4))}),
    NAMES[1]: safe({"b": ("F32", [1], bytes(4)), "c": ("U8", [1], b"x")}),
}
MAP = {"a": NAMES[0], "b": NAMES[1], "c": NAMES[1]}


def sharded(folder: Path, weight_map: Any, parts: dict[str, bytes] = PARTS) -> Path:
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    content = weight_map if isinstance(weight_map, bytes) else json.dumps({"weight_map": weight_map}).encode()
    (folder / "model.safetensors.index.json").write_bytes(content)
    return folder


def test_shards_are_joined(tmp_path: Path) -> None:
    model = SafeTensorsModel.open(sharded(tmp_path, MAP))
    assert list(model.tensors) == ["a", "b", "c"]
    assert [path.name for path in model.files] == ["model.safetensors.index.json", *NAMES]
    (tmp_path / "consolidated.safetensors").write_bytes(b"another form of the model, which nobody names")
    assert list(SafeTensorsModel.open(tmp_path).tensors) == ["a", "b", "c"]


OUTSIDE = [
    "../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", ".", "", "a\\x.safetensors", "a\0.safetensors", "x.bin",
    "x" * 300 + ".safetensors", 3, None, ["m"],
]  # fmt: skip
WRONG: dict[str, tuple[Any, str]] = {
    "a name that is not in its file": (MAP | {"d": NAMES[0]}, rf"'d' is not in '{NAMES[0]}'"),
    "a name that is in another file": (MAP | {"a": NAMES[1]}, rf"'a' is not in '{NAMES[1]}'"),
    "a tensor that the map leaves out": (
        {key: name for key, name in MAP.items() if key != "c"},
        rf"'c' of '{NAMES[1]}' is missing",
    ),
    "a file that is not there": (MAP | {"d": "x.safetensors"}, r"x\.safetensors: cannot be opened: No such file"),
    "no map": (b"{}", "'weight_map' is not an object"),
    "an empty map": ({}, "'weight_map' is not an object"),
    "a list": ([1], "'weight_map' is not an object"),
    "not JSON": (b"{", "not JSON"),
    "twice": (b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "'a' comes twice"),
    "too many files": ({f"t{i}": f"{i}.safetensors" for i in range(5000)}, "more than 4096 files"),
    **{f"outside {name!r:.20}": ({"a": name}, "'a' lies in .* not the name of a SafeTensors file") for name in OUTSIDE},
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_indices_are_refused_by_name(tmp_path: Path, case: str) -> None:
    where, said = WRONG[case]
    with pytest.raises(ModelFileError, match=said) as caught:
        SafeTensorsModel.open(sharded(tmp_path, where))
    assert len(str(caught.value)) < 600
    assert ".safetensors" in str(caught.value)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    twice = {NAMES[0]: PARTS[NAMES[0]], NAMES[1]: safe({"a": ("F32", [1], bytes(4)), "b": ("F32", [1], bytes(4))})}
    with pytest.raises(ModelFileError, match=rf"'a' of '{NAMES[1]}' is missing or elsewhere"):
        SafeTensorsModel.open(sharded(tmp_path, {"a": NAMES[0], "b": NAMES[1]}, twice))


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    (sharded(tmp_path, MAP) / "model.safetensors").write_bytes(PARTS[NAMES[0]])
    with pytest.raises(ModelFileError, match=r"model\.safetensors and model\.safetensors\.index\.json: two models"):
        SafeTensorsModel.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", NAMES[1]])
def test_links_that_leave_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sharded(folder, MAP)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to("../elsewhere")
    with pytest.raises(ModelFileError, match="is a link that leaves the model's folder"):
        SafeTensorsModel.open(folder)
