"""llama.cpp as the reference: its tokenizer over any vocabulary, carried by a model too small to notice."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

WIDTH = 32


def write_model(path: Path, metadata: dict[str, Any]) -> Path:
    """A one-layer Llama of zeros with the given tokenizer metadata."""
    vocab = len(metadata["tokenizer.ggml.tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            writer.add_array(key, value.tobytes())
        elif isinstance(value, (list, np.ndarray)):
            writer.add_array(key, list(value) if isinstance(value, list) else value.tolist())
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
            add(key, value)  # type: ignore[arg-type]
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, rows in {"token_embd": vocab, **{f"blk.0.{part}": WIDTH for part in _MATRICES}}.items():
        writer.add_tensor(f"{name}.weight", np.zeros((rows, WIDTH), np.float16))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.zeros(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class LlamaCpp:
    """An open model, asked for ids."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(path), 64, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self._server = xllamacpp.Server(params)

    def ids(self, text: str, *, special: bool, bos: bool) -> list[int]:
        """Token ids; `special` and `bos` mean what they mean in `Tokenizer.encode`."""
        body = json.dumps({"content": text, "parse_special": special, "add_special": bos}).encode()
        url = f"{self._server.listening_address}/tokenize"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)["tokens"]
