"""The bf16 file that measurements make of a quantised one (bench/bf16.py): the same text side, the same values, rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from bench.bf16 import convert
from power_lab.engine.models.describe import describe
from power_lab.engine.weights.checkpoint import open_checkpoint
from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.quants import QuantType
from tests import tiny, tiny_gguf


def test_values_are_the_dequantised_ones_rounded_to_bf16(tmp_path: Path) -> None:
    quantised, plain, again = (tmp_path / name for name in ("a.gguf", "b.gguf", "c.gguf"))
    tiny_gguf.write(quantised, tiny.Shape(layers=2, width=64, ffn=96, stored="Q4_1"))
    convert(quantised, plain)
    convert(quantised, again)
    assert plain.read_bytes() == again.read_bytes()
    with open_checkpoint(quantised) as old, open_checkpoint(plain) as new:
        before, after = describe(old), describe(new)
        assert before.spec == after.spec
        assert sorted(before.source.names()) == sorted(after.source.names())
        changed = 0
        for name in (f"blk.{layer}.{part}.weight" for layer in range(2) for part in ("attn_q", "ffn_up", "ffn_down")):
            rows, cols = (64, 64) if "attn_q" in name else (96, 64) if "ffn_up" in name else (64, 96)
            kind, host = after.source.matrix(name, rows, cols)
            was, stored = before.source.matrix(name, rows, cols)
            assert kind == QuantType.BF16 and was == QuantType.Q4_1
            values, exact = dequantise(host, kind, cols), dequantise(stored, was, cols)
            assert np.abs(values - exact).max() <= np.abs(exact).max() * 2**-8
            changed += int((values != exact).sum())
        assert changed
    texts = [{f.name: f.contents() for f in GGUFReader(path).fields.values()} for path in (quantised, plain)]
    assert texts[0]["tokenizer.ggml.tokens"] == texts[1]["tokenizer.ggml.tokens"]
