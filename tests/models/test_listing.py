"""What is listed, under which names, from trees of files as the other programs leave them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from power_lab.engine.config import ModelFolders, Paths
from power_lab.errors import ModelFileError
from power_lab.models import CATALOGUE, Listing, ModelEntry, facts, list_models, places, resolve
from power_lab.models.facts import Facts
from power_lab.models.files import ModelFiles
from power_lab.models.fit import fit_of
from tests import native, tiny
from tests.models.trees import MAIN, OLD, contents, gguf, repository, shards


def named(listing: Listing) -> dict[str, ModelEntry]:
    assert len({entry.name for entry in listing.models}) == len(listing.models), "names are unique"
    return {entry.name: entry for entry in listing.models if entry.name not in CATALOGUE}


def put(path: Path, content: bytes | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf() if content is None else content)
    return path


def test_the_catalogue_is_listed_before_anything_is_here(paths: Paths) -> None:
    listing = list_models(paths)
    assert [(entry.name, entry.present, entry.status) for entry in listing.models] == [
        ("smollm2", False, "not here"),
        ("gemma3-270m", False, "not here"),
    ]
    assert listing.notes == ()


def test_every_place_is_listed_with_what_the_headers_say(paths: Paths, saved_folder: Path) -> None:
    put(paths.models / "own.gguf")
    hub, llama_cpp = paths.others.hub, paths.others.llama_cpp
    assert hub is not None and llama_cpp is not None
    repository(hub, "org/tiny-llama", contents(saved_folder))
    repository(
        hub, "org/quants-GGUF", {"quants-Q4.gguf": gguf(seed=1), "UD/quants-Q8.gguf": gguf(seed=2), "README.md": b"x"}
    )
    put(llama_cpp / "org_cached-GGUF_cached-Q4.gguf")
    put(llama_cpp / "manifest=org=cached-GGUF=latest.json", b"{}")
    put(paths.others.extra[0] / "deep" / "er" / "given.gguf")
    found = named(list_models(paths))
    assert {name: entry.source for name, entry in found.items()} == {
        "own": "power-lab",
        "quants-Q4": "Hugging Face cache",
        "quants-Q8": "Hugging Face cache",
        "org/tiny-llama": "Hugging Face cache",
        "cached-Q4": "llama.cpp cache",
        "given": f"folder {paths.others.extra[0]}",
    }
    assert {entry.status for entry in found.values()} == {"ready"}
    own, saved = found["own"], found["org/tiny-llama"]
    assert (own.format, own.architecture, own.context, own.license) == ("gguf", "llama", 4096, "mit")
    assert (own.parameters, own.bytes_by_type, own.quantisation) == (3 * 32 + 32, {"F32": 512}, "F32")
    assert own.fit is not None and own.fit.pool == 8192 * 2 * 16 * 4
    assert (saved.format, saved.architecture, saved.context, saved.license) == (
        "safetensors",
        "llama",
        512,
        "apache-2.0",
    )
    assert saved.size >= sum(saved.bytes_by_type.values()) > 0
    for name, entry in found.items():
        again = resolve(name, paths)
        assert (again.name, again.path) == (name, entry.path)
        assert resolve(str(entry.path), paths).sha256 == again.sha256 and len(again.sha256) == 64


@pytest.mark.parametrize("name", ["mimo", "folder", "gguf qwen3"])
@pytest.mark.parametrize("count", [1, 2])
def test_layers_that_draft_are_counted_apart(paths: Paths, name: str, count: int) -> None:
    form = native.FORMS[name]
    shape = tiny.Shape(kind=form.kind)
    own = native.tensors(shape, count)
    drafting = {key for key in own if key.startswith("blk.") and int(key.split(".")[1]) >= shape.layers}
    for folder, told, kept in [("with", count, own), ("without", 0, {key: own[key] for key in own.keys() - drafting})]:
        place = paths.others.extra[0] / folder
        place.mkdir()
        native.write(place, form, shape, kept, told)
    found = {entry.path.parent.name if form.gguf else entry.path.name: entry for entry in list_models(paths).models}
    whole, plain = found["with"], found["without"]
    assert (whole.draft_layers, plain.draft_layers, plain.draft_parameters) == (count, 0, 0)
    assert whole.parameters == plain.parameters > 0, "the model as it answers"
    assert whole.draft_parameters == sum(own[key].size for key in drafting)


def test_names_that_meet_are_told_apart_and_stay(paths: Paths) -> None:
    hub, extra = paths.others.hub, paths.others.extra[0]
    assert hub is not None
    put(paths.models / "same.gguf")
    repository(hub, "a/one", {"same.gguf": gguf(seed=1)})
    repository(hub, "b/two", {"same.gguf": gguf(seed=2), "smollm2.gguf": gguf(seed=3)})
    given = [put(extra / folder / "same.gguf", gguf(seed=4)) for folder in "xy"]
    found = named(list_models(paths))
    assert list(found) == ["same", "a/one/same", "b/two/same", "b/two/smollm2", *map(str, given)]
    digests = {resolve(name, paths).sha256 for name in found}
    assert len(digests) == 5, "both given files have the same bytes"
    (paths.models / "same.gguf").unlink()
    assert list(named(list_models(paths)))[:2] == ["same", "b/two/same"]
    assert resolve("b/two/same", paths).sha256 in digests


def test_an_older_revision_says_which_it_is(paths: Paths, saved_folder: Path) -> None:
    hub = paths.others.hub
    assert hub is not None
    files = contents(saved_folder)
    repository(hub, "org/tiny", files)
    repository(hub, "org/tiny", files | {"generation_config.json": b"{}"}, OLD, main=False)
    repository(hub, "org/tiny", {"gguf/q.gguf": gguf()}, OLD, main=False)
    found = named(list_models(paths))
    assert list(found) == ["org/tiny", f"org/tiny@{OLD[:8]}", f"org/tiny@{OLD[:8]}/gguf/q"]
    assert found["org/tiny"].path.name == MAIN
    one, other = (resolve(name, paths) for name in list(found)[:2])
    assert one.sha256 != other.sha256, "another generation_config.json is another model"
    assert resolve(str(one.path), paths).name == "org/tiny"


def test_sharded_models_are_one(paths: Paths) -> None:
    extra = paths.others.extra[0]
    whole = shards(extra, "whole", 3)
    shards(extra, "gap", 4, leave_out=(2, 3))
    put(extra / "odd-00001-of-00000.gguf")
    found = named(list_models(paths))
    assert {name: entry.status.partition(":")[0] for name, entry in found.items()} == {
        "gap": "incomplete",
        "odd": "damaged",
        "whole": found["whole"].status.partition(":")[0],
    }
    assert found["gap"].status == "incomplete: missing part 2, 3 of 4"
    assert found["whole"].size == sum(path.stat().st_size for path in whole)
    with pytest.raises(ValueError, match="missing part 2, 3 of 4"):
        resolve("gap", paths)


def test_what_cannot_be_loaded_is_listed_with_the_reason(paths: Paths, saved_folder: Path) -> None:
    extra, hub = paths.others.extra[0], paths.others.hub
    assert hub is not None
    put(extra / "alien.gguf", gguf("martian"))
    put(extra / "types.gguf", gguf(kind=16))
    put(extra / "short.gguf", gguf()[:-64])
    put(extra / "noise.gguf", b"not a model at all, but long enough for a header")
    put(extra / "empty.gguf", b"")
    files = contents(saved_folder)
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"\x80\x04."}
    leaving = {"config.json": files["config.json"]}
    leaving["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../x.safetensors"}}'
    missing = leaving | {"model.safetensors.index.json": b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'}
    both = files | {"also.gguf": b""}
    mute = {name: content for name, content in files.items() if name != "tokenizer.json"}
    torn = files | {"config.json": b"{"}
    folders = {"pickled": pickled, "leaving": leaving, "missing": missing, "both": both, "mute": mute, "torn": torn}
    for name, members in folders.items():
        for member, content in members.items():
            put(extra / name / member, content)
    broken = repository(hub, "org/broken", {"gone.gguf": gguf(), "config.json": files["config.json"]})
    (broken / "gone.gguf").resolve().unlink()
    unfinished = hub / "models--org--coming" / "blobs" / f"{'a' * 64}.incomplete"
    put(unfinished, b"GGUF")
    (extra / "pipe.gguf").unlink(missing_ok=True)
    os.mkfifo(extra / "pipe.gguf")
    (extra / "loop.gguf").symlink_to("loop.gguf")
    statuses = {name: entry.status for name, entry in named(list_models(paths)).items()}
    said = {
        "alien": "unsupported: general.architecture: 'martian'",
        "types": "unsupported: tensors stored as IQ2_XXS",
        "short": "damaged: tensor",
        "noise": "damaged: the first four bytes",
        "empty": "damaged: 0 bytes",
        "pickled": "unsupported: PyTorch pickle files",
        "both": "unsupported: model.safetensors and also.gguf in one folder",
        "also": "damaged: 0 bytes",
        "leaving": "damaged: model.safetensors.index.json names '../../x.safetensors', which leaves the folder",
        "missing": "incomplete: missing model-00001-of-00002.safetensors",
        "mute": "unsupported: it has no tokenizer.json",
        "torn": "damaged: config.json: is not JSON",
        "gone": "incomplete: missing gone.gguf",
        "org/coming": "incomplete: its download is unfinished",
        "pipe": "incomplete: missing pipe.gguf",
        "loop": "incomplete: missing loop.gguf",
    }
    assert statuses.keys() == said.keys()
    for name, beginning in said.items():
        assert statuses[name].startswith(beginning), (name, statuses[name])
    for name in ("pickled", "both", "leaving", "missing", "gone", "org/coming", "pipe", "loop"):
        with pytest.raises(ModelFileError) as raised:
            resolve(name, paths)
        remedy = {"pickled": "Convert it to SafeTensors", "both": "Name the .gguf file"}.get(name, "Fetch it again")
        assert raised.value.remedy.startswith(remedy), name


def test_links_in_circles_and_huge_folders_are_bounded_and_said(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = paths.others.extra[0]
    put(extra / "a" / "one.gguf")
    (extra / "a" / "up").symlink_to(extra)
    (extra / "b").symlink_to(extra / "a")
    put(extra.joinpath(*"1234567") / "deep.gguf")
    listing = list_models(paths)
    assert list(named(listing)) == ["one"]
    assert listing.notes == (f"{extra}: folders more than {places.MAX_DEPTH} deep were not looked at",)
    monkeypatch.setattr(places, "MAX_ENTRIES", 20)
    for number in range(40):
        put(extra / "many" / f"{number:02}.gguf")
    listing = list_models(replace(paths, others=ModelFolders(extra=(extra / "many",))))
    assert any("only the first" in note for note in listing.notes) == (len(named(listing)) < 40)


def test_a_folder_that_is_not_there_or_closed_is_said(paths: Paths, tmp_path: Path) -> None:
    listing = list_models(paths, (tmp_path / "absent",))
    assert listing.notes == (f"{tmp_path / 'absent'}: no such folder",)


def test_hostile_names_break_nothing(paths: Paths) -> None:
    extra = paths.others.extra[0]
    for name in (
        b"line\nbreak.gguf",
        b"\x1b[31mred.gguf",
        b"\xff.gguf",
        b"\xfe.gguf",
        b"\xfd.gguf",
        "日本 \u202e.gguf".encode(),
    ):
        Path(os.fsdecode(os.fsencode(extra) + b"/" + name)).write_bytes(gguf())
    found = named(list_models(paths))
    assert len(found) == 6 and {entry.status for entry in found.values()} == {"ready"}
    for name, entry in found.items():
        assert resolve(name, paths).path == entry.path
        name.encode()


def test_headers_are_read_once_while_the_files_stay(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(paths.models / "own.gguf")
    first = named(list_models(paths))["own"]
    monkeypatch.setattr(facts, "read_facts", lambda path: pytest.fail(f"{path} was read again"))
    again = named(list_models(paths))["own"]
    assert (again.status, again.architecture, again.parameters) == (first.status, first.architecture, first.parameters)
    monkeypatch.undo()
    path.write_bytes(gguf("martian"))
    assert named(list_models(paths))["own"].architecture == "martian"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"code": 1}', b"\xff", b'{"code": "x", "known": {"a": [1]}}'])
def test_a_damaged_cache_of_facts_costs_only_time(paths: Paths, damage: bytes) -> None:
    put(paths.models / "own.gguf")
    (paths.models / "facts.json").write_bytes(damage)
    assert named(list_models(paths))["own"].status == "ready"
    assert b"own.gguf" in (paths.models / "facts.json").read_bytes()


def test_facts_read_by_other_code_are_not_believed(paths: Paths) -> None:
    put(paths.models / "own.gguf")
    list_models(paths)
    file = paths.models / "facts.json"
    file.write_bytes(file.read_bytes().replace(facts.code_digest().encode(), b"0" * 64).replace(b"llama", b"lemma"))
    assert named(list_models(paths))["own"].architecture == "llama"


def test_a_model_that_goes_away_meanwhile_is_not_listed(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(paths.models / "own.gguf")
    read = facts.read_facts

    def remove_then_read(place: Path) -> Facts:
        path.unlink()
        return read(place)

    monkeypatch.setattr(facts, "read_facts", remove_then_read)
    assert named(list_models(paths)) == {}


def test_what_must_not_be_read_is_said(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played, since these tests may run as root, whom nothing is forbidden."""
    put(paths.models / "own.gguf")

    def forbidden(files: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ModelFiles, "size", forbidden)
    assert named(list_models(paths))["own"].status == "damaged: cannot be read: Permission denied"


