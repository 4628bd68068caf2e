"""Drafters as plain torch modules: what is trained, and what the engine's drafters are tested against."""

from power_lab.training.modules.config import DrafterConfig
from power_lab.training.modules.dflash import DFlash
from power_lab.training.modules.dflash2 import DFlash2
from power_lab.training.modules.dspark import DSpark
from power_lab.training.modules.mtp import MTP
from power_lab.training.modules.protocol import Asked, Draft, Draw, Proposal, greedy
from power_lab.training.modules.shared import Shared

__all__ = [
    "MTP",
    "Asked",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Draft",
    "DrafterConfig",
    "Draw",
    "Proposal",
    "Shared",
    "greedy",
]
