"""Models in several GGUF files: any part opens all of them, and nothing else passes for one."""

from __future__ import annotations

import gc
from pathlib import Path

import gguf
import numpy as np
import pytest

from power_lab.engine.weights.filenames import part_name
from power_lab.engine.weights.gguf import GgufFile
from power_lab.engine.weights.gguf_model import GgufModel
from power_lab.engine.weights.source import FileSource
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType
from tests.engine.weights.ggufs import ARRAY, F32, I32, STRING, U16, U32, Gguf, Tensor, pair, small

NAMES = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def part(
    number: int,
    *,
    count: int = 3,
    total: int = 3,
    tensors: list[Tensor] | None = None,
    extra: list[bytes] | None = None,
) -> Gguf:
    pairs = [pair("split.no", U16, number), pair("split.count", U16, count), pair("split.tensors.count", I32, total)]
    if number == 0:
        pairs += [pair("general.architecture", STRING, "llama"), pair("llama.block_count", U32, 2)]
    own = [Tensor(f"t{number}", (4,), 0, np.full(4, number, np.float32).tobytes())] if tensors is None else tensors
    return Gguf(pairs + (extra or []), own)


def written(folder: Path, *parts: Gguf | None) -> Path:
    for name, content in zip(NAMES, parts, strict=True):
        if content is not None:
            (folder / name).write_bytes(bytes(content))
    return folder / NAMES[0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return written(tmp_path, part(0), part(1), part(2))


@pytest.mark.parametrize("name", NAMES)
def test_any_part_opens_all_of_them_in_order(model: Path, name: str) -> None:
    with GgufModel.open(model.parent / name) as opened:
        assert opened.path == model and [path.name for path in opened.files] == NAMES
        assert opened.size == sum(path.stat().st_size for path in opened.files)
        assert list(opened.tensors) == ["t0", "t1", "t2"]
        assert opened.require("llama.block_count", int) == 2 and "split.no" in opened.metadata
        kind, data = FileSource(opened).vector("t2", 4)
    assert kind is QuantType.F32 and data.tolist() == [2, 2, 2, 2]  # also after closing
    assert opened.tensors == {}


def test_parts_of_ggufs_own_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = {f"blk.{i}.w": rng.standard_normal((3, 8)).astype(np.float32) for i in range(7)}
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=3, small_first_shard=True)
    writer.add_block_count(7)
    for name, values in data.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 4
    for path in paths:
        with GgufModel.open(path) as model:
            assert list(model.files) == paths and model.require("llama.block_count", int) == 7
            assert {name: tensor.stored.tobytes() for name, tensor in model.tensors.items()} == {
                name: values.tobytes() for name, values in data.items()
            }
            assert len(GgufFile.open(paths[0]).tensors) == 0  # metadata alone


def test_a_whole_model_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "whole-00002-of-00003.gguf"  # the name alone makes no part
    content = small()
    content.pairs += [pair("split.count", U16, 1), pair("split.no", U16, 0)]
    path.write_bytes(bytes(content))
    with GgufModel.open(path) as model:
        assert model.files == (path,) and len(model.tensors) == 3


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("m-00001-of-00003.gguf", ("m", 0, 3)),
        ("a-00001-of-00002-00003-of-00004.gguf", ("a-00001-of-00002", 2, 4)),
        ("m-1-of-3.gguf", None),
        ("m-00001-of-00003.gguf.part", None),
        ("-00001-of-00003.gguf", None),
        ("m-٠٠٠٠١-of-٠٠٠٠٣.gguf", None),
    ],
)
def test_part_names(name: str, found: tuple[str, int, int] | None) -> None:
    assert part_name(name) == found


WRONG: dict[str, tuple[list[Gguf | None], str]] = {
    "missing": ([part(0), None, part(2)], r"00002-of-00003\.gguf: part 2 of 3 is missing"),
    "not GGUF": ([part(0), Gguf(magic=b"PK\3\4", pairs=[pair("k", U32, 1)]), part(2)], r"00002.*first four bytes"),
    "a copy of another part": ([part(0), part(2), part(2)], r"00002.*says part 3 of 3.*but part 2 of 3 belongs"),
    "of another count": ([part(0), part(1, count=4), part(2)], r"00002.*says part 2 of 4"),
    "a whole model": ([part(0), small(), part(2)], r"00002.*is a whole model"),
    "first part under another's name": ([part(1), part(1), part(2)], r"00001.*is part 2 of 3.*not named so"),
    "another architecture": (
        [part(0), part(1, extra=[pair("general.architecture", STRING, "gemma")]), part(2)],
        r"00002.*'general.architecture' differs.*another model",
    ),
    "a key of its own": ([part(0), part(1, extra=[pair("x", U32, 1)]), part(2)], r"00002.*key 'x' differs"),
    "another total": ([part(0), part(1, total=4), part(2)], r"00002.*'split.tensors.count' differs"),
    "fewer tensors": ([part(0), part(1, tensors=[]), part(2)], r"00001.*'split.tensors.count' is 3.*hold 2"),
    "a tensor twice": (
        [part(0), part(1), part(2, tensors=[Tensor("t1", (4,), 0, bytes(16))])],
        r"00003.*'t1' is in an earlier",
    ),
    "no total": (
        [Gguf([pair("split.no", U16, 0), pair("split.count", U16, 3)]), part(1), part(2)],
        "split.tensors.count",
    ),
    "number beyond the count": ([part(3), part(1), part(2)], r"'split.no' is int 3, outside 0..2"),
    "no parts": ([part(0, count=0), part(1), part(2)], r"'split.count' is int 0"),
    "too many parts": ([part(0, count=5000), part(1), part(2)], r"'split.count' is int 5000, outside 1..4096"),
    "count of another type": (
        [Gguf([pair("split.count", STRING, "3")]), part(1), part(2)],
        r"'split.count' is str '3'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_part_of_the_model_is_refused_by_name(tmp_path: Path, case: str) -> None:
    parts, said = WRONG[case]
    path = written(tmp_path, *parts)
    with pytest.raises(ModelFileError, match=said):
        GgufModel.open(path)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_parts_must_keep_their_names(model: Path) -> None:
    for name in ("m.gguf", "m-00002-of-00003.gguf", "m-00001-of-00002.gguf"):
        (model.parent / name).write_bytes(bytes(part(0)))
        with pytest.raises(ModelFileError, match=r"is part 1 of 3.*not named so.*NAME-00001-of-00003\.gguf"):
            GgufModel.open(model.parent / name)


def test_parts_are_found_beside_a_link_but_not_through_one(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "x.gguf"
    (model.parent / NAMES[1]).rename(elsewhere)
    (model.parent / NAMES[1]).symlink_to(elsewhere)
    with pytest.raises(ModelFileError, match=r"00002-of-00003\.gguf: is a link that leaves"):
        GgufModel.open(model)
    with pytest.raises(ModelFileError, match="not named so"):
        GgufModel.open(elsewhere)


def test_metadata_of_equal_arrays_may_be_repeated(tmp_path: Path) -> None:
    same = [pair("a", ARRAY, (F32, [1.0, float("nan")])), pair("n", F32, float("nan"))]
    other = [pair("a", ARRAY, (F32, [1.0, 2.0]))]
    GgufModel.open(written(tmp_path, part(0, extra=same), part(1, extra=same), part(2)))
    with pytest.raises(ModelFileError, match="'a' differs"):
        GgufModel.open(written(tmp_path, part(0, extra=same), part(1, extra=other), part(2)))
