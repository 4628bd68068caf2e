"""Drafter files: read, bound to their target or refused with a reason, found by path or by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.config import EngineConfig, Paths, names_model
from power_lab.engine.engine import Engine
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural import Trained, choice, shipped
from power_lab.engine.speculation.drafters.neural.artifact import Artifact
from power_lab.errors import ConfigError
from power_lab.hashes import Hashes
from power_lab.kernels.ops import Ops
from tests import drafters, tiny, tiny_gguf
from tests.engine.test_exactness import prompt_of

TARGET = tiny.Shape()
CONFIG = drafters.BLOCK | {"markov_rank": 8}
BOTH = ["dspark", "dflash"]


def bound(path: Path, ops: Ops, header: dict[str, Any], tensors: drafters.Tensors) -> Trained:
    drafters.write(path, header, tensors, {})
    return drafters.trained(tiny.loaded(TARGET, ops), TARGET, path)


def test_a_sound_artifact_says_what_it_is(tmp_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    tensors = drafters.dflash(TARGET, CONFIG, said=60)
    trained = bound(tmp_path / "a.safetensors", numba_ops(2), drafters.header(TARGET, "dflash", BOTH, CONFIG), tensors)
    assert (trained.name, trained.kind, trained.serves) == ("dflash", "dflash", ("dspark", "dflash"))
    head = 60 * TARGET.width * 4
    assert trained.nbytes == sum(value.nbytes for name, value in tensors.items() if name != "draft_ids") + head
    assert trained.sha256 == Hashes(tmp_path).of(tmp_path / "a.safetensors", lambda _: None)


REFUSED: dict[str, tuple[Callable[[dict[str, Any], drafters.Tensors], Any], str]] = {
    "schema": (lambda h, t: h.update(schema="v0"), "has the schema 'v0'"),
    "kind": (lambda h, t: h.update(kind="medusa"), "unknown kind 'medusa'"),
    "header": (lambda h, t: h.update(more=1), "unknown field `more`"),
    "sha256": (lambda h, t: h["target"].update(sha256="other"), "was made for the model other"),
    "vocab": (lambda h, t: h["target"].update(vocab=9), "vocab 9; this one has 258"),
    "width": (lambda h, t: h["target"].update(width=32), "width 32; this one has 64"),
    "layers": (lambda h, t: h["target"].update(layers=1), "layers 1; this one has 2"),
    "config": (lambda h, t: h["config"].update(depth=1), "unknown field `depth`"),
    "no block": (lambda h, t: h["config"].pop("block_size"), "missing required field `block_size`"),
    "huge block": (lambda h, t: h["config"].update(block_size=65), "block_size"),
    "type": (lambda h, t: h["config"].update(layers="2"), "config.*layers"),
    "heads": (lambda h, t: h["config"].update(heads=3), "3 heads are no multiple of 2"),
    "taps": (lambda h, t: h["config"].update(taps=[2, 1]), "taps .2, 1. are not ascending"),
    "far tap": (lambda h, t: h["config"].update(taps=[0, 1, 3]), "up to 2"),
    "mask": (lambda h, t: h["config"].update(mask_token=258), "mask_token 258 is no token"),
    "window": (lambda h, t: h["config"].update(window=4, causal=False), "a window needs causal blocks"),
    "serves": (lambda h, t: h.update(serves=["dflash"]), "'serves' .* markov_rank"),
    "name": (lambda h, t: h.update(serves=["dspark", "mtp"]), "'serves'"),
    "missing": (lambda h, t: t.pop("layers.1.down.weight"), "'layers.1.down.weight' is missing"),
    "shape": (lambda h, t: t.update({"norm.weight": t["norm.weight"][1:]}), r"'norm.weight' is F32 \[63\]; F32 \[64\]"),
    "unknown": (lambda h, t: t.update({"extra.weight": t["norm.weight"]}), "does not know: 'extra.weight'"),
    "ids": (lambda h, t: t.update(draft_ids=np.array([3, 3], np.int32)), "not ascending token ids"),
    "far ids": (lambda h, t: t.update(draft_ids=np.array([3, 258], np.int32)), "not ascending token ids"),
    "few ids": (lambda h, t: t.update(draft_ids=np.array([3, 8], np.int32)), r"'markov_w2.weight' is F32 \[258, 8\]"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_wrong_is_named(tmp_path: Path, numba_ops: Callable[[int], Ops], fault: str) -> None:
    change, words = REFUSED[fault]
    header, tensors = drafters.header(TARGET, "dflash", BOTH, CONFIG), drafters.dflash(TARGET, CONFIG)
    change(header, tensors)
    with pytest.raises(ConfigError, match=words) as refused:
        bound(tmp_path / "a.safetensors", numba_ops(2), header, tensors)
    assert refused.value.key == "draft" and "a.safetensors" in str(refused.value) and refused.value.remedy


def test_block_types_are_checked(tmp_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    header, tensors = drafters.header(TARGET, "dflash", BOTH, CONFIG), drafters.dflash(TARGET, CONFIG)
    path = tmp_path / "a.safetensors"
    for types, words in (
        ({"nothing.weight": "Q8_0"}, "'types' names tensors that it does not hold: 'nothing.weight'"),
        ({"norm.weight": "Q9"}, "'norm.weight' is Q9; a vector is F32"),
        ({"fc.weight": "F32"}, "unknown block type 'F32'"),
        ({"fc.weight": "Q4_0"}, "'fc.weight' is F32"),
    ):
        drafters.write(path, header, tensors, {})
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + length])
        entries["__metadata__"]["power_lab"] = json.dumps(header | {"types": types})
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        with pytest.raises(ConfigError, match=words):
            drafters.trained(tiny.loaded(TARGET, numba_ops(2)), TARGET, path)


@given(data=st.data())
def test_no_damaged_header_does_anything_but_be_refused(tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("hostile") / "a.safetensors"
    drafters.write(path, drafters.header(TARGET, "dflash", BOTH, CONFIG), {"norm.weight": np.ones(64, np.float32)}, {})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 300))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        Artifact.open(path).__exit__(None, None, None)
    except ConfigError as error:
        assert error.key == "draft"


def test_files_that_are_no_drafters(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    text = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    for file, words in ((path, "is no drafter"), (tmp_path / "b.safetensors", "cannot be opened")):
        with pytest.raises(ConfigError, match=words) as refused:
            Artifact.open(file)
        assert refused.value.key == "draft"


# --- what `draft` and `speculate` mean -------------------------------------------------------------------------------------------


def test_which_settings_name_models() -> None:
    assert [names_model(draft) for draft in ("", "auto", "dflash", "mtp", "x.safetensors")] == [False] * 5
    assert all(names_model(draft) for draft in ("smollm2", "small.gguf", "/models/folder"))


def test_shipped_drafters_are_found_by_the_models_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "shipped", _Rooted(tmp_path))
    sha = "0123456789abcdef"
    assert choice.artifact_of("auto", "m", sha) == (None, "none comes with this model")
    assert choice.artifact_of("", "m", sha) == (None, "none is asked for")
    with pytest.raises(ConfigError, match=r"draft: no drafter 'mtp' comes with m. Give the path"):
        choice.artifact_of("mtp", "m", sha)
    folder = tmp_path / sha[:12]
    folder.mkdir()
    for name in ("dflash", "mtp"):
        (folder / f"{name}.safetensors").write_bytes(b"")
    assert choice.artifact_of("auto", "m", sha)[0] is None, "none of them is the default"
    (folder / "default").write_text("mtp\n")
    assert choice.artifact_of("auto", "m", sha)[0] == folder / "mtp.safetensors"
    assert choice.artifact_of("dflash", "m", sha)[0] == folder / "dflash.safetensors"
    with pytest.raises(ConfigError, match="Use one of dflash, mtp"):
        choice.artifact_of("dflash2", "m", sha)
    assert 'lab.load("m", draft="dflash")' in choice.remedy("dspark", "m", sha)
    assert 'lab.load("m", draft="<path' in choice.remedy("dflash2", "m", sha)


class _Rooted:
    """`shipped`, in another folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getattr__(self, name: str) -> Any:
        return lambda *args: getattr(shipped, name)(*args, self._root)


