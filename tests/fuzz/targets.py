"""What is fuzzed: name -> a maker of `case(seed) -> outcome`, run by bench/fuzz.py at length and by a test at every change.

A case mutates a sound input by its seed and hands it to the code. It returns a short label for what may happen, and raises whatever may
not: `Disagreement` for a wrong load, any other exception for an error without a type of our own. Time and memory are the runner's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.engine.weights.config_json import JsonConfig
from power_lab.engine.weights.gguf_model import GgufModel
from power_lab.engine.weights.safetensors import SafeTensorsFile
from power_lab.engine.weights.source import FileSource
from power_lab.engine.weights.tensor import TensorInfo
from power_lab.errors import ModelFileError
from tests.fuzz import originals, templates
from tests.fuzz.files import mutate_bytes, mutate_gguf, mutate_json, mutate_safetensors

Case = Callable[[int], str]

REFUSED, SAME, AGREED, STRICTER = (
    "refused",
    "loaded the same",
    "loaded as the reference reads it",
    "refused what the reference reads",
)


class Disagreement(AssertionError):
    """Loaded, but not what the reference reads."""


def gguf(folder: Path) -> Case:
    """One GGUF file; the `gguf` package is the reference."""
    sound = [*originals.ggufs(), *originals.written_ggufs(folder)]
    loaded = [_gguf_content(folder, data) for data in sound]

    def case(seed: int) -> str:
        rng = random.Random(seed)
        which = rng.randrange(len(sound))
        try:
            content = _gguf_content(folder, mutate_gguf(sound[which], rng))
        except ModelFileError as error:
            return _refused(error, "mutated.gguf")
        if content == loaded[which]:
            return SAME
        for ours, theirs in zip(content, originals.reference_gguf(folder / "mutated.gguf"), strict=True):
            for name in ours.keys() | theirs.keys():
                if ours.get(name) != theirs.get(name):
                    raise Disagreement(f"{name!r}: {str(ours.get(name))[:200]} against {str(theirs.get(name))[:200]}")
        return AGREED

    return case


def gguf_parts(folder: Path) -> Case:
    """One part of three is mutated: what loads has exactly the model's tensors or the mutated part's own bytes."""
    sound = originals.parts(folder)
    names = list(sound)

    def case(seed: int) -> str:
        rng = random.Random(seed)
        mutated = rng.choice(names)
        for name, data in sound.items():
            fresh(folder / name, mutate_gguf(data, rng) if name == mutated else data)
        try:
            with GgufModel.open(folder / rng.choice(names)) as model:
                count = sum(len(originals.reference_gguf(path)[1]) for path in model.files)
                if len(model.tensors) != count:
                    raise Disagreement(f"{len(model.tensors)} tensors of {count}")
                return AGREED if len(model.files) == 3 else "loaded one file as a whole model"
        except ModelFileError as error:
            return _refused(error, str(folder))

    return case


def safetensors(folder: Path) -> Case:
    """One SafeTensors file; the `safetensors` package is the reference, and must not be the stricter of both."""
    import safetensors as package

    sound = originals.safetensors()
    path = folder / "mutated.safetensors"

    def case(seed: int) -> str:
        rng = random.Random(seed)
        data = mutate_safetensors(rng.choice(sound), rng)
        fresh(path, data)
        try:
            reference = {
                name: (item["dtype"], item["shape"], bytes(item["data"])) for name, item in package.deserialize(data)
            }
        except package.SafetensorError:
            reference = None
        try:
            with SafeTensorsFile.open(path) as file:
                content = {name: (t.kind, list(t.shape), t.stored.tobytes()) for name, t in file.tensors.items()}
                _bind_all(FileSource(file), file.tensors)
        except ModelFileError as error:
            label = _refused(error, path.name)
            return label if reference is None else STRICTER
        if reference != content:
            raise Disagreement(f"the reference {'refuses this' if reference is None else 'reads otherwise'}")
        return AGREED

    return case


def config(folder: Path) -> Case:
    """A config.json; Python's parser is the reference, typed access never raises anything of its own."""
    sound = originals.configs()
    path = folder / "config.json"

    def case(seed: int) -> str:
        rng = random.Random(seed)
        data = mutate_json(rng.choice(sound), rng) if rng.random() < 0.9 else mutate_bytes(rng.choice(sound), rng)
        fresh(path, data)
        try:
            config = JsonConfig.open(path)
        except ModelFileError as error:
            return _refused(error, path.name)
        if config.values != json.loads(data):
            raise Disagreement("Python's parser reads otherwise")
        for key in (
            "model_type",
            "hidden_size",
            "rope_parameters.rope_theta",
            "layer_types",
            "text_config.hidden_size",
            "eos_token_id",
        ):
            for kind in (int, float, str, bool):
                with suppress(ModelFileError):
                    config.require(key, kind, 0, 1 << 20)
                with suppress(ModelFileError):
                    config.require_list(key, kind, None, 0, 1 << 20)
        with suppress(ModelFileError):
            config.section("text_config").require("hidden_size", int)
        return AGREED

    return case


