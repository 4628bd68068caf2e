"""The sound inputs that are mutated: small, so that most mutations hit a header; some by the formats' own packages."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine.weights.ggufs import small


def ggufs() -> list[bytes]:
    """Every value type, versions 3 and 2."""
    old = small()
    old.version = 2
    return [bytes(small()), bytes(old)]


def written_ggufs(folder: Path) -> list[bytes]:
    """A file of gguf's writer with a tokenizer and several storage types."""
    path = folder / "written.gguf"
    _write(path, split=0)
    return [path.read_bytes()]


def parts(folder: Path) -> dict[str, bytes]:
    """File name -> content of a model in three parts."""
    _write(folder / "whole.gguf", split=3)
    paths = sorted(folder.glob("whole-0000?-of-00003.gguf"))
    assert len(paths) == 3
    return {path.name: path.read_bytes() for path in paths}


def _write(path: Path, split: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(2)
    writer.add_head_count_kv([1, 2])
    writer.add_license("mit")
    writer.add_token_list(["a", "é", "Ġthe"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    writer.add_token_types([1, 3, 4])
    rng = np.random.default_rng(0)
    for index, kind in enumerate(("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q6_K", "I32")):
        number = gguf.GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[number]
        columns = max(values, 8)
        writer.add_tensor(
            f"blk.{index}.{kind}.weight",
            rng.integers(0, 256, (2, columns // values * size), np.uint8),
            raw_dtype=number,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference_gguf(path: Path) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], bytes]]]:
    """key -> repr of the value, and name -> type, row-major shape and bytes, as gguf's reader has them."""
    import gguf

    reader = gguf.GGUFReader(path)
    metadata = {key: repr(field.contents()) for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    return metadata, {
        tensor.name: (tensor.tensor_type.name, tuple(int(size) for size in tensor.shape[::-1]), tensor.data.tobytes())
        for tensor in reader.tensors
    }


def safe(entries: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None = None) -> bytes:
    """A SafeTensors file of name -> dtype, shape and bytes."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in entries.values())


def safetensors() -> list[bytes]:
    """Matrices, vectors, a scalar, nothing at all, sub-byte and unaligned tensors."""
    some = {
        "a.weight": ("F32", [2, 3], bytes(range(24))),
        "b.weight": ("BF16", [4], bytes(range(8))),
        "c": ("U8", [3], b"abc"),
        "d.weight": ("F16", [2, 1], b"wxyz"),
        "e": ("F32", [], bytes(4)),
        "f": ("F32", [0, 3], b""),
        "g": ("F4", [2, 1], b"q"),
    }
    return [safe(some, {"format": "pt"}), safe({"a": ("F32", [1], bytes(4))}), safe({})]


def configs() -> list[bytes]:
    """A text model's and a wrapper's."""
    plain = {
        "model_type": "llama", "hidden_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "sliding_attention"], "eos_token_id": [1, 2], "pad_token_id": None,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return [json.dumps(plain).encode(), json.dumps({"model_type": "gemma3", "text_config": plain}, indent=2).encode()]


def folder() -> dict[str, bytes]:
    """File name -> content of a Hugging Face folder in two shards."""
    one = {"a.weight": ("F32", [2, 3], bytes(24)), "b.weight": ("BF16", [4], bytes(8))}
    two = {"c.weight": ("F16", [2, 2], bytes(8))}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    where = {name: file for file, tensors in zip(names, (one, two), strict=True) for name in tensors}
    return {
        "config.json": configs()[0],
        "model.safetensors.index.json": json.dumps({"metadata": {"total_size": 40}, "weight_map": where}).encode(),
        names[0]: safe(one),
        names[1]: safe(two),
    }