def test_auto_takes_what_the_engine_has_and_the_record_says_what(numba_ops: Callable[[int], Ops]) -> None:
    auto = SamplingParams(max_tokens=6, speculate="auto", ignore_eos=True, controller="fixed")
    for loaded, name in (
        (tiny.loaded(TARGET, numba_ops(2)), "ngram"),
        (drafters.block_drafter(TARGET, numba_ops(2)), "hybrid"),
        (drafters.block_drafter(TARGET, numba_ops(2), said=120, **drafters.FILTERS), "dflash2"),  # its walk is on the host
    ):
        lab = drafters.engine(loaded)
        record = lab.submit([1, 2, 3], auto).result()
        assert record.params["speculate"] == name
        (said,) = (decision for decision in lab.explain() if decision.key == "speculation")
        assert f"auto is {name}" in said.reason and name in said.value
        assert ("no trained drafter" in said.reason) == (name == "ngram")


def test_a_drafter_that_is_not_there_is_refused_at_submit(numba_ops: Callable[[int], Ops]) -> None:
    lab = drafters.engine(drafters.block_drafter(TARGET, numba_ops(2)))
    for name in ("mtp", "eagle", "dflash2", "dspark"):
        with pytest.raises(
            ConfigError, match=rf"speculate: '{name}' needs .* one that serves hybrid, dflash.* draft="
        ) as refused:
            lab.submit([1, 2], SamplingParams(speculate=name))  # type: ignore[arg-type]
        assert refused.value.key == "speculate"
    assert lab.status().requests == 0
    with pytest.raises(ConfigError, match=r"'dflash' needs .* this engine has none"):
        tiny.engine(TARGET, numba_ops(2)).submit([1, 2], SamplingParams(speculate="dflash"))


