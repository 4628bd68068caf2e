"""What each storage type loses, with our quantiser and with llama.cpp's own.

    python bench/quantise.py [--threads 2] [--logits] [--output bench/results/quantise-cpu-DATE.json]

Tensors: SmolLM2's token embedding (stored as Q8_0, taken as the truth; its 576 columns are no multiple of 256, so four token rows make one
row here), and drawn ones, Gaussian and heavy-tailed. Times are of one run on one thread, others may be working: an order of magnitude only.

`--logits` quantises all layers of SmolLM2 to Q2_K and Q3_K and compares the model's predictions before and after (minutes; transformers).
The file's own layers are Q4_1, so types with more levels would show its grid rather than their own loss. `x²` weighs errors by the square
of the value, `importance` by the mean square of the activations on other text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.cpu import about  # noqa: E402
from power_lab.engine.config import Paths  # noqa: E402
from power_lab.engine.weights.gguf import GgufFile  # noqa: E402
from power_lab.engine.weights.quantise import error, quantise  # noqa: E402
from power_lab.engine.weights.quantise.affine import SUB_TOP, quantise_affine_super  # noqa: E402
from power_lab.engine.weights.quantise.symmetric import quantise_symmetric  # noqa: E402
from power_lab.kernels.dequantise import dequantise  # noqa: E402
from power_lab.kernels.quants import QuantType  # noqa: E402
from tests.engine.weights import llama_cpp  # noqa: E402

JOINED = 4
EVALUATED = ("LICENSE", "CONTRIBUTING.md", "power_lab/engine/blocks.py", "README.md")
CALIBRATED = ("CHANGELOG.md", "power_lab/errors.py", "docs/lab-notes.md")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Paths.default().models / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--threads", type=int, default=2, help="of transformers")
    parser.add_argument("--logits", action="store_true")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    file = GgufFile.open(args.file)
    tensors = list(figures(file))
    logits = list(predictions(file, args.threads)) if args.logits else []
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps({"run": about(args), "tensors": tensors, "logits": logits}, indent=1) + "\n")


def figures(file: GgufFile) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    samples = {
        "SmolLM2 token_embd, 4,096 tokens": values_of(file, "token_embd.weight")[:4096].reshape(-1, JOINED * 576),
        "Gaussian": rng.standard_normal((1024, 2304), dtype=np.float32),
        "Student t, 4 degrees": rng.standard_t(4, (1024, 2304)).astype(np.float32),
    }
    for name, values in samples.items():
        print(f"\n{name}, {values.shape[0]} x {values.shape[1]}")
        print("type     bits/weight  rmse/rms   largest/rms   cosine      of llama.cpp's rmse   Mvalues/s")
        for type in sorted(
            QuantType, key=lambda type: error(values[:1], quantise(values[:1], type), type).bits_per_weight
        ):
            start = time.perf_counter()
            stored = quantise(values, type)
            seconds = time.perf_counter() - start
            ours = error(values, stored, type)
            theirs = ours if type == QuantType.F32 else error(values, llama_cpp.quantise(values, type), type)
            ratio = ours.rmse / theirs.rmse if theirs.rmse else 1.0
            print(
                f"{type.name:8} {ours.bits_per_weight:8.4f} {ours.rmse:12.6f} {ours.largest:10.4f} {ours.cosine:14.8f}"
                f" {ratio:12.4f} {values.size / seconds / 1e6:18.1f}"
            )
            yield {
                "tensor": name,
                "type": type.name,
                **ours._asdict(),
                "llama_cpp_rmse": theirs.rmse,
                "values_per_s": values.size / seconds,
            }


def values_of(file: GgufFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    data = np.atleast_2d(np.asarray(tensor.data))
    return dequantise(data, tensor.type, tensor.shape[-1]).reshape(tensor.shape)


def predictions(file: GgufFile, threads: int) -> Iterator[dict[str, Any]]:
    """KL divergence of next-token distributions from those of the file's own weights, and how often the likeliest token stays."""
    import torch

    from power_lab.engine.tokenizer import Tokenizer

    torch.set_num_threads(threads)
    model, tokenizer = transformers_model(file), Tokenizer.from_gguf(file.metadata)

    def tokens(names: tuple[str, ...]) -> list[torch.Tensor]:
        texts = [(ROOT / name).read_text() for name in names]
        return [torch.tensor([tokenizer.encode(text, special=False, bos=True)[:512]]) for text in texts]

    def run() -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([torch.log_softmax(model(ids).logits[0], dim=-1) for ids in tokens(EVALUATED)])

    layers = {name: part for name, part in model.model.named_modules() if isinstance(part, torch.nn.Linear)}
    importance = mean_squares(model, layers, tokens(CALIBRATED))
    truth = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    before = run()
    print(
        f"\nSmolLM2, all layers, {len(before)} positions\ntype     method                      rmse/rms     KL   same top token"
    )
    for type in (QuantType.Q2_K, QuantType.Q3_K):
        for method, convert in methods(type).items():
            lost = power = 0.0
            for name, layer in layers.items():
                values = truth[name].numpy().reshape(-1, JOINED * truth[name].shape[1])
                stored = convert(values, np.tile(importance[name], JOINED))
                got = dequantise(stored, type, values.shape[1])
                lost, power = lost + float(((got - values) ** 2).sum()), power + float((values**2).sum())
                layer.weight.data = torch.from_numpy(got.reshape(truth[name].shape))
            after = run()
            kl = float((before.exp() * (before - after)).sum(-1).mean())
            same = float((before.argmax(-1) == after.argmax(-1)).float().mean())
            rmse = (lost / power) ** 0.5
            print(f"{type.name:8} {method:24} {rmse:10.4f} {kl:9.4f} {same:10.3f}")
            yield {"type": type.name, "method": method, "rmse": rmse, "kl": kl, "top1": same, "positions": len(before)}


