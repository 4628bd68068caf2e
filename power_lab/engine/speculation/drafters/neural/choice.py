"""Which trained drafter a setting `draft` names."""

from __future__ import annotations

from pathlib import Path

from power_lab.engine.config import AUTO_DRAFT, user_path
from power_lab.engine.speculation.drafters.neural import shipped
from power_lab.errors import ConfigError

NATIVE = "mtp"
"""What a checkpoint's own layers for multi-token prediction serve, and so what they are called."""


def native_of(draft: str, sha256: str) -> bool:
    """Whether a setting means the layers for multi-token prediction that a checkpoint has itself, if it has some.

    Where a trained drafter comes with the model, it goes first.
    """
    comes = {AUTO_DRAFT: shipped.default(sha256), NATIVE: NATIVE if NATIVE in shipped.names(sha256) else ""}
    return comes.get(draft) == ""


def artifact_of(draft: str, model: str, sha256: str, native: bool = False) -> tuple[Path | None, str]:
    """The drafter's file, or None, and why.

    Args:
        draft: the setting, where it does not name a model; model, sha256: of the target.
        native: whether the target has layers for multi-token prediction of its own.

    Raises ConfigError for key `draft` for a shipped drafter that the target does not have.
    """
    if not draft:
        return None, "none is asked for"
    if draft.endswith(".safetensors"):
        return user_path(draft, "draft"), "as asked"
    if native and native_of(draft, sha256):
        return None, "it has layers of its own"
    known = shipped.names(sha256)
    if draft == AUTO_DRAFT:
        name = shipped.default(sha256)
        return (
            (shipped.path_of(name, sha256), "comes with this model") if name else (None, "none comes with this model")
        )
    if draft not in known:
        have = f"Use one of {', '.join(known)}" if known else "Give the path of a drafter (.safetensors)"
        raise ConfigError("draft", f"no drafter {draft!r} comes with {model}", f'{have}, or draft="" for none.')
    return shipped.path_of(draft, sha256), "comes with this model, as asked"


def serving(name: str, sha256: str) -> str:
    """Of the drafters that come with a model, the one whose engine takes `speculate=name`; "" where there is none."""
    known = shipped.names(sha256)
    able = {"dspark": ("dspark", "dflash"), "hybrid": (shipped.default(sha256),)}.get(name, (name,))
    return next((one for one in able if one in known), "")


def remedy(name: str, model: str, sha256: str, native: bool = False) -> str:
    """How an engine of this model gets a drafter that serves `speculate=name`. native: as for `artifact_of`."""
    found = serving(name, sha256) or (NATIVE if native and name in (NATIVE, "hybrid") else "")
    if found:
        return f'Load the model with lab.load("{model}", draft="{found}").'
    return f'Load the model with lab.load("{model}", draft="<path of a drafter that serves {name}>.safetensors").'
