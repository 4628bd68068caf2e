"""Names and places, with properties, and the Hugging Face hub's own library beside our reading of its cache."""

from __future__ import annotations

import tempfile
from pathlib import Path

import huggingface_hub
from hypothesis import given
from hypothesis import strategies as st

from power_lab.engine.config import Paths
from power_lab.models import CATALOGUE
from power_lab.models.files import ModelFiles, folder_model, gguf_models
from power_lab.models.listing import named
from power_lab.models.places import HUB, Found, find, hub_name
from tests.models.trees import MAIN, OLD, contents, gguf, repository

HOME = Paths(Path("/cache"), Path("/run"), Path("/state"))
NAMES = st.sampled_from(["a", "b", "org/a", "smollm2", "a#2", "\udcff", "\udcfe"])


@st.composite
def found(draw: st.DrawFn) -> list[Found]:
    short = draw(st.lists(st.lists(NAMES, max_size=2), max_size=12))
    models = []
    for number, names in enumerate(short):
        path = Path(f"/x/{number}{draw(st.sampled_from(['', chr(0xDC80)]))}.gguf")
        models.append(Found((*names, str(path)), "folder /x", ModelFiles(path, "gguf", (path,))))
    return models


@given(found(), found())
def test_names_are_unique_text_and_later_models_change_none(first: list[Found], later: list[Found]) -> None:
    names = [name for name, _ in named(first, HOME, CATALOGUE)]
    assert len({*names, *CATALOGUE}) == len(first) + len(CATALOGUE)
    for name in names:
        name.encode()
    assert [name for name, _ in named([*first, *later], HOME, CATALOGUE)][: len(names)] == names


@given(st.binary(max_size=200) | st.from_regex(rb'\{"weight_map": \{"a": ".{0,20}"\}\}', fullmatch=True))
def test_no_index_breaks_the_walk_or_leads_out(index: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors.index.json").write_bytes(index)
        model = folder_model(folder, [path.name for path in folder.iterdir()])
        assert model is None or (model.problem and all(path.parent == folder for path in model.files))


@given(st.lists(st.from_regex(r"[ab](-0000[0-3]-of-0000[0-3])?\.gguf", fullmatch=True), unique=True, max_size=12))
def test_every_file_belongs_to_one_model(names: list[str]) -> None:
    models = gguf_models(Path("/absent"), names)
    assert sorted(path.name for model in models for path in model.files) == sorted(names)
    assert all(model.path == model.files[0] and model.problem for model in models), "none of them is there"


def test_the_hubs_own_library_sees_the_same(paths: Paths, saved_folder: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    repository(hub, "org/tiny-llama", contents(saved_folder))
    repository(hub, "org/tiny-llama", contents(saved_folder), OLD, main=False)
    repository(hub, "gpt", {"q/gpt-Q8.gguf": gguf()})
    theirs = huggingface_hub.scan_cache_dir(hub)
    assert not theirs.warnings
    assert {repository.repo_id for repository in theirs.repos} == {"org/tiny-llama", "gpt"}
    ours = {model.files.path: model.names[0] for model in find(paths)[0] if model.source == HUB}
    assert {
        Path(revision.snapshot_path).resolve() for repository in theirs.repos for revision in repository.revisions
    } == {(path if path.is_dir() else path.parent.parent).resolve() for path in ours}
    kept = huggingface_hub.try_to_load_from_cache("gpt", "q/gpt-Q8.gguf", cache_dir=hub)
    assert isinstance(kept, str) and ours[Path(kept)] == "gpt-Q8"
    snapshot = Path(str(huggingface_hub.try_to_load_from_cache("org/tiny-llama", "config.json", cache_dir=hub))).parent
    assert (snapshot.name, hub_name(snapshot), ours[snapshot]) == (MAIN, "org/tiny-llama", "org/tiny-llama")
