"""Checkpoints that have layers for multi-token prediction of their own: they draft as published, and the target stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine import loader
from power_lab.engine.config import EngineConfig, Paths
from power_lab.engine.models.describe import describe
from power_lab.engine.rehearsal import read
from power_lab.engine.request import SamplingParams
from power_lab.engine.speculation.drafters.neural import choice, native, shipped
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.errors import ConfigError, ModelFileError
from power_lab.kernels.ops import Ops
from tests import drafters, tiny
from tests import native as checkpoints
from tests.engine.speculation.plain import check
from tests.engine.test_exactness import Recorder, prompt_of
from tests.native import FORMS, Form, Published

pytestmark = pytest.mark.usefixtures("one_thread")

OTHER = np.float32(0.5) * np.random.default_rng(3).standard_normal((258, 64)).astype("f4")


def shape_of(form: Form, **sizes: Any) -> tiny.Shape:
    return tiny.Shape(kind=form.kind, **sizes)


def params(**options: Any) -> SamplingParams:
    given = {"max_tokens": 14, "width": 5, "controller": "fixed", "ignore_eos": True, "seed": 3, "speculate": "mtp"}
    return SamplingParams(**{**given, **options})


def plainly(shape: tiny.Shape, ops: Ops, prompt: list[int], count: int, **sampling: Any) -> tuple[int, ...]:
    """What the model says without any of this."""
    alone = SamplingParams(max_tokens=count, ignore_eos=True, seed=3, **sampling)
    return tiny.engine(shape, ops).submit(prompt, alone).result().tokens


# --- what they draft --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8}], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_they_draft_as_published_and_change_no_token(
    name: str, sampling: dict[str, Any], numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    form, ops = FORMS[name], numba_ops(2)
    shape = shape_of(form)
    made = checkpoints.tensors(shape)
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, form, shape, made), shape, ops)
    assert loaded.trained is not None and "is the NextN layer in the model's own files" in loaded.reasons["draft"]
    lab, prompt = drafters.engine(loaded), prompt_of(1, 56)
    record = lab.submit(prompt, asked := params(**sampling)).result()
    assert check(record, Published(form, shape, made), asked) >= (3 if sampling else 8)
    assert record.tokens == plainly(shape, ops, prompt, 14, **sampling)
    lab.check()


@torch.no_grad()
def test_transformers_reads_the_same_from_a_folder(tmp_path: Path) -> None:
    """Names, order and norms, by the model that transformers makes of a folder's layers; it leaves out row 0."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    form, shape = FORMS["folder"], tiny.Shape(kind="qwen3")
    made = checkpoints.tensors(shape)
    said = {"num_nextn_predict_layers": None, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    checkpoints.write(tmp_path, form, shape, made, **said)
    with open_checkpoint(tmp_path) as checkpoint:
        nextn = describe(checkpoint, 258).nextn
        assert nextn is not None and not nextn.fault
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]
    theirs, tokens = MtpModel.from_pretrained(model).eval(), prompt_of(6, 20)
    before = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
    before = torch.cat([torch.zeros_like(before[:, :1]), before], 1)
    at, cache = torch.arange(len(tokens))[None], MtpCache(config=theirs.config)
    state = theirs.forward_layer(0, before, at, cache, input_ids=torch.tensor([tokens]))
    want = theirs._project_to_logits(state[0, -1]).double()
    got = Published(form, shape, made).draft(tokens, 1, params()).logits[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("change", ["hidden_first", "normed_hidden", "normed_chain"])
def test_the_descriptions_tell_each_others_forms_apart(
    change: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    """An order or a norm that is another family's is no draft of this one."""
    form = FORMS["mimo"]
    shape = shape_of(form)
    made = checkpoints.tensors(shape)
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, form, shape, made), shape, numba_ops(2))
    record = drafters.engine(loaded).submit(prompt_of(1, 56), asked := params()).result()
    other = replace(form, **{change: not getattr(form, change)})
    with pytest.raises(AssertionError, match="round at"):
        check(record, Published(other, shape, made), asked)


@pytest.mark.parametrize("name", ["folder", "gguf qwen2"])
def test_several_layers_draft_one_token_each(name: str, numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    form = FORMS[name]
    shape = shape_of(form)
    made = checkpoints.tensors(shape, 3)
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, form, shape, made, 3), shape, numba_ops(2))
    assert "are the 3 NextN layers" in loaded.reasons["draft"]
    record = drafters.engine(loaded).submit(prompt := prompt_of(2, 30), asked := params()).result()
    assert check(record, Published(form, shape, made, 3), asked) >= 6
    assert record.tokens == plainly(shape, numba_ops(2), prompt, 14)


