"""Models on this machine: the catalogue, where files lie, fetching them whole or not at all, and their SHA-256."""

from power_lab.models.catalogue import CATALOGUE, Packaged, Part, Terms
from power_lab.models.entry import ModelEntry
from power_lab.models.progress import Report
from power_lab.models.store import ensure, fetch, list_models, resolve, verify

__all__ = [
    "CATALOGUE",
    "ModelEntry",
    "Packaged",
    "Part",
    "Report",
    "Terms",
    "ensure",
    "fetch",
    "list_models",
    "resolve",
    "verify",
]