def test_overlapping_places_list_a_model_once(paths: Paths) -> None:
    put(paths.models / "own.gguf")
    listing = list_models(paths, (paths.models, paths.models.parent))
    assert list(named(listing)) == ["own"]


def test_fit_counts_weights_and_pool() -> None:
    stated = Facts(bytes_by_type={"Q4_0": 600}, kv_bytes=1)
    assert fit_of(stated, 20_000).verdict == "fits"
    assert fit_of(stated, 9_000).verdict == "tight"
    fit = fit_of(stated, 8_000)
    assert (fit.verdict, fit.weights, fit.pool, fit.free) == ("too large", 600, 8192, 8_000)
    assert fit_of(Facts(problem="damaged: x"), 8_000).verdict == "unknown"


def test_quantisation_names_the_type_of_most_bytes() -> None:
    assert Facts(bytes_by_type={"Q4_K": 90, "Q6_K": 9, "F32": 1}).quantisation == "Q4_K+"
    assert Facts(bytes_by_type={"Q8_0": 99, "F32": 1}).quantisation == "Q8_0"
    assert Facts().quantisation == ""


def test_hundreds_of_files_are_listed_from_one_walk(paths: Paths) -> None:
    for number in range(300):
        put(paths.others.extra[0] / f"{number}.gguf", gguf(seed=number))
    assert len(named(list_models(paths))) == 300
    assert len(named(list_models(paths))) == 300


def test_listing_loads_no_device_library(tmp_path: Path) -> None:
    put(tmp_path / "cache" / "models" / "own.gguf")
    code = (
        "import sys\nfrom pathlib import Path\nfrom power_lab.engine.config import Paths\nfrom power_lab.models import list_models\n"
        f"root = Path({str(tmp_path)!r})\nfound = list_models(Paths(root / 'cache', root / 'run', root / 'state'))\n"
        "assert found.models[-1].status == 'ready', found\n"
        "print([name for name in ('torch', 'numba', 'triton', 'bokeh') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "[]"
