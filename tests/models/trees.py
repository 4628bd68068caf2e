"""Model files that are sound but tiny, and the caches of other programs with such files in them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from tests.engine.weights.ggufs import ARRAY, F32, STRING, U16, U32, Gguf, Tensor, pair

MAIN = "0123456789abcdef0123456789abcdef01234567"
OLD = "fedcba9876543210fedcba9876543210fedcba98"


def gguf(architecture: str = "llama", seed: int = 0, kind: int = 0, split: tuple[int, int] | None = None) -> bytes:
    """A model of one layer, of which headers say all that a list wants. `split` is (number from 0, count)."""
    numbers = {"context_length": 4096, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
    numbers |= {"attention.head_count": 2, "attention.head_count_kv": 1}
    pairs = [pair("general.architecture", STRING, architecture), pair("general.license", STRING, "mit")]
    pairs += [pair(f"{architecture}.{key}", U32, number) for key, number in numbers.items()]
    pairs += [pair(f"{architecture}.attention.layer_norm_rms_epsilon", F32, 1e-5)]
    pairs += [pair("tokenizer.ggml.tokens", ARRAY, (STRING, ["a", "b", "c"])), pair("test.seed", U32, seed)]
    row = {0: 32 * 4, 16: 66}[kind]
    columns = {0: 32, 16: 256}[kind]
    tensors = [
        Tensor("token_embd.weight", (columns, 3), kind, bytes(3 * row)),
        Tensor("output_norm.weight", (32,), 0, bytes(128)),
    ]
    if split is not None:
        number, count = split
        pairs = pairs if number == 0 else []
        pairs += [pair("split.no", U16, number), pair("split.count", U16, count), pair("split.tensors.count", 5, count)]
        tensors = [Tensor(f"blk.{number}.weight", (4,), 0, struct.pack("<4f", *range(4)))]
    return bytes(Gguf(pairs, tensors))


def shards(folder: Path, base: str, count: int, leave_out: tuple[int, ...] = ()) -> list[Path]:
    """The parts of a sharded model, numbered from 1 in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(1, count + 1):
        path = folder / f"{base}-{number:05}-of-{count:05}.gguf"
        if number not in leave_out:
            path.write_bytes(gguf(split=(number - 1, count)))
            made.append(path)
    return made


def repository(hub: Path, name: str, files: dict[str, bytes], commit: str = MAIN, main: bool = True) -> Path:
    """A repository in Hugging Face's cache; returns its snapshot. Large files are named by SHA-256, others as Git does."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    if main:
        (folder / "refs" / "main").write_text(commit)
    for file, content in files.items():
        large = file.endswith((".gguf", ".safetensors"))
        digest = hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        blob = folder / "blobs" / digest.hexdigest()
        blob.write_bytes(content)
        link = snapshot / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (file.count("/") + 2), "blobs", blob.name))
    return snapshot


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
