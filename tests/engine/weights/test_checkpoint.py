"""Opening whatever lies on disk: one model, or an error that says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.gguf_model import GgufModel
from power_lab.engine.weights.mapped import is_plain_name, member, read_bounded
from power_lab.errors import ModelFileError
from tests.engine.weights.ggufs import STRING, Gguf, Tensor, pair
from tests.fuzz.originals import parts, safe

LLAMA = [pair("general.architecture", STRING, "llama"), pair("general.license", STRING, "apache-2.0")]
GGUF = bytes(
    Gguf(
        LLAMA, [Tensor("a", (32, 2), 8, bytes(68)), Tensor("b", (4,), 0, bytes(16)), Tensor("c", (256,), 19, bytes(50))]
    )
)
WEIGHTS = safe({"a.weight": ("F32", [2, 3], bytes(24)), "b": ("BF16", [4], bytes(8))})
CONFIG = b'{"model_type": "llama", "hidden_size": 64}'


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF)
    for place in (path, str(path)):
        with open_checkpoint(place) as checkpoint:
            assert (checkpoint.path, checkpoint.format, checkpoint.architecture) == (path, "gguf", "llama")
            assert isinstance(checkpoint.metadata, GgufModel) and checkpoint.license == "apache-2.0"
            assert checkpoint.source.names() == ["a", "b", "c"] and checkpoint.files == (path,)
            assert checkpoint.size == len(GGUF) and checkpoint.bytes_by_type() == {"Q8_0": 68, "IQ1_S": 50, "F32": 16}
            _, data = checkpoint.source.vector("b", 4)
    assert data.tolist() == [0, 0, 0, 0] and checkpoint.source.names() == []


def test_a_folder_with_one_gguf_model(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "model.gguf").write_bytes(GGUF)
    (tmp_path / "one" / "README.md").write_bytes(b"")
    with open_checkpoint(tmp_path / "one") as checkpoint:
        assert checkpoint.path == tmp_path / "one" and checkpoint.files == (tmp_path / "one" / "model.gguf",)
    (tmp_path / "split").mkdir()
    names = sorted(parts(tmp_path / "split"))
    for place in ("", *names):
        with open_checkpoint(tmp_path / "split" / place) as checkpoint:
            assert [path.name for path in checkpoint.files] == names and len(checkpoint.source.names()) == 7
            assert checkpoint.license == "mit" and checkpoint.metadata.require_list(
                "llama.attention.head_count_kv", int, 2
            ) == [1, 2]
    (tmp_path / "split" / names[0]).unlink()
    with pytest.raises(ModelFileError, match=r"00001-of-00003\.gguf: part 1 of 3 is missing"):
        open_checkpoint(tmp_path / "split")


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_a_folder_of_transformers(tmp_path: Path, shard: str) -> None:
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            tie_word_embeddings=True,
        )
    ).to(torch.bfloat16)
    network.save_pretrained(tmp_path, max_shard_size=shard)
    (tmp_path / "README.md").write_text("---\nlanguage:\n- en\nlicense: 'cc-by-4.0'\n---\nlicense: mit\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert (checkpoint.format, checkpoint.architecture, checkpoint.license) == ("safetensors", "llama", "cc-by-4.0")
        assert isinstance(checkpoint.metadata, JsonConfig) and checkpoint.metadata.require("hidden_size", int) == 32
        wanted = {path.name for path in tmp_path.iterdir()} - {"README.md"}
        assert {path.name for path in checkpoint.files} == wanted and len(checkpoint.files) == len(wanted)
        assert ("model.safetensors.index.json" in wanted) == (shard == "20KB")
        assert checkpoint.size == sum((tmp_path / name).stat().st_size for name in wanted)
        state = {name: value for name, value in network.state_dict().items() if name != "lm_head.weight"}
        assert sorted(checkpoint.source.names()) == sorted(state)
        for name, value in state.items():
            assert checkpoint.source.stored(name).stored.tobytes() == value.view(torch.uint8).numpy().tobytes()
        assert checkpoint.bytes_by_type() == {"BF16": sum(value.nbytes for value in state.values())}


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("license: mit", ""),
        ("---\nlicense: mit\n---", "mit"),
        ('---\ntags:\n- x\nlicense: "apache-2.0"   \n---\n', "apache-2.0"),
        ("---\nlicense: mit\nno end", ""),
        ("---\n  license: mit\n---\n", ""),
        ("---\nlicense:\n- mit\n---\n", ""),
        ("---\nlicense: \x1b[31mred\n---\n", ""),
        ("---\nlicense: " + "x" * 500 + "\n---\n", ""),
        ("---\n" + "x\n" * 500 + "license: mit\n---\n", ""),
    ],
)
def test_the_licence_of_a_model_card(tmp_path: Path, card: str, license: str) -> None:
    fill(tmp_path, {"config.json": CONFIG, "model.safetensors": WEIGHTS, "README.md": card.encode()})
    assert open_checkpoint(tmp_path).license == license


def test_a_licence_in_metadata_is_one_printable_line(tmp_path: Path) -> None:
    pairs = [LLAMA[0], pair("general.license", STRING, "a\n\x1b[31mb" + "x" * 100)]
    fill(tmp_path, {"model.gguf": bytes(Gguf(pairs, [Tensor("b", (4,), 0, bytes(16))]))})
    assert open_checkpoint(tmp_path).license == "a[31mb" + "x" * 56


def fill(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "empty": ({}, r"is empty\. A model is"),
    "no model": ({"notes.txt": b""}, r"holds no model\. A model is"),
    "config alone": ({"config.json": CONFIG}, "holds no model"),
    "no config": ({"model.safetensors": WEIGHTS}, r"config\.json is missing beside 'model\.safetensors'"),
    "pickle": (
        {"config.json": CONFIG, "pytorch_model.bin": b"x"},
        r"'pytorch_model\.bin' is a pickle.*Convert it to SafeTensors",
    ),
    "adapter": ({"adapter_config.json": b"{}", "adapter_model.safetensors": WEIGHTS}, "holds an adapter, not a model"),
    "other tensors": ({"config.json": CONFIG, "x.safetensors": WEIGHTS}, r"holds 'x\.safetensors', but neither"),
    "two formats": (
        {"config.json": CONFIG, "model.safetensors": WEIGHTS, "m.gguf": GGUF},
        r"holds 'm\.gguf' and 'model\.safetensors'\. Name the \.gguf",
    ),
    "two GGUFs": ({"a.gguf": GGUF, "b.gguf": GGUF}, r"holds 2 models: 'a\.gguf', 'b\.gguf'\. Name one"),
    "two sets of parts": ({"a-00001-of-00002.gguf": GGUF, "a-00001-of-00003.gguf": GGUF}, "holds 2 models"),
    "bad GGUF": ({"a.gguf": b"PK\3\4" * 10}, r"a\.gguf: the first four bytes"),
    "no architecture": (
        {"a.gguf": bytes(Gguf([pair("k", STRING, "v")]))},
        r"a\.gguf: key 'general\.architecture' is missing",
    ),
    "no model type": (
        {"config.json": b"{}", "model.safetensors": WEIGHTS},
        r"config\.json: key 'model_type' is missing",
    ),
    "bad config": ({"config.json": b"{", "model.safetensors": WEIGHTS}, r"config\.json: is not JSON"),
    "bad tensors": ({"config.json": CONFIG, "model.safetensors": b"x" * 20}, r"model\.safetensors: the header"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_without_one_sound_model_are_refused(tmp_path: Path, case: str) -> None:
    files, said = REFUSED[case]
    with pytest.raises(ModelFileError, match=said) as caught:
        open_checkpoint(fill(tmp_path, files))
    assert str(caught.value).startswith(str(tmp_path))


def test_pickles_beside_safetensors_are_left_alone(tmp_path: Path) -> None:
    fill(tmp_path, {"config.json": CONFIG, "model.safetensors": WEIGHTS, "pytorch_model.bin": b"x"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.source.names() == ["a.weight", "b"] and len(checkpoint.files) == 2


def test_paths_that_are_no_model_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, {"m.safetensors": WEIGHTS, "m.bin": b"x", "m.txt": b"x" * 30, "config.json": b"{}"})
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in [
        ("m.safetensors", r"is a part of a model\. Open its folder"),
        ("config.json", r"is a part of a model\. Open its folder"),
        ("m.bin", "is a pickle"),
        ("m.txt", "first four bytes"),
        ("fifo", "not a regular file"),
        ("absent", "cannot be opened: No such file"),
        ("loop", "cannot be opened: Too many levels"),
        ("a\0b", "cannot be opened: embedded null"),
        ("x" * 300, "cannot be opened: File name too long"),
    ]:
        with pytest.raises(ModelFileError, match=said):
            open_checkpoint(tmp_path / name)


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)  # root may read everything
    with pytest.raises(ModelFileError, match=f"{tmp_path}: cannot be read: Permission denied"):
        open_checkpoint(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Hugging Face's cache layout: a snapshot of links to blobs."""
    model = tmp_path / "hub" / "models--org--tiny"
    snapshot = model / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for name, content in {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}.items():
        blob = f"{len(content):064x}"
        (model / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_a_snapshot_of_the_hugging_face_cache(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "shortcut").symlink_to(cache)
    for place in (cache, tmp_path / "shortcut"):
        with open_checkpoint(place) as checkpoint:
            assert checkpoint.source.names() == ["a.weight", "b"]
            assert [path.name for path in checkpoint.files] == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("sub", ["", "Q4_K_M"])
def test_parts_in_a_snapshot_of_the_cache(cache: Path, tmp_path: Path, sub: str) -> None:
    folder = cache.parent / "def456" / sub
    folder.mkdir(parents=True)
    for name, content in parts(tmp_path).items():
        blob = cache.parents[1] / "blobs" / f"blob-{name[-20:]}"
        blob.write_bytes(content)
        (folder / name).symlink_to(os.path.relpath(blob, folder))
    for place in (folder, *folder.iterdir()):
        with open_checkpoint(place) as checkpoint:
            assert len(checkpoint.files) == 3 and all(path.parent == folder for path in checkpoint.files)


def relink(name: str, target: str) -> Callable[[Path], None]:
    def act(cache: Path) -> None:
        (cache / name).unlink()
        (cache / name).symlink_to(target)

    return act


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (relink("config.json", "/etc/hostname"), r"config\.json: is a link that leaves"),
        (
            relink("model.safetensors", "../../../models--org--other/blobs/x"),
            "model.safetensors: is a link that leaves",
        ),
        (relink("tokenizer.json", "../../refs/main"), r"tokenizer\.json: is a link that leaves"),
        (relink("config.json", "../../blobs/absent"), r"config\.json: cannot be opened: No such file"),
        (relink("model.safetensors", "../../blobs"), r"model\.safetensors: is not a regular file"),
        (relink("tokenizer.json", "tokenizer.json"), r"tokenizer\.json: cannot be opened: Too many levels"),
    ],
)
def test_links_lead_to_the_models_own_blobs_alone(cache: Path, act: Callable[[Path], None], said: str) -> None:
    other = cache.parents[2] / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    fill(other, {"x": WEIGHTS})
    (cache.parents[1] / "refs").mkdir()
    fill(cache.parents[1] / "refs", {"main": b"{}"})
    act(cache)
    with pytest.raises(ModelFileError, match=said):
        open_checkpoint(cache)


