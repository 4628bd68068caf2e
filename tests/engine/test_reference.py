"""The engine's logits beside transformers': tiny random models cached and uncached, and SmolLM2 on its dequantised weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from power_lab.engine.batch import Inputs
from power_lab.engine.models import of_architecture
from power_lab.engine.models.bind import bind
from power_lab.engine.models.decoder import Decoder, Workspace
from power_lab.engine.models.describe import describe
from power_lab.engine.plan import Span, StepPlan
from power_lab.engine.request import Request, SamplingParams
from power_lab.engine.tokenizer import Tokenizer
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.engine.weights.gguf_model import GgufModel
from power_lab.engine.weights.source import FileSource
from power_lab.kernels.ops import BLOCK, Ops
from tests import tiny
from tests.engine.llama_cpp import LlamaCpp

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4


def logits_of(model: Decoder, tokens: Sequence[int], chunk: int) -> np.ndarray:
    """Logits at every position, computed `chunk` tokens at a time through the paged cache."""
    pages = -(-len(tokens) // BLOCK)
    caches = model.caches(pages + 1)
    work = Workspace.make(model.spec, model.ops, chunk, chunk, model.weights.head.operand)
    inputs = Inputs(model.ops, chunk, chunk, 1, pages)
    request = Request(0, len(tokens), SamplingParams(seed=0), list(tokens), len(tokens) + 1, frozenset())
    rows = []
    for step, start in enumerate(range(0, len(tokens), chunk)):
        part = tuple(tokens[start : start + chunk])
        span = Span(0, start, part, 0, len(part), tuple(range(1, pages + 1)))
        layout = inputs.layout(len(part), len(part))
        with model.ops.step():
            inputs.fill(layout, StepPlan(step, (span,)), {0: request}, None)
            rows.append(model.ops.tohost(model.forward(layout.batch, caches, work)).copy())
    return np.concatenate(rows)


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the standard deviation of the reference's logits."""
    return float(np.abs(got - want).max() / want.std())


@pytest.mark.parametrize(
    "shape",
    [
        *(tiny.Shape(kind=kind, seed=seed) for seed, kind in enumerate(tiny.KINDS)),
        tiny.Shape(stored="mixed", seed=1),
        tiny.Shape(heads=2, kv_heads=1, head_dim=32, layers=3),
        tiny.Shape(width=48, heads=3, kv_heads=3, head_dim=8),
    ],
    ids=lambda shape: f"{shape.kind}-{shape.stored}-{shape.heads}x{shape.head_dim}",
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


@pytest.mark.parametrize(("model", "greedy"), [("smollm2_path", 1.0), ("gemma_path", 0.998)])
def test_real_models_match_transformers_over_500_positions(
    model: str, greedy: float, numba_ops: Callable[[int], Ops], request: pytest.FixtureRequest
) -> None:
    import torch

    with open_checkpoint(request.getfixturevalue(model)) as checkpoint:
        file, source = checkpoint.metadata, checkpoint.source
        assert isinstance(file, GgufModel)
        tokenizer = Tokenizer.from_gguf(file.metadata)
        tokens = tokenizer.encode((ROOT / "LICENSE").read_text(), special=False, bos=True)[:600]
        assert len(tokens) == 600
        with torch.no_grad():
            want = hf_model(file)(torch.tensor([tokens])).logits[0].numpy()
        spec = of_architecture(checkpoint.architecture).from_gguf(file, source, tokenizer.vocab_size)
        ops = numba_ops(2)
        decoder = Decoder(spec, bind(spec, source, ops), ops, 1024)
    got = logits_of(decoder, tokens, 200)
    assert distance(got, want) <= TOLERANCE
    assert (got.argmax(-1) == want.argmax(-1)).mean() >= greedy
    assert np.array_equal(logits_of(decoder, tokens[:40], 1).view(np.uint32), got[:40].view(np.uint32))


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_real_models_are_as_close_to_llama_cpp_as_its_arithmetic_allows(
    model: str, numba_ops: Callable[[int], Ops], request: pytest.FixtureRequest
) -> None:
    """It quantises activations to 8 bits, so bits differ; what the model says does not."""
    path = request.getfixturevalue(model)
    with open_checkpoint(path) as checkpoint:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata.metadata)  # type: ignore[union-attr]
        described = describe(checkpoint, tokenizer.vocab_size)
        ops = numba_ops(2)
        decoder = Decoder(described.spec, bind(described.spec, described.source, ops), ops, 1024)
    tokens = tokenizer.encode((ROOT / "README.md").read_text(), special=False, bos=True)[:500]
    ours = logits_of(decoder, tokens, 250).astype(np.float64)
    llama_cpp = LlamaCpp(path, tokenizer.vocab_size, best=2000)
    divergences, same = [], []
    for last in range(4, 500, 5):
        theirs = llama_cpp(tokens[: last + 1])
        here = ours[last] - np.logaddexp.reduce(ours[last])
        kept = ~np.isnan(theirs)
        p, q = np.exp(theirs[kept]), np.exp(here[kept])
        rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)  # all other tokens as one
        divergences.append(float((p * np.log(p / q)).sum() + rest_p * np.log(rest_p / rest_q)))
        same.append(np.nanargmax(theirs) == here.argmax())
    assert np.mean(divergences) < 0.02
    assert np.mean(same) >= 0.9


def hf_model(file: GgufModel) -> Any:
    """transformers' model of the file's weights, dequantised by the gguf package, as transformers would have stored them."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    meta, arch = file.metadata, file.metadata["general.architecture"]
    model_type, extra = {"llama": ("llama", {}), "gemma3": ("gemma3_text", GEMMA3)}[arch]
    get = lambda key, default=None: meta.get(f"{arch}.{key}", default)  # noqa: E731
    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    rope = {"rope_type": "default", "rope_theta": get("rope.freq_base")}
    if arch == "gemma3":
        rope = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 10000.0}}
        extra = extra | {"sliding_window": get("attention.sliding_window")}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=get("attention.key_length", get("embedding_length") // heads),
        max_position_embeddings=get("context_length"),
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_parameters=rope,
        tie_word_embeddings=True,
        **extra,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    names = of_architecture(arch).names(of_architecture(arch).from_gguf(file, FileSource(file), config.vocab_size))
    state = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType(int(tensor.type))
        value = np.array(gguf.dequantize(tensor.data, kind)).reshape(tensor.shape)
        if arch == "llama":  # rotary pairs back from neighbours to halves
            for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
                if part in name:
                    value = value.reshape(count, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if arch == "gemma3" and "norm" in name:
            value = value - np.float32(1)
        state[names[name]] = torch.from_numpy(np.ascontiguousarray(value, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    for module in model.modules():  # their buffers were on the meta device
        for name in ("rotary_emb", "embed_tokens"):
            _refill(module, name, config)
    return model.eval()


GEMMA3 = {"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"}


def _refill(module: Any, name: str, config: Any) -> None:
    """Make a submodule's computed buffers anew; its weights stay."""
    child = getattr(module, name, None)
    if child is None:
        return
    if name == "rotary_emb":
        setattr(module, name, type(child)(config))
    elif hasattr(child, "embed_scale"):
        child.embed_scale = child.weight.new_tensor(config.hidden_size**0.5)