def methods(type: QuantType) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    def square(values: np.ndarray, _: np.ndarray) -> np.ndarray:
        method = quantise_affine_super if type in SUB_TOP else quantise_symmetric
        blocks = values.reshape(-1, 256)
        parts = [method(type, part, part**2 + 1e-12) for part in np.array_split(blocks, len(blocks) // 256 + 1)]
        return np.concatenate(parts).reshape(len(values), -1)

    return {
        "llama.cpp": lambda values, _: llama_cpp.quantise(values, type),
        "ours": lambda values, _: quantise(values, type),
        "ours, x²": square,
        "llama.cpp, importance": lambda values, weights: llama_cpp.quantise(values, type, weights),
        "ours, importance": lambda values, weights: quantise(values, type, weights),
    }


def mean_squares(model: Any, layers: dict[str, Any], texts: list[Any]) -> dict[str, np.ndarray]:
    """[K] of each layer: the mean square of every column of its input, up to a factor."""
    import torch

    sums: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[Any, ...], __: Any) -> None:
            sums[name] = sums.get(name, 0) + inputs[0].double().square().sum((0, 1))

        return hook

    hooks = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    with torch.no_grad():
        for ids in texts:
            model(ids)
    for hook in hooks:
        hook.remove()
    return {name: (total / total.mean()).float().numpy() for name, total in sums.items()}


def transformers_model(file: GgufFile) -> Any:
    """transformers' Llama on the file's values; GGUF interleaves the rotary halves of q and k, transformers does not."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    meta = file.metadata
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    state = {}
    for name in file.tensors:
        value = values_of(file, name)
        for part, count in (("attn_q.", heads), ("attn_k.", kv_heads)):
            if part in name:
                value = value.reshape(count, -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        state[transformers_name(name)] = torch.from_numpy(np.ascontiguousarray(value))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def transformers_name(name: str) -> str:
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    _, index, part, _ = name.split(".")
    attention = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    mlp = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    place = norms.get(part) or (f"self_attn.{attention[part]}" if part in attention else f"mlp.{mlp[part]}")
    return f"model.layers.{index}.{place}.weight"


if __name__ == "__main__":
    main()
