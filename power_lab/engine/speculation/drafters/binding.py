"""Whether a draft model fits its target: a draft is a token id, so both must mean the same by each id, and reach as far."""

from __future__ import annotations

from power_lab.engine.tokenizer import Tokenizer
from power_lab.errors import ConfigError

REMEDY = "Use a draft model of the target's own family, or none."


def check_vocabulary(draft: Tokenizer, target: Tokenizer) -> None:
    """Raises ConfigError for key `draft` that names the first difference: number of ids, an id's bytes, or whether it is special.

    How text is cut into tokens does not matter: a draft model only sees ids. Nor do end tokens: the target's end a request.
    """
    if draft.vocab_size != target.vocab_size:
        raise _misfit(f"its vocabulary has {draft.vocab_size:,} tokens, the target's {target.vocab_size:,}")
    for token in range(target.vocab_size):
        mine, other = draft.token_bytes(token), target.token_bytes(token)
        if mine != other:
            raise _misfit(f"token {token} is {mine!r} in its vocabulary and {other!r} in the target's")
        special = token in draft.special_ids
        if special != (token in target.special_ids):
            kinds = ("special", "text") if special else ("text", "special")
            raise _misfit(f"token {token} ({mine!r}) is {kinds[0]} in its vocabulary and {kinds[1]} in the target's")


def check_reach(name: str, ids: int, positions: int, target_ids: int, context: int) -> None:
    """Raises ConfigError for key `draft` when a draft model reads and draws other ids than the target, or reaches less far.

    Args:
        name: the draft model's.
        ids, positions: that it takes.
        target_ids: that the target takes; context: longest request in tokens.
    """
    if ids != target_ids:
        raise _misfit(f"{name} draws among {ids:,} ids, the target among {target_ids:,}")
    if positions < context:
        raise ConfigError(
            "draft",
            f"{name} reaches {positions:,} positions, but requests may have {context:,}",
            f"Set context={positions} or less, or use another draft model.",
        )


def _misfit(message: str) -> ConfigError:
    return ConfigError("draft", message, REMEDY)
