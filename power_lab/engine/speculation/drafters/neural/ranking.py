"""A list of tokens that a user wants drafted, the most wanted first, such as by frequency (FR-Spec, arXiv:2502.14856)."""

from __future__ import annotations

import numpy as np

from power_lab.engine.config import EngineConfig, user_path
from power_lab.engine.weights.mapped import read_bounded
from power_lab.errors import ConfigError, ModelFileError

MAX_BYTES = 1 << 24


def ranking(path: str, vocab: int) -> np.ndarray | None:
    """int32 token ids of a text file, each where it comes first; None without a path.

    Raises ConfigError for key `draft_ranking` where it cannot be read, or names what is no token of `vocab`.
    """
    if not path:
        return None
    remedy = "Write token ids between spaces or on lines of their own, the most wanted first."
    try:
        words = read_bounded(user_path(path, "draft_ranking"), MAX_BYTES).decode("ascii").split()
    except (ModelFileError, UnicodeDecodeError) as error:
        raise ConfigError("draft_ranking", f"{path} cannot be read as text: {error}", remedy) from error
    wrong = next((word for word in words if not word.isdigit() or len(word) > 9 or int(word) >= vocab), None)
    if wrong is not None:
        raise ConfigError("draft_ranking", f"{path} names {wrong[:20]!r}, which is no token of {vocab:,}", remedy)
    return np.fromiter(dict.fromkeys(map(int, words)), np.int32)


def said_of(config: EngineConfig, vocab: int) -> tuple[int, np.ndarray | None]:
    """What limits a drafter's tokens, as `Target` takes it. Raises as `ranking`."""
    return config.draft_vocabulary, ranking(config.draft_ranking, vocab)