@settings(max_examples=12)
@given(st.data())
def test_tiny_shapes_of_every_form(numba_ops: Callable[[int], Ops], data: st.DataObject) -> None:
    form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    kv_heads, group, head_dim = (data.draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 2, 4), (8, 16)))
    layers, count = (
        (2, data.draw(st.sampled_from((2, 4)))) if "gemma" in form.kind else (1, data.draw(st.integers(1, 3)))
    )
    shape = shape_of(
        form,
        layers=layers,
        width=data.draw(st.sampled_from((32, 64))),
        ffn=data.draw(st.sampled_from((32, 80))),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=16 if "gemma" in form.kind else head_dim,
        seed=data.draw(st.integers(0, 99)),
    )
    made = checkpoints.tensors(shape, count, data.draw(st.integers(0, 99)))
    prompt = prompt_of(data.draw(st.integers(0, 99)), data.draw(st.sampled_from((1, 2, 20, 63, 65))))
    asked = params(width=data.draw(st.integers(1, 7)), max_tokens=8)
    with TemporaryDirectory() as folder:
        path = checkpoints.write(Path(folder), form, shape, made, count)
        lab = drafters.engine(checkpoints.loaded(path, shape, numba_ops(2)))
        record = lab.submit(prompt, asked).result()
    check(record, Published(form, shape, made, count), asked)
    assert record.tokens == plainly(shape, numba_ops(2), prompt, 8)


@pytest.mark.parametrize("part", ["embed_tokens", "shared_head_head"])
@pytest.mark.parametrize("name", ["folder", "gguf llama"])
def test_tables_of_their_own_are_used_and_copies_of_the_models_are_not_kept(
    name: str, part: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    form, ops = FORMS[name], numba_ops(2)
    shape = shape_of(form)
    made, nbytes = checkpoints.tensors(shape), {}
    tables = {"none": {}, "copy": tiny.tensors(shape)["token_embd.weight"].copy(), "own": OTHER}
    for said, table in tables.items():
        more = {} if said == "none" else {f"blk.{shape.layers}.nextn.{part}.weight": table}
        (folder := tmp_path / said).mkdir()
        loaded = checkpoints.loaded(checkpoints.write(folder, form, shape, made | more), shape, ops)
        assert loaded.trained is not None
        nbytes[said] = loaded.trained.nbytes
        record = drafters.engine(loaded).submit(prompt_of(4, 40), asked := params()).result()
        assert check(record, Published(form, shape, made | more), asked) >= 4
    assert nbytes["none"] == nbytes["copy"] == nbytes["own"] - OTHER.nbytes


def test_a_file_without_a_norm_of_theirs_means_the_models(numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    form = FORMS["gguf qwen3"]
    shape = shape_of(form)
    made = {name: value for name, value in checkpoints.tensors(shape).items() if "shared_head_norm" not in name}
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, form, shape, made), shape, numba_ops(2))
    record = drafters.engine(loaded).submit(prompt_of(4, 40), asked := params()).result()
    assert check(record, Published(form, shape, made), asked) >= 8


def test_quantised_layers_draft_as_their_values_do(numba_ops: Callable[[int], Ops], tmp_path: Path) -> None:
    from power_lab.engine.weights.quantise import quantise
    from power_lab.kernels.quants import QuantType

    form = FORMS["gguf qwen2"]
    shape = tiny.Shape.wide("Q4_1", kind=form.kind)
    made = dict(checkpoints.tensors(shape))
    name = f"blk.{shape.layers}.nextn.eh_proj.weight"
    made[name] = QuantType.Q8_0, quantise(made[name], QuantType.Q8_0)
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, form, shape, made), shape, numba_ops(2))
    record = drafters.engine(loaded).submit(prompt_of(4, 40), asked := params()).result()
    assert check(record, Published(form, shape, made), asked) >= 6


