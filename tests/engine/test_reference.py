"""The engine's logits beside transformers': tiny random models cached and uncached, and SmolLM2 on its dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine import batch
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.weights.gguf import GgufFile
from power_lab.kernels.ops import BLOCK, Ops
from tests import tiny

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4


def logits_of(model: Decoder, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits at every position, computed `chunk` tokens at a time through the paged cache."""
    pages = -(-len(tokens) // BLOCK)
    a = model.spec.attention
    caches = tuple(model.ops.kv_cache(pages + 1, a.kv_heads, a.head_dim) for _ in range(model.spec.layers))
    work = Workspace.make(model.spec, model.ops, chunk, chunk)
    rows = []
    for step, start in enumerate(range(0, len(tokens), chunk)):
        part = tuple(tokens[start : start + chunk])
        span = Span(0, start, part, 0, len(part), tuple(range(1, pages + 1)), 0)
        logits = model.forward(batch.build(StepPlan(step, (span,)), model.ops), caches, work)
        rows.append(model.ops.tohost(logits).copy())
    return np.concatenate(rows)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the standard deviation of the reference's logits."""
    return float(np.abs(got - want).max() / want.std())


@pytest.mark.parametrize(
    "shape",
    [
        tiny.Shape(),
        tiny.Shape(quantised=True, seed=1),
        tiny.Shape(heads=2, kv_heads=1, head_dim=32, layers=3),
        tiny.Shape(width=48, heads=3, kv_heads=3, head_dim=8),
    ],
)
def test_tiny_models_match_transformers(shape: tiny.Shape, numba_ops: Callable[[int], Ops]) -> None:
    import torch

    tokens = np.random.default_rng(0).integers(0, 256, 300).tolist()
    with torch.no_grad():
        want = tiny.reference_model(shape)(torch.tensor([tokens])).logits[0].numpy()
    model = tiny.loaded(shape, numba_ops(2)).model
    results = [logits_of(model, tokens, chunk) for chunk in (300, 64, 7, 1)]
    assert distance(results[0], want) <= TOLERANCE
    for other in results[1:]:
        assert np.array_equal(other.view(np.uint32), results[0].view(np.uint32)), "chunking changed bits"


def test_smollm2_matches_transformers_over_500_positions(smollm2_path: Path, numba_ops: Callable[[int], Ops]) -> None:
    import torch

    from power_lab.engine.models import llama
    from power_lab.engine.tokenizer import Tokenizer
    from power_lab.engine.weights.source import GgufSource

    file = GgufFile.open(smollm2_path)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    tokens = tokenizer.encode((ROOT / "LICENSE").read_text(), special=False, bos=True)[:600]
    assert len(tokens) == 600
    with torch.no_grad():
        want = hf_model(file)(torch.tensor([tokens])).logits[0].numpy()
    spec = llama.spec(file, tokenizer.vocab_size)
    ops = numba_ops(2)
    model = Decoder(spec, llama.weights(spec, GgufSource(file), ops), ops, 1024)
    got = logits_of(model, tokens, 200)
    assert distance(got, want) <= TOLERANCE
    assert np.array_equal(got.argmax(-1), want.argmax(-1))
    assert np.array_equal(logits_of(model, tokens[:40], 1).view(np.uint32), got[:40].view(np.uint32))


def hf_model(file: GgufFile) -> Any:
    """transformers' Llama on the file's weights, dequantised by the gguf package, rotary pairs put back to halves."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    meta = file.metadata
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType(int(tensor.type))
        value = np.array(gguf.dequantize(tensor.data, kind)).reshape(tensor.shape)
        for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if part in name:
                value = value.reshape(count, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        state[tiny.hf_name(name)] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model.eval()