def test_only_the_caches_own_layout_may_link_out(tmp_path: Path) -> None:
    snapshot = tmp_path / "plain" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "plain" / "blobs").mkdir()
    fill(tmp_path / "plain" / "blobs", {"x": GGUF})
    (snapshot / "m.gguf").symlink_to("../../blobs/x")
    with pytest.raises(ModelFileError, match="is a link that leaves"):
        open_checkpoint(snapshot)
    with open_checkpoint(snapshot / "m.gguf") as checkpoint:  # a file that the user names may be anywhere
        assert checkpoint.architecture == "llama"


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    fill(tmp_path / "real", {"x": b"content"})
    (tmp_path / "link").symlink_to("real/x")
    assert member(tmp_path, "link") == tmp_path / "link"
    for name in ("real/x", "../x", "..", "", "a\\b", str(tmp_path / "real" / "x")):
        assert not is_plain_name(name)
        with pytest.raises(ModelFileError, match="is not the name of a file inside the folder"):
            member(tmp_path, name)


def test_the_default_model(smollm2_path: Path) -> None:
    with open_checkpoint(smollm2_path) as checkpoint:
        assert (
            checkpoint.architecture == "llama" and checkpoint.license == "apache-2.0" and checkpoint.size == 98_362_432
        )
        assert list(checkpoint.bytes_by_type()) == ["Q4_1", "Q8_0", "F32"]
        embedding = checkpoint.source.matrix("token_embd.weight", 49152, 576)[1]
        assert embedding.shape == (49152, 576 // 32 * 34) and np.shares_memory(
            embedding, checkpoint.source.stored("token_embd.weight").stored
        )


def test_a_config_for_hashing_is_the_file_itself(tmp_path: Path) -> None:
    fill(tmp_path, {"config.json": CONFIG, "model.safetensors": WEIGHTS})
    with open_checkpoint(tmp_path) as checkpoint:
        assert json.loads(checkpoint.files[0].read_bytes()) == checkpoint.metadata.values


def test_what_the_system_cannot_map_or_read_is_refused() -> None:
    with pytest.raises(ModelFileError, match="/sys/devices/system/cpu/online: cannot be mapped"):
        open_checkpoint("/sys/devices/system/cpu/online")
    with pytest.raises(ModelFileError, match="/proc/self/mem: cannot be read"):
        read_bounded(Path("/proc/self/mem"), 10)
