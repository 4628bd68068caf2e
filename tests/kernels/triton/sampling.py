"""Rows to sample from, and what must come out, for the interpreter's and the GPU's tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from power_lab.kernels import reference
from power_lab.kernels.ops import SampleRows
from power_lab.kernels.triton.sample import Scratch, sample


@dataclass(frozen=True)
class Row:
    """One row's controls, as in `SampleRows`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    seed: int = 7
    position: int = 0
    before: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)


CHAINS = [
    Row(temperature=0.0),
    Row(),
    Row(temperature=0.3),
    Row(temperature=5.0),
    Row(top_k=1),
    Row(top_k=40),
    Row(top_k=5000),
    Row(top_p=0.7),
    Row(top_p=1e-6),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(top_k=30, top_p=0.9, min_p=0.02, temperature=1.3),
    Row(top_k=200, top_p=0.99, temperature=2.0),
]


def controls(rows: Sequence[Row], device: str = "cpu", spare: int = 5) -> SampleRows:
    """Rows on the device; the lists begin and end with `spare` entries that no span names."""
    history, ids, values, spans, bias_spans = [3] * spare, [2] * spare, [1e9] * spare, [], []
    for row in rows:
        start, first = len(history), len(ids)
        history += row.before + row.generated
        ids += row.bias
        values += row.bias.values()
        spans.append([start, start + len(row.before), len(history)])
        bias_spans.append([first, len(ids)])

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    return SampleRows(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        repetition=column("repetition", torch.float32),
        presence=column("presence", torch.float32),
        seeds=torch.from_numpy(np.array([row.seed for row in rows], np.uint64).view(np.int64)).to(device),
        positions=column("position", torch.int64),
        history=torch.tensor(history + [3] * spare, dtype=torch.int32, device=device),
        history_span=torch.tensor(spans, device=device),
        bias_ids=torch.tensor(ids + [2] * spare, dtype=torch.int32, device=device),
        bias_values=torch.tensor(values + [1e9] * spare, dtype=torch.float32, device=device),
        bias_span=torch.tensor(bias_spans, device=device),
    )


def poisoned(rows: int, vocabulary: int, device: str = "cpu", **sizes: int) -> Scratch:
    """Scratch in which only what must be 0 is."""
    scratch = Scratch.allocate(rows, vocabulary, device, **sizes)
    for name, array in zip(scratch._fields, scratch, strict=True):
        if name not in ("arrived", "seen"):
            array.fill_(torch.nan if array.is_floating_point() else -(2**31) + 12345)
    return scratch


def draw(logits: Tensor, rows: Sequence[Row], scratch: Scratch | None = None, **options: object) -> list[int]:
    """One token per row, from poisoned scratch."""
    device = str(logits.device)
    scratch = scratch or poisoned(len(rows), logits.shape[1], device)
    tokens = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
    before = logits.clone()
    sample(logits, controls(rows, device), tokens, scratch, **options)  # type: ignore[arg-type]
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32)), "logits are read, not changed"
    assert not scratch.arrived.any() and not scratch.seen.any(), "counters and flags are 0 again"
    return tokens.tolist()


def penalised(logits: Tensor, row: Row) -> Tensor:
    """f64 [V]."""
    f32 = lambda x: float(np.float32(x))  # noqa: E731
    every, bias = list(row.before + row.generated), {token: f32(value) for token, value in row.bias.items()}
    penalties = f32(row.repetition), f32(row.presence)
    return reference.penalise(logits.cpu(), every, list(row.generated), *penalties, bias).to(logits.device)


def scores(logits: Tensor, row: Row) -> Tensor:
    """f64 [V]: what the reference's draw takes the largest of; -inf for tokens that do not survive."""
    z, f32 = penalised(logits, row), lambda x: float(np.float32(x))
    if row.temperature == 0:
        return z
    y = (z - z.max()) / f32(row.temperature)
    with torch.device(logits.device):
        alive = reference.survivors(y, row.top_k, f32(row.top_p), f32(row.min_p))
    return (y + noise(row.seed, row.position, len(y), logits.device)).masked_fill(~alive, -torch.inf)


def noise(seed: int, position: int, count: int, device: torch.device) -> Tensor:
    """`reference.gumbel` of tokens 0..count-1, all at once."""
    mask, token = (1 << 32) - 1, torch.arange(count, device=device)
    zero = torch.zeros_like(token)
    counter = [token // 64 * 16 + token % 16, zero, zero + (position & mask), zero + (position >> 32)]
    c0, c1, c2, c3 = counter
    k0, k1 = seed & mask, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # modulo 2^64
        c0, c1, c2, c3 = (p1 >> 32 & mask) ^ c1 ^ k0, p1 & mask, (p0 >> 32 & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    word = torch.stack([c0, c1, c2, c3]).gather(0, (token // 16 % 4)[None])[0]
    return -torch.log(-torch.log1p(-(word.double() + 0.5) * 2.0**-32))


def at(row: Row, position: int) -> Row:
    return replace(row, position=position)
