"""A whole training of tiny drafters: they learn, go on from files, and their artifacts say what they said."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from power_lab.engine.speculation.drafters.neural.artifact import Artifact, Target
from power_lab.engine.speculation.drafters.neural.kinds import bind
from power_lab.engine.weights.source import MemorySource
from power_lab.errors import ConfigError
from power_lab.kernels.table import select
from power_lab.training import export
from power_lab.training.corpus import Corpus
from power_lab.training.curves import curves
from power_lab.training.publish import publish
from power_lab.training.recipe import Recipe
from power_lab.training.train import LOG, Trainer, run
from power_lab.training.train import RECIPE as RECIPE_FILE
from tests import tiny
from tests.training.conftest import RECIPE, SHAPE, target

STEPS = 90


def trainer(corpus: Corpus, **changes: object) -> Trainer:
    model = target()
    return Trainer(model, corpus, msgspec.structs.replace(RECIPE, **changes).fitted(model.spec))


@pytest.fixture(scope="module")
def trained(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("run")
    made = trainer(corpus)
    before = made.held()
    return folder, {"before": before, "after": run(made, folder, steps=STEPS, every=1e9)}


def test_losses_fall_and_acceptance_beats_chance(trained: tuple[Path, dict]) -> None:
    folder, results = trained
    found = curves(folder / LOG)
    assert set(found.kind.values) == set(RECIPE.kinds)
    for kind in RECIPE.kinds:
        losses = found.loss.sel(kind=kind)
        assert losses[-1] < losses[0] - 0.1
    after = results["after"]["held"]
    assert set(after) == {"dspark", "dflash", "dflash2", "mtp"}
    for name in after:
        assert after[name]["greedy 7"] > results["before"][name]["greedy 7"] + 0.1
    assert found.accepted.sel(drafter="mtp", sampled=False, width=7)[-1] == pytest.approx(after["mtp"]["greedy 7"])
    assert 0.5 < found.attrs["coverage"] < 1


def test_a_training_goes_on_from_its_files_as_if_it_had_not_stopped(corpus: Corpus, tmp_path: Path) -> None:
    whole, first = trainer(corpus, kinds=("mtp",)), trainer(corpus, kinds=("mtp",))
    batches = whole.texts()
    for _ in range(6):
        whole.train(next(batches), 0.0)
    batches = first.texts()
    for _ in range(3):
        first.train(next(batches), 0.0)
    first.save(tmp_path)
    second = trainer(corpus, kinds=("mtp",))
    second.load(tmp_path)
    batches = second.texts()
    for _ in range(3):
        second.train(next(batches), 0.0)
    for name, value in whole.drafters["mtp"].state_dict().items():
        assert torch.equal(value, second.drafters["mtp"].state_dict()[name]), name


def test_artifacts_come_back_and_the_engine_binds_them(
    corpus: Corpus, trained: tuple[Path, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = trained
    recipe = Recipe.load(folder / RECIPE_FILE)
    model = target()
    stored = publish(Trainer(model, corpus, recipe), folder, tmp_path, repr(SHAPE), commit="abc")
    for name, accepted in stored.items():
        assert accepted["greedy 7"] == pytest.approx(results["after"]["held"][name]["greedy 7"], abs=0.1)
    assert "dflash.safetensors" in capsys.readouterr().out
    measure = Trainer(model, corpus, recipe)
    loaded = tiny.loaded(SHAPE, select("cpu", "exact", 2, tiny.cache_dir()))
    source = MemorySource(tiny.tensors(SHAPE))
    bound = Target(loaded.model.spec, loaded.model.weights, loaded.model.ops, source, loaded.facts.sha256)
    for name, served in (("dflash", "dspark"), ("dflash2", "dflash2"), ("mtp", "mtp")):
        path = tmp_path / f"{name}.safetensors"
        kind, drafter, ids = export.read(path, measure.whole)
        assert kind == served
        assert ids.tolist() == measure.drafts.ids.tolist()
        assert measure.measure.held({kind: drafter})[served] == stored[served]
        with Artifact.open(path) as artifact:
            assert artifact.header.origin["commit"] == "abc"
            assert artifact.header.origin["accepted"][served] == stored[served]
            artifact.check_target(loaded.model.spec, repr(SHAPE))
            assert served in bind(artifact, bound, loaded.context).serves
        assert json.loads(path.with_suffix(".json").read_text())["steps"] == STEPS


@pytest.mark.parametrize("setting", ["nonsense=1", "ffn=wide", "kinds=eagle"])
def test_a_recipe_names_what_is_wrong(setting: str) -> None:
    from power_lab.training.__main__ import _recipe

    with pytest.raises(ConfigError, match=setting.split("=")[0] if setting != "kinds=eagle" else "eagle"):
        _recipe([setting], 0)
    assert _recipe(["ffn=96", "taps=1,2", "kinds=mtp"], 4) == Recipe(ffn=96, taps=(1, 2), kinds=("mtp",), seed=4)


def test_mtp_learns_in_its_share_of_the_steps_and_with_longer_chains_at_the_end(corpus: Corpus) -> None:
    recipe = msgspec.structs.replace(RECIPE, share_mtp=0.4, chain=3, chain_last=5, lengthen=0.5)
    assert [recipe.learns("mtp", step) for step in range(5)] == [False, False, True, False, True]
    assert all(recipe.learns("dspark", step) for step in range(5))
    assert [recipe.width("mtp", progress) for progress in (0.0, 0.49, 0.5, 1.0)] == [3, 3, 5, 5]
    made = trainer(corpus, kinds=("mtp", "dspark"), share_mtp=0.5, chain=3, chain_last=5, lengthen=0.5)
    batches, weight = made.texts(), made.drafters["mtp"].norm.weight
    before = weight.detach().clone()
    made.train(next(batches), 0.0)
    assert torch.equal(weight, before)
    made.train(next(batches), 0.9)
    assert not torch.equal(weight, before)
    losses = made.losses()
    assert 0 < losses["mtp"] < 10
    assert made.losses() == {"mtp": 0.0, "dspark": 0.0}
    with pytest.raises(ConfigError, match="share_mtp"):
        Recipe(share_mtp=0.0)
