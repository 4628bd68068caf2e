"""Our own quantiser: f32 matrices to every storage type that kernels read, with the error that each costs (docs/quantisation.md)."""

from power_lab.engine.weights.quantise.figures import QuantError, error
from power_lab.engine.weights.quantise.quantiser import quantise
from power_lab.engine.weights.quantise.recipe import recipe

__all__ = ["QuantError", "error", "quantise", "recipe"]
