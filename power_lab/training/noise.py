"""The target's own Gumbel noise in torch, keyed by seed, position and token as `kernels.reference.gumbel` says."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = (1 << 32) - 1


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise f32 [..., N] of int64 seeds and positions [...], for tokens int64 [N]."""
    seeds, positions = torch.broadcast_tensors(seeds[..., None], positions[..., None])
    lane = tokens // 64 * 16 + tokens % 16
    zero = torch.zeros_like(positions + lane)
    counter = [zero + lane, zero, zero + (positions & _WORD), zero + (positions >> 32)]
    words = torch.stack(_philox(counter, [seeds & _WORD, seeds >> 32]))
    word = words.gather(0, (tokens // 16 % 4).expand(zero.shape)[None])[0]
    u = (word.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u)).float()


def _philox(c: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; products wrap, their words are right all the same."""
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32 & _WORD) ^ c[1] ^ k0, p1 & _WORD, (p0 >> 32 & _WORD) ^ c[3] ^ k1, p0 & _WORD]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c