# --- what they leave as it is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mimo", "gguf gemma2"])
def test_the_targets_logits_have_the_same_bits_with_and_without(
    name: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    form, ops = FORMS[name], numba_ops(2)
    shape, prompt = shape_of(form), prompt_of(11, 150)
    alone, beside = Recorder(), Recorder()
    for folder in ("without", "with"):
        (tmp_path / folder).mkdir()
    bare = checkpoints.loaded(checkpoints.write(tmp_path / "without", form, shape, tiny.tensors(shape), 0), shape, ops)
    want = drafters.engine(bare, observer=alone).submit(prompt, params(speculate="off")).result().tokens
    path = checkpoints.write(tmp_path / "with", form, shape, checkpoints.tensors(shape))
    loaded = checkpoints.loaded(path, shape, ops)
    lab, known = drafters.engine(loaded, step_tokens=40, observer=beside), [*prompt, *want]
    bits = alone.of(0, known)
    for request in range(2):  # cold, and with the prompt's pages cached
        assert lab.submit(prompt, params()).result().tokens == want
        found = beside.of(request, known)
        assert len(found) >= 10 and found == {at: bits[at] for at in found}


# --- files that are not sound -----------------------------------------------------------------------------------------------------


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.pop(name)


def _with(name: str, *size: int) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.update({name: np.zeros(size, np.float32)})


@pytest.mark.parametrize("form", ["gguf qwen2", "folder"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without("blk.2.nextn.eh_proj.weight"), "eh_proj.weight' is missing"),
        (_without("blk.2.attn_q.weight"), "q.*weight' is missing"),
        (_with("blk.2.nextn.eh_proj.weight", 64, 64), r"eh_proj.weight' has shape \[64, 64\], but \[64, 128\]"),
        (_with("blk.2.nextn.hnorm.weight", 63), r"hnorm.weight' has shape \[63\]"),
        (_with("blk.2.nextn.embed_tokens.weight", 8, 64), r"embed_tokens.weight' has shape \[8, 64\]"),
        (_with("blk.2.nextn.hyper.weight", 4), "of an unknown kind: '.*hyper.weight'"),
        (_with("blk.2.nextn.ffn_gate_exps.weight", 4, 4), "mixtures of experts: '.*ffn_gate_exps.weight'"),
    ],
)
def test_a_model_runs_without_layers_that_cannot_draft_and_says_why(
    form: str, change: Callable[[dict[str, Any]], None], told: str, numba_ops: Callable[[int], Ops], tmp_path: Path
) -> None:
    made = dict(checkpoints.tensors(shape := shape_of(FORMS[form])))
    change(made)
    loaded = checkpoints.loaded(checkpoints.write(tmp_path, FORMS[form], shape, made), shape, numba_ops(2))
    assert loaded.trained is None
    lab, prompt = drafters.engine(loaded), prompt_of(5, 30)
    with pytest.raises(
        ConfigError, match=f"this engine has none: the NextN layer .* cannot draft: .*{told}"
    ) as refused:
        lab.submit(prompt, params()).result()
    assert refused.value.key == "speculate"
    assert lab.submit(prompt, params(speculate="auto")).result().tokens == plainly(shape, numba_ops(2), prompt, 14)


@pytest.mark.parametrize(
    ("kind", "config", "told"),
    [
        ("gemma2", {}, "'mtp_layer_types' does not say which"),
        ("gemma2", {"mtp_layer_types": ["linear_attention"]}, "of the type 'linear_attention'"),
        ("qwen3", {"mtp_layer_types": ["sliding_attention"]}, "of the type 'sliding_attention'"),
        ("olmo2", {}, "no norms before their parts"),
        ("ministral 3", {}, "attention has a temperature"),
    ],
)
def test_layers_of_other_kinds_are_named(kind: str, config: dict[str, Any], told: str, tmp_path: Path) -> None:
    shape = tiny.Shape(kind=kind)
    checkpoints.write(tmp_path, Form(kind), shape, checkpoints.tensors(shape), **config)
    with open_checkpoint(tmp_path) as checkpoint:
        nextn = describe(checkpoint, 258).nextn
    assert nextn is not None and told in nextn.fault


def test_a_stated_type_says_which_layer_they_are_like(tmp_path: Path) -> None:
    shape = tiny.Shape(kind="qwen2 windows")
    for kind, window in (("full_attention", 0), ("sliding_attention", 50)):
        checkpoints.write(tmp_path, Form("qwen2 windows"), shape, checkpoints.tensors(shape), mtp_layer_types=[kind])
        with open_checkpoint(tmp_path) as checkpoint:
            nextn = describe(checkpoint, 258).nextn
        assert nextn is not None and not nextn.fault
        assert [layer.attention.window for layer in nextn.layers] == [window]


@pytest.mark.parametrize("count", [-1, 17, 10**12, "1", 1.5])
def test_an_absurd_count_of_a_folder_is_refused(count: object, tmp_path: Path) -> None:
    shape = tiny.Shape(kind="qwen3")
    checkpoints.write(tmp_path, FORMS["folder"], shape, checkpoints.tensors(shape), num_nextn_predict_layers=count)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ModelFileError, match="num_nextn_predict_layers"):
        describe(checkpoint, 258)


