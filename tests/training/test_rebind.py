"""A drafter for another file of its model: the same tensors under another target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from power_lab.engine.config import Paths
from power_lab.engine.models.describe import describe
from power_lab.engine.models.spec import ModelSpec
from power_lab.engine.speculation.drafters.neural.artifact import Artifact
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.engine.weights.safetensors import SafeTensorsFile
from power_lab.errors import ConfigError
from power_lab.models import ensure
from power_lab.training.__main__ import main
from power_lab.training.rebind import rebind
from tests.engine.speculation.test_shipped import FILES

OTHER, THIRD = "ab" * 32, "cd" * 32


def draft_of(name: str) -> Path:
    return next(file for file in FILES if file.stem == name)


@pytest.fixture(scope="module")
def smollm2() -> tuple[ModelSpec, str]:
    entry = ensure("smollm2", Paths.default())
    with open_checkpoint(entry.path) as checkpoint:
        return describe(checkpoint).spec, entry.sha256


@pytest.mark.parametrize("name", ["mtp", "dflash", "dflash2"])
def test_tensors_stay_and_the_target_changes(name: str, smollm2: tuple[ModelSpec, str], tmp_path: Path) -> None:
    spec, sha256 = smollm2
    draft, out = draft_of(name), tmp_path / "sub" / "bound.safetensors"
    rebind(draft, out, spec, OTHER)
    with Artifact.open(out) as bound, Artifact.open(draft) as trained:
        bound.check_target(spec, OTHER)
        with pytest.raises(ConfigError, match="was made for the model abababab"):
            bound.check_target(spec, sha256)
        assert bound.header.origin == trained.header.origin | {"trained_for": sha256}
        assert bound.header.config == trained.header.config and bound.header.serves == trained.header.serves
    with SafeTensorsFile.open(out) as bound, SafeTensorsFile.open(draft) as trained:
        assert list(bound.tensors) == list(trained.tensors)
        for key, tensor in trained.tensors.items():
            assert bound.tensors[key].kind == tensor.kind
            np.testing.assert_array_equal(bound.tensors[key].stored, tensor.stored)
    rebind(out, tmp_path / "again.safetensors", spec, THIRD)
    with Artifact.open(tmp_path / "again.safetensors") as again:
        assert again.header.origin["trained_for"] == sha256  # the first, not the one between


def test_another_geometry_is_refused_and_nothing_written(smollm2: tuple[ModelSpec, str], tmp_path: Path) -> None:
    spec = dataclasses.replace(smollm2[0], vocab=smollm2[0].vocab + 1)
    with pytest.raises(ConfigError, match="vocab"):
        rebind(draft_of("mtp"), tmp_path / "bound.safetensors", spec, OTHER)
    assert not list(tmp_path.iterdir())


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = tmp_path / "nothing.safetensors"
    assert main(["bind", "--draft", str(nothing), "--model", "smollm2", "--out", str(tmp_path / "out")]) == 2
    assert "nothing.safetensors" in capsys.readouterr().err
