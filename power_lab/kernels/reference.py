"""The plain truth of every operation, in torch: short, slow, double precision. Kernels are tested against it.

Functions take and return dense tensors; paging, fusion and layouts are the kernels' business.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from power_lab.kernels.dequantise import dequantise
from power_lab.kernels.ops import LONGEST_MATCH, Activation
from power_lab.kernels.quants import QuantType, row_bytes


def dequantize(type: QuantType, data: np.ndarray, rows: int, cols: int) -> Tensor:
    """f32 [rows, cols] of a stored matrix; `data` is any array of its bytes. Source: ggml's block formats."""
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(rows, row_bytes(type, cols))
    return torch.from_numpy(dequantise(raw, type, cols))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R, K], weight [N, K], bias [N] -> f64 [R, N]."""
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def gate_up(x: Tensor, gate: Tensor, up: Tensor, activation: Activation = "silu") -> Tensor:
    """f(x Wg^T) * (x Wu^T)."""
    g = linear(x, gate)
    active = torch.nn.functional.silu(g) if activation == "silu" else torch.nn.functional.gelu(g, approximate="tanh")
    return active * linear(x, up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


def frequencies(dim: int, theta: float) -> list[float]:
    """theta^(-2i / dim) for each pair of `dim` rotated values."""
    return (theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)).tolist()


def rope_tables(positions: int, frequencies: list[float], magnitude: float = 1.0) -> Tensor:
    """f64 [positions, pairs, 2]: magnitude times cosine and sine."""
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    return magnitude * torch.stack([angle.cos(), angle.sin()], dim=-1)


def rope(heads: Tensor, turn: Tensor, interleaved: bool) -> Tensor:
    """Rotate [R, H, D] by `turn` [R, pairs, 2]; dimensions beyond 2 * pairs pass."""
    half = turn.shape[1]
    out = heads.double().clone()
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b, cos, sin = heads[..., first].double(), heads[..., second].double(), turn[:, None, :, 0], turn[:, None, :, 1]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """One row over its keys: q [H, D], keys and values [n, KV heads, D], the row's own last; sinks [H] -> f64 [H, D]."""
    group = q.shape[0] // keys.shape[1]
    k, v = (t[-window:].double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = scale * torch.einsum("hd,nhd->hn", q.double(), k)
    scores = softcap(scores, cap) if cap else scores
    beside = [] if sinks is None else [sinks.double()[:, None]]
    weights = torch.softmax(torch.cat([scores, *beside], dim=-1), dim=-1)[:, : scores.shape[1]]
    return torch.einsum("hn,nhd->hd", weights, v)


def softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x.double() / cap)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011)."""
    mask = (1 << 32) - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3


def noise_word(seed: int, position: int, token: int) -> int:
    """The 32 random bits of one token at one position: word (token / 16) % 4 of lane token % 16 of its group of 64."""
    mask = (1 << 32) - 1
    counter = (token // 64 * 16 + token % 16, 0, position & mask, position >> 32)
    return philox(counter, (seed & mask, seed >> 32))[token // 16 % 4]


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise, keyed by (seed, position, token)."""
    u = (noise_word(seed, position, token) + 0.5) * 2.0**-32
    return float(-np.log(-np.log1p(-u)))


def penalise(
    logits: Tensor, history: list[int], generated: list[int], repetition: float, presence: float, bias: dict[int, float]
) -> Tensor:
    """f64 [V]: repetition over `history` (which includes `generated`), presence over `generated`, then biases."""
    z = logits.double().clone()
    for token in set(history):
        z[token] = z[token] / repetition if z[token] > 0 else z[token] * repetition
    for token in set(generated):
        z[token] -= presence
    for token, value in bias.items():
        z[token] += value
    return z


def survivors(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """bool [V]: what top-k, then top-p over what top-k left, then min-p keep. z is already divided by the temperature."""
    order = torch.sort(-z, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    mass = torch.softmax(z[order], dim=0)
    before = mass.cumsum(0) - mass
    keep = order[(before < top_p) & (mass >= min_p * mass[0])] if top_p < 1 else order[mass >= min_p * mass[0]]
    alive = torch.zeros(z.shape[0], dtype=torch.bool)
    alive[keep if len(keep) else order[:1]] = True
    return alive


def sample(z: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    """The token that Gumbel-max draws from penalised logits z [V]; temperature 0 takes the largest, the lowest id on a tie."""
    if temperature == 0:
        return int((z == z.max()).nonzero()[0])
    y = (z - z.max()).double() / temperature
    noise = torch.tensor([gumbel(seed, position, t) for t in range(len(y))], dtype=torch.float64)
    return int((y + noise).masked_fill(~survivors(y, top_k, top_p, min_p), -torch.inf).argmax())


def logprobs(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.double(), dim=-1)


def take(table: Tensor, index: Tensor) -> Tensor:
    """Rows of table [any, W]; zeros where the index [R] is negative."""
    return torch.where(index[:, None] < 0, torch.zeros((), dtype=table.dtype), table[index.clamp(min=0)])


def merge(embedded: Tensor, first: Tensor, state: Tensor, second: Tensor, eps: float) -> Tensor:
    """f64 [R, 2 D]: the norms of embedded [R, D] and state [R, D], side by side."""
    return torch.cat([rms_norm(embedded, first, eps), rms_norm(state, second, eps)], dim=-1)


def scatter_columns(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """values [R, N] in the columns `ids` of [R, width], -inf in the others."""
    out = torch.full((len(values), width), -torch.inf, dtype=values.dtype)
    out[:, ids.long()] = values
    return out


def dynamic_conv(x: Tensor, coef: Tensor, base: Tensor, side: int, previous: list[int]) -> Tensor:
    """x [R, D], coef [R, 2 * taps * G], base [2, taps, D], the row before each row in its block or -1 -> f64 [R, D]."""
    (rows, width), taps = x.shape, base.shape[1]
    factors = coef.double().view(rows, 2, taps, -1)[:, side]
    factors = factors.repeat_interleave(width // factors.shape[-1], dim=-1) + base[side].double()
    out = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        source = row
        for tap in range(taps):
            if source >= 0:
                out[row] += factors[row, tap] * x[source].double()
                source = previous[source]
    return out


def mark(drafts: list[int], drawn: list[int], position: int) -> tuple[int, int]:
    """Where a sequence stands after a step: the position of its next row, and the id of that row.

    drafts: [n - 1] ids that were verified; drawn: [n] the target's own behind the anchor and behind each; position: of the anchor's row.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return position + accepted + 1, drawn[accepted]


def recall(tokens: list[int], width: int) -> tuple[list[int], int]:
    """What followed the longest match of the sequence's end in itself, and that match's length; zeros and 0 where there is none."""
    last, best, longest = len(tokens) - 1, -1, 0
    for end in range(last):
        length = 0
        while length < min(end + 1, LONGEST_MATCH) and tokens[end - length] == tokens[last - length]:
            length += 1
        if length and length >= longest:
            best, longest = end, length
    return [tokens[best + 1 + k % (last - best)] if longest else 0 for k in range(width)], longest