def test_memory_counts_the_drafter(numba_ops: Callable[[int], Ops]) -> None:
    bare = tiny.engine(TARGET, numba_ops(2)).memory()
    lab = drafters.engine(drafters.block_drafter(TARGET, numba_ops(2), said=60))
    assert lab._companion is not None and lab._loaded.trained is not None
    beside = lab.memory()
    assert beside.weights == bare.weights + lab._loaded.trained.nbytes
    assert beside.page_bytes == bare.page_bytes + lab._companion.page_bytes
    assert beside.workspace > bare.workspace + lab._companion.scratch_bytes and "the drafter's" in beside.reason


# --- from files ------------------------------------------------------------------------------------------------------------------


def test_files_end_to_end(tmp_path: Path) -> None:
    paths = Paths(Paths.default().cache, tmp_path / "run", tmp_path / "state")
    shape = tiny.Shape(kind="llama file", seed=2)
    model, draft = tmp_path / "big.gguf", tmp_path / "big-dflash.safetensors"
    tokens = [*tiny.byte_tokens()[:255], "!!"]
    tiny_gguf.write(model, shape, tokens=tokens)
    header = drafters.header(shape, "dflash", BOTH, CONFIG)
    header["target"]["sha256"] = Hashes(tmp_path).of(model, lambda _: None)
    drafters.write(draft, header, drafters.dflash(shape, CONFIG, said=70), {"fc.weight": "Q8_0"})
    asked = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.7, "seed": 1}
    config = EngineConfig(model=str(model), draft=str(draft), device="cpu", kv_tokens=1024)
    lab = Engine(config, paths=paths, threaded=False)
    try:
        off = lab.generate(prompt_of(2, 70), SamplingParams(**asked))
        on = lab.generate(prompt_of(2, 70), SamplingParams(**asked, speculate="auto", width=4, controller="fixed"))
        assert on.tokens == off.tokens and sum(len(r.drafted) for r in on.rounds) > 20
        assert on.params["speculate"] == "hybrid"
        (said,) = (decision for decision in lab.explain() if decision.key == "draft")
        assert said.value == "dflash" and "it serves dspark, dflash" in said.reason
    finally:
        lab.close()
    other = tmp_path / "other.gguf"
    tiny_gguf.write(other, tiny.Shape(kind="llama file", seed=3), tokens=tokens)
    for target, name, words in (
        (other, str(draft), "draft: .*was made for the model"),
        (model, str(tmp_path / "missing.safetensors"), "draft: .*cannot be opened"),
        (model, "mtp", "draft: no drafter 'mtp' comes with big"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(EngineConfig(model=str(target), draft=name, device="cpu"), paths=paths, threaded=False)


def test_a_drafters_file_is_found_in_the_clients_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from power_lab.engine.host.client import _located

    monkeypatch.chdir(tmp_path)
    assert _located(EngineConfig(draft="a.safetensors")).draft == str(tmp_path / "a.safetensors")
    assert _located(EngineConfig(draft="dflash")).draft == "dflash"
