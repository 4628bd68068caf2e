"""A drafter's layer that begins as one of the target's computes what that one does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from power_lab.engine.weights.source import MemorySource
from power_lab.errors import ConfigError
from power_lab.training import inherit
from power_lab.training.corpus import Corpus
from power_lab.training.modules import MTP, DFlash
from power_lab.training.modules.layers import Layer, Sight
from power_lab.training.target import Target
from power_lab.training.train import Trainer
from tests import tiny
from tests.training.conftest import RECIPE, SHAPE, target

INHERITING = msgspec.structs.replace(RECIPE, inherit=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_copied_layer_is_the_targets(interleaved: bool) -> None:
    spec = tiny.spec(SHAPE)
    attention = spec.layers[0].attention
    assert attention.rope is not None
    attention = replace(attention, rope=replace(attention.rope, interleaved=interleaved))
    spec = replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))
    model = Target(spec, MemorySource(tiny.tensors(SHAPE)))
    recipe = INHERITING.fitted(model.spec)
    config = replace(recipe.config("mtp", 2), ffn=SHAPE.ffn)
    assert not config.qk_norm
    assert config.rope_theta == pytest.approx(inherit.theta(model.spec))
    module = MTP(config, SHAPE.width, model.spec.norm_eps, model.spec.vocab, 8)
    inherit.inherit(module, model, (1,), 3.0)
    tokens = torch.randint(0, 256, (1, 12))
    seen = model.hidden(tokens, [1, 2])
    positions = torch.arange(12)[None, None]
    sight = Sight.of(positions, torch.zeros(1, 1, dtype=torch.int64), 1, causal=True, window=0)
    layer = module.layers[0]
    assert isinstance(layer, Layer)
    context = layer.keys_values(torch.zeros(1, 1, SHAPE.width), torch.zeros(1, 1))
    with torch.no_grad():
        out = 3 * layer(seen[1][:, None] / 3, positions, context, sight)[:, 0]
        torch.testing.assert_close(out, seen[2], rtol=1e-3, atol=1e-3)


def test_a_block_drafters_context_begins_as_the_state_before_the_copied_layer() -> None:
    model = target()
    config = INHERITING.fitted(model.spec).config("dflash", 2)
    module = DFlash(config, SHAPE.width, model.spec.norm_eps, model.spec.vocab, 8)
    with torch.no_grad():
        module.fc.weight.zero_()
    inherit.inherit(module, model, (1, 1), 3.0)
    feature = torch.randn(len(config.taps) * SHAPE.width)
    at = config.taps.index(1) * SHAPE.width
    torch.testing.assert_close(module.fc(feature), feature[at : at + SHAPE.width])
    kept = {tuple(row) for row in model.layer(1)["gate"].tolist()}
    assert all(tuple(row) in kept for row in module.layers[0].gate.weight.tolist())
    assert len(module.layers[0].gate.weight) < len(kept)


@pytest.mark.parametrize("layers", [(0,), (0, 2), (-1, 0)])
def test_layers_that_are_not_there_are_named(layers: tuple[int, ...]) -> None:
    model = target()
    config = INHERITING.fitted(model.spec).config("dflash", 2)
    module = DFlash(config, SHAPE.width, model.spec.norm_eps, model.spec.vocab, 8)
    with pytest.raises(ConfigError, match="copied"):
        inherit.inherit(module, model, layers, 3.0)


def test_a_training_begins_with_the_targets_layers(corpus: Corpus) -> None:
    model = target()
    trainer = Trainer(model, corpus, INHERITING.fitted(model.spec))
    for kind, layers in (("mtp", (1,)), ("dspark", (1, 1)), ("dflash2", (1, 1))):
        for own, layer in zip(trainer.drafters[kind].layers, layers, strict=True):
            torch.testing.assert_close(own.v.weight, model.layer(layer)["v"])
    trainer.train(next(trainer.texts()), 0.0)
    assert all(loss > 0 for loss in trainer.losses().values())