@pytest.mark.parametrize("count", [3, 4, 2**31])
def test_a_count_that_leaves_a_file_no_layer_is_refused(count: int, tmp_path: Path) -> None:
    from tests import tiny_gguf

    tiny_gguf.write(tmp_path / "model.gguf", tiny.Shape(kind="qwen2 file", layers=3), plain=True, nextn=count)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(ModelFileError, match=r"qwen2\.nextn_predict_layers"):
        describe(checkpoint, 258)


def test_more_tensors_than_are_stated_are_refused(tmp_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    shape = tiny.Shape(kind="qwen3")
    checkpoints.write(tmp_path, FORMS["folder"], shape, checkpoints.tensors(shape, 2), 2, num_nextn_predict_layers=1)
    with pytest.raises(ModelFileError, match=r"model\.layers\.3"):
        checkpoints.loaded(tmp_path, shape, numba_ops(2))


def test_stated_layers_of_which_there_is_nothing_are_told(tmp_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    shape = tiny.Shape(kind="qwen3")
    checkpoints.write(tmp_path, FORMS["folder"], shape, tiny.tensors(shape), 1)
    loaded = checkpoints.loaded(tmp_path, shape, numba_ops(2))
    assert loaded.trained is None and "1 are stated, but no tensor of theirs is there" in loaded.reasons["draft"]


# --- how the loader chooses -------------------------------------------------------------------------------------------------------


def load(path: Path, **config: Any) -> loader.Loaded:
    settings = EngineConfig(model=str(path), device="cpu", threads=2, context=256, kv_tokens=512, **config)
    return loader.load(settings, Paths.default(), lambda *_: None)


def test_auto_takes_them_and_a_user_may_leave_them_out(tmp_path: Path) -> None:
    shape = tiny.Shape(kind="qwen2 file")
    path = checkpoints.write(tmp_path, FORMS["gguf qwen2"], shape, checkpoints.tensors(shape))
    for draft in ("auto", "mtp"):
        loaded = load(path, draft=draft)
        assert loaded.trained is not None and loaded.native
        assert (loaded.facts.draft.kind, loaded.facts.draft.sha256) == ("mtp", loaded.facts.sha256)
        assert loaded.reasons["draft"].endswith("is the NextN layer in the model's own files; it serves mtp")
    without = load(path, draft="")
    assert without.trained is None and without.native
    assert without.facts.parameters == loaded.facts.parameters
    with pytest.raises(ConfigError, match="none: none is asked for") as refused:
        drafters.engine(without, kv_tokens=512, context=256).submit([1, 2], params()).result()
    assert 'draft="mtp"' in str(refused.value.remedy)
    with pytest.raises(ConfigError, match="no drafter 'dflash' comes with"):
        load(path, draft="dflash")


def test_those_that_cannot_draft_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    shape = tiny.Shape(kind="qwen2 file")
    made = dict(checkpoints.tensors(shape))
    del made["blk.2.ffn_up.weight"]
    path = checkpoints.write(tmp_path, FORMS["gguf qwen2"], shape, made)
    with pytest.raises(ConfigError, match=r"ffn_up\.weight' is missing") as refused:
        load(path, draft="mtp")
    assert refused.value.key == "draft"
    loaded = load(path)
    assert loaded.trained is None and not loaded.native and "ffn_up" in loaded.reasons["draft"]


def test_a_drafter_that_was_trained_for_the_model_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.native_of("auto", "0" * 64) and choice.native_of("mtp", "0" * 64)
    assert not choice.native_of("", "0" * 64) and not choice.native_of("dflash", "0" * 64)
    monkeypatch.setattr(shipped, "names", lambda sha256: ("dflash", "mtp"))
    monkeypatch.setattr(shipped, "default", lambda sha256: "dflash")
    assert not choice.native_of("auto", "0" * 64) and not choice.native_of("mtp", "0" * 64)
    assert 'draft="dflash"' in choice.remedy("dflash", "m", "0" * 64, native=True)


def test_a_rehearsal_runs_them(tmp_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    shape = tiny.Shape(kind="qwen2 file")
    path = checkpoints.write(tmp_path, FORMS["gguf qwen2"], shape, checkpoints.tensors(shape))
    found = read(path, numba_ops(2), 128, 258, own=True)[1]
    assert found is not None and found.name == native.NAME
    assert read(path, numba_ops(2), 128, 258)[1] is None
