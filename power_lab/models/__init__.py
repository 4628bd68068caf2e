"""Models on this machine: the catalogue, where files lie, fetching them whole or not at all, and their SHA-256."""

from power_lab.models.catalogue import CATALOGUE, Packaged, Part, Terms
from power_lab.models.entry import Listing, ModelEntry
from power_lab.models.listing import list_models
from power_lab.models.manage import add, removable, remove
from power_lab.models.progress import Report
from power_lab.models.store import ensure, fetch, locate, resolve
from power_lab.models.verifying import Verified, verify

__all__ = [
    "CATALOGUE",
    "Listing",
    "ModelEntry",
    "Packaged",
    "Part",
    "Report",
    "Terms",
    "Verified",
    "add",
    "ensure",
    "fetch",
    "list_models",
    "locate",
    "removable",
    "remove",
    "resolve",
    "verify",
]