def folder(folder: Path) -> Case:
    """A sharded SafeTensors folder with one file mutated: what loads has every tensor of every file that it names."""
    sound = originals.folder()
    names = list(sound)

    def case(seed: int) -> str:
        rng = random.Random(seed)
        mutated = rng.choice([*names, "model.safetensors.index.json"])
        for name, data in sound.items():
            mutate = mutate_json if name.endswith(".json") else mutate_safetensors
            fresh(folder / name, mutate(data, rng) if name == mutated else data)
        try:
            with open_checkpoint(folder) as checkpoint:
                _bind_all(
                    checkpoint.source, {name: checkpoint.source.stored(name) for name in checkpoint.source.names()}
                )
                stored = {
                    name
                    for path in checkpoint.files
                    if path.suffix == ".safetensors"
                    for name in SafeTensorsFile.open(path).tensors
                }
                if stored != set(checkpoint.source.names()):
                    raise Disagreement(f"{sorted(stored)} are stored, {checkpoint.source.names()} are loaded")
                return AGREED
        except ModelFileError as error:
            return _refused(error, str(folder))

    return case


TARGETS: Mapping[str, Callable[[Path], Case]] = {
    "gguf": gguf,
    "gguf-parts": gguf_parts,
    "safetensors": safetensors,
    "config": config,
    "folder": folder,
    "template": templates.template,
}


def fresh(path: Path, data: bytes) -> None:
    """Write a new inode: mappings of earlier files stay valid."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _refused(error: ModelFileError, named: str) -> str:
    if named not in str(error) or len(str(error)) > 2000:
        raise Disagreement(f"the error does not name the file, or at length: {str(error)[:2000]!r}")
    return REFUSED


def _gguf_content(folder: Path, data: bytes) -> tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    path = folder / "mutated.gguf"
    fresh(path, data)
    with GgufModel.open(path) as model:
        _bind_all(FileSource(model), model.tensors)
        metadata = {
            key: repr(value.tolist() if isinstance(value, np.ndarray) else value)
            for key, value in model.metadata.items()
        }
        return metadata, {name: (t.kind, t.shape, t.stored.tobytes()) for name, t in model.tensors.items()}


def _bind_all(source: FileSource, tensors: Mapping[str, TensorInfo]) -> None:
    """Every tensor comes in the form that kernels take, or is refused by name."""
    for name, tensor in tensors.items():
        try:
            if len(tensor.shape) == 1:
                _, data = source.vector(name, *tensor.shape)
            else:
                _, data = source.matrix(name, *(tensor.shape if len(tensor.shape) == 2 else (1, 1)))
        except ModelFileError as error:
            if repr(name) not in str(error):
                raise Disagreement(f"the error does not name the tensor: {error}") from error
            continue
        if not data.flags.aligned or data.tobytes() != np.ascontiguousarray(tensor.stored).tobytes():
            raise Disagreement(f"tensor {name!r} is not what the file holds")
