"""Weights that begin as the target's own: a drafter's layers are copies of some of the target's, which it then only has to bend."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from power_lab.engine.models.spec import LayerSpec, ModelSpec
from power_lab.errors import ConfigError
from power_lab.training.modules import MTP, DFlash
from power_lab.training.modules.layers import Layer
from power_lab.training.target import Target

_EMBEDDED = 0.25
"""Of a chain's embedding beside the hidden state, at first, both of size 1."""
_OTHERS = 0.1
"""Of the other taps' first weights beside the one that the context begins as."""


def theta(spec: ModelSpec) -> float:
    """Rope's base of a target whose layers a drafter's can be copies of; 0 where they cannot."""
    if not all(map(_copied, spec.layers)):
        return 0.0
    a = spec.layers[0].attention
    assert a.rope is not None
    return float(a.rope.within(spec.context).frequencies[1] ** -(a.head_dim / 2))


def inherit(drafter: DFlash | MTP, target: Target, layers: tuple[int, ...], state: float) -> None:
    """Make a new drafter's layers copies of these of the target's, and what leads into them nearly an identity.

    Context of a block drafter begins as the state that enters the first of these layers, or its last tap's; a chain's input as the state
    before it and a little of the embedding.

    Args:
        layers: one for each of the drafter's; their units that weigh most are taken where the drafter has fewer.
        state: root mean square of what usually enters the first of them.

    Raises:
        ConfigError: for key `copied`, where they do not fit.
    """
    if len(layers) != len(drafter.layers) or not all(0 <= layer < len(target.spec.layers) for layer in layers):
        raise ConfigError("copied", f"{list(layers)} are not {len(drafter.layers)} of the target's layers")
    with torch.no_grad():
        for own, number in zip(drafter.layers, layers, strict=True):
            assert isinstance(own, Layer)
            _copy(own, target, number)
            # What enters a chain's layer is that much smaller than it was: the same layer, every weight within the reach of small steps.
            # A block's rows begin as small embeddings; of 4, 14 and 100 (states are 14) they learnt fastest with 4.
            smaller = state if isinstance(drafter, MTP) else state**0.5
            own.o.weight.div_(smaller)
            own.down.weight.div_(smaller)
        if isinstance(drafter, MTP):
            _identity(drafter.hidden_proj, 1.0)
            _identity(drafter.embed_proj, _EMBEDDED)
        else:
            width, taps = target.spec.width, drafter.config.taps
            at = width * (taps.index(layers[0]) if layers[0] in taps else len(taps) - 1)
            drafter.fc.weight.mul_(_OTHERS)
            drafter.fc.weight[:, at : at + width] = torch.eye(width)
            drafter.hidden_norm.weight.copy_(target.layer(layers[0])["attn_norm"])


def _copied(layer: LayerSpec) -> bool:
    """Whether a drafter's layer computes what this one does."""
    a = layer.attention
    plain = not (a.softcap or a.qk_norm or a.bias or a.out_bias or a.temperature) and layer.activation == "silu"
    whole = a.rope is not None and a.rope.magnitude == 1 and 2 * len(a.rope.frequencies) == a.head_dim
    return plain and whole and abs(a.scale * a.head_dim**0.5 - 1) < 1e-6


def _copy(own: Layer, target: Target, number: int) -> None:
    theirs = target.layer(number)
    for name, values in theirs.items():
        if name in ("q", "k"):
            theirs[name] = _halves(values, target, number)
    strength = theirs["gate"].norm(dim=1) * theirs["up"].norm(dim=1) * theirs["down"].norm(dim=0)
    units = strength.topk(min(own.config.ffn, len(strength))).indices.sort().values
    theirs |= {"gate": theirs["gate"][units], "up": theirs["up"][units], "down": theirs["down"][:, units]}
    for name, values in theirs.items():
        weight = own.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        if weight.shape != values.shape:
            raise ConfigError("copied", f"{name} of layer {number} is {list(values.shape)}, not {list(weight.shape)}")
        weight.copy_(values)


def _halves(rows: Tensor, target: Target, number: int) -> Tensor:
    """Rows of queries or keys, from pairs (2i, 2i + 1) to pairs (i, i + d / 2) where the target's are the former."""
    a = target.spec.layers[number].attention
    if a.rope is None or not a.rope.interleaved:
        return rows
    return rows.unflatten(0, (-1, a.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _identity(linear: nn.Linear, factor: float) -> None:
    nn.init.eye_(linear.weight)
    linear.weight.mul_(factor)
