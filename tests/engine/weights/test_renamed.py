"""Canonical names over a checkpoint's own: nothing is lost, nothing passes for something else, a tied head is settled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from power_lab.engine.weights.renamed import HARMLESS_LEFTOVERS, RenamedSource
from power_lab.engine.weights.safetensors import SafeTensorsFile
from power_lab.engine.weights.source import FileSource, refuse_unused
from power_lab.errors import ModelFileError
from power_lab.kernels.quants import QuantType
from tests.fuzz.originals import safe

EMBEDDING = ("F32", [3, 2], np.arange(6, dtype=np.float32).tobytes())
OTHER = ("F32", [3, 2], np.arange(1, 7, dtype=np.float32).tobytes())
NORM = ("F32", [2], bytes(8))
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_q.bias": "model.layers.0.self_attn.q_proj.bias",
}
STORED = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM}


def source(folder: Path, tensors: dict) -> FileSource:
    path = folder / "model.safetensors"
    path.write_bytes(safe(tensors))
    return FileSource(SafeTensorsFile.open(path))


def test_tensors_come_under_canonical_names(tmp_path: Path) -> None:
    renamed = RenamedSource(source(tmp_path, STORED | {"lm_head.weight": OTHER}), NAMES, tied=False)
    assert renamed.names() == ["token_embd.weight", "output_norm.weight", "output.weight"]
    kind, data = renamed.matrix("token_embd.weight", 3, 2)
    assert kind is QuantType.F32 and data.ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert renamed.matrix("output.weight", 3, 2)[1].ravel().tolist() == [1, 2, 3, 4, 5, 6]
    assert renamed.vector("output_norm.weight", 2)[1].tolist() == [0, 0]
    refuse_unused(renamed, renamed.names())


def test_errors_use_the_stored_names(tmp_path: Path) -> None:
    renamed = RenamedSource(source(tmp_path, STORED | {"extra.weight": NORM}), NAMES, tied=True)
    assert renamed.names() == ["token_embd.weight", "output_norm.weight", "extra.weight"]
    for ask, said in [
        (lambda: refuse_unused(renamed, ["token_embd.weight", "output_norm.weight"]), r"does not use.*'extra\.weight'"),
        (lambda: renamed.vector("blk.0.attn_q.bias", 2), r"'model\.layers\.0\.self_attn\.q_proj\.bias' is missing"),
        (lambda: renamed.matrix("token_embd.weight", 2, 3), r"'model\.embed_tokens\.weight' has shape \[3, 2\]"),
        (lambda: renamed.matrix("blk.9.ffn_up.weight", 2, 3), r"'blk\.9\.ffn_up\.weight' is missing"),
        (lambda: renamed.vector("extra.weight", 2), r"'extra\.weight' is missing: this architecture"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            ask()


def test_harmless_leftovers_are_ignored_by_an_explicit_list_alone(tmp_path: Path) -> None:
    stored = source(tmp_path, STORED | {"model.layers.0.self_attn.rotary_emb.inv_freq": NORM, "inv_freq": NORM})
    used = ["token_embd.weight", "output_norm.weight"]
    with pytest.raises(ModelFileError, match=r"'model\.layers\.0\.self_attn\.rotary_emb\.inv_freq', 'inv_freq'"):
        refuse_unused(RenamedSource(stored, NAMES, tied=True), used)
    with pytest.raises(ModelFileError, match=r"file: 'inv_freq'\."):
        refuse_unused(RenamedSource(stored, NAMES, tied=True, ignored=HARMLESS_LEFTOVERS), used)
    refuse_unused(RenamedSource(stored, NAMES, tied=True, ignored=(*HARMLESS_LEFTOVERS, "inv_freq")), used)


def test_a_stored_name_cannot_pass_for_a_canonical_one(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"does not use.*'output_norm\.weight'"):
        RenamedSource(source(tmp_path, STORED | {"output_norm.weight": NORM}), NAMES, tied=True)


def test_a_map_that_loses_tensors_is_a_mistake_of_the_code(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="same stored tensor"):
        RenamedSource(source(tmp_path, STORED), NAMES | {"output.weight": "model.norm.weight"}, tied=True)


@pytest.mark.parametrize("head", [None, EMBEDDING, OTHER, ("F16", [3, 2], bytes(12)), ("F32", [2, 3], EMBEDDING[2])])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_beside_a_tied_embedding(tmp_path: Path, head: tuple | None, tied: bool) -> None:
    stored = source(tmp_path, STORED if head is None else STORED | {"lm_head.weight": head})
    if tied and head in (None, EMBEDDING):
        renamed = RenamedSource(stored, NAMES, tied=tied)
        assert renamed.names() == ["token_embd.weight", "output_norm.weight"]  # so the embedding serves, once in memory
    elif not tied and head is not None:
        assert "output.weight" in RenamedSource(stored, NAMES, tied=tied).names()
    else:
        said = "differs from 'model.embed_tokens.weight'" if tied else "is missing, and the config does not say"
        with pytest.raises(ModelFileError, match=f"'lm_head.weight' {said}"):
            RenamedSource(stored, NAMES, tied=tied)


def test_large_heads_are_compared_to_their_last_byte(tmp_path: Path) -> None:
    rows = 3 << 15
    data = np.zeros((rows, 64), np.float32)
    whole = {"model.embed_tokens.weight": ("F32", [rows, 64], data.tobytes()), "model.norm.weight": NORM}
    data[-1, -1] = 1
    stored = source(tmp_path, whole | {"lm_head.weight": ("F32", [rows, 64], data.tobytes())})
    with pytest.raises(ModelFileError, match="differs"):
        RenamedSource(stored, NAMES, tied=True)
