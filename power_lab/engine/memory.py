"""How many KV pages and how long a context a device with finite memory gets. Arithmetic only: the caller measures and allocates."""

from __future__ import annotations

from dataclasses import dataclass

from power_lab.engine.config import CPU_KV_TOKENS, EngineConfig
from power_lab.engine.prefix import BLOCK_TOKENS
from power_lab.errors import CapacityError, ConfigError

DRAFT_GRAPHS = 4  # a draft model's few shapes get one part in so many of what graphs may take
RESERVE = 0.03  # of what is free is left to others, and to what nobody counts
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the device has for the KV pool.

    Attributes:
        free: bytes that the device has free, the weights being there.
        workspace: bytes of activations, scratch and index arrays that are still to come.
        graphs: bytes that captured graphs may grow to.
        reserve: bytes to leave alone, for other programs and for what nobody counts; below 1, the share of `free`.
        page_bytes: bytes of one page of `BLOCK_TOKENS` tokens, over all layers, of the draft model's, too, where there is one.

    Raises ValueError for negative numbers.
    """

    free: int
    workspace: int
    graphs: int
    reserve: int | float
    page_bytes: int

    def __post_init__(self) -> None:
        if min(self.free, self.workspace, self.graphs, self.reserve) < 0 or self.page_bytes < 1:
            raise ValueError(f"no device has such room: {self}")

    @property
    def reserved(self) -> int:
        return int(self.free * self.reserve) + 1 if 0 < self.reserve < 1 else int(self.reserve)

    @property
    def pool(self) -> int:
        """Bytes left for the KV pool; 0 when the rest takes all."""
        return max(0, self.free - self.workspace - self.graphs - self.reserved)

    @property
    def tokens(self) -> int:
        """The largest KV pool that fits, in tokens: whole pages, less the dummy page."""
        return max(0, self.pool // self.page_bytes - 1) * BLOCK_TOKENS

    def __str__(self) -> str:
        return (
            f"{_size(self.free)} free after the weights, less {_size(self.workspace)} workspace, {_size(self.graphs)} graphs"
            f" and {_size(self.reserved)} reserve, leave {_size(self.pool)}; {BLOCK_TOKENS} tokens take {_size(self.page_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of the KV pool.

    Attributes:
        kv_tokens: tokens of the pool, a multiple of `BLOCK_TOKENS`; 0 is as much as is useful and fits.
        context: longest request in tokens; 0 is the model's own limit, or what fits.
        model_context: the model's own limit.
        max_batch: requests that may run at once.
    """

    kv_tokens: int
    context: int
    model_context: int
    max_batch: int

    @property
    def useful(self) -> int:
        """Tokens of a pool in which all requests of a full batch reach the context: more would hold cached prefixes alone."""
        return self.max_batch * _whole(self.context or self.model_context)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A KV pool that fits.

    Attributes:
        pages: to allocate, the dummy page included.
        kv_tokens: that they hold, without the dummy.
        nbytes: of all pages.
        spare: bytes that stay free on top of the reserve.
        context: longest request in tokens.
        kv_reason, context_reason: why they are as they are, in plain words.
    """

    pages: int
    kv_tokens: int
    nbytes: int
    spare: int
    context: int
    kv_reason: str
    context_reason: str


def plan_pool(room: Room, wish: Wish) -> PoolPlan:
    """Pages and context. What was asked for is granted whole or refused; what was left open is made as large as useful.

    Raises ConfigError naming `context` or `kv_tokens` when the wishes exclude each other or are none, CapacityError with all the numbers
    and the remedy when one does not fit.
    """
    _check(wish)
    if not room.tokens:
        raise CapacityError(
            f"kv_tokens: not one page fits on the device: {room}",
            "Free device memory, or lower step_tokens or graph_mb.",
        )
    if wish.kv_tokens > room.tokens:
        raise CapacityError(
            f"kv_tokens: a KV pool of {wish.kv_tokens:,} tokens and the dummy page needs"
            f" {_size((wish.kv_tokens // BLOCK_TOKENS + 1) * room.page_bytes)}: {room}",
            f"Use kv_tokens={room.tokens} or less; 0 takes what fits.",
        )
    if wish.context > room.tokens:
        raise CapacityError(
            f"context: a request of {wish.context:,} tokens and the dummy page needs"
            f" {_size((_whole(wish.context) // BLOCK_TOKENS + 1) * room.page_bytes)}: {room}",
            f"Use context={room.tokens} or less; 0 takes what fits.",
        )
    tokens = wish.kv_tokens or min(wish.useful, room.tokens)
    pages = tokens // BLOCK_TOKENS + 1
    context = wish.context or min(wish.model_context, tokens)
    return PoolPlan(
        pages=pages,
        kv_tokens=tokens,
        nbytes=pages * room.page_bytes,
        spare=room.pool - pages * room.page_bytes,
        context=context,
        kv_reason=_kv_reason(room, wish, tokens),
        context_reason=_context_reason(wish, context),
    )


def graph_budgets(config: EngineConfig, draft: bool) -> tuple[int, int]:
    """Bytes that captured graphs of the model and of its drafter, if it has one, may take."""
    whole = config.graph_mb << 20
    part = whole // DRAFT_GRAPHS if draft else 0
    return whole - part, part


def plan(config: EngineConfig, context: int, page_bytes: int, free: int | None) -> PoolPlan:
    """The pool of an engine.

    Args:
        config: what is asked.
        context: longest request that the loaded model takes, in tokens.
        page_bytes: of one page over all layers; with a draft model, whose pool has as many pages, of one page of each.
        free: bytes that the device has left beside weights and workspace; None where its memory is the machine's, which is taken page by
            page as it is touched.

    Raises as `plan_pool`.
    """
    asked = min(context, config.context) if config.context else 0
    if free is not None:
        room = Room(free=free, workspace=0, graphs=config.graph_mb << 20, reserve=RESERVE, page_bytes=page_bytes)
        return plan_pool(room, Wish(config.kv_tokens, asked, context, config.max_batch))
    tokens = config.kv_tokens or CPU_KV_TOKENS
    pages = tokens // BLOCK_TOKENS + 1
    wish = Wish(tokens, min(asked, tokens), context, config.max_batch)
    return PoolPlan(
        pages=pages,
        kv_tokens=tokens,
        nbytes=pages * page_bytes,
        spare=0,
        context=min(asked or context, tokens),
        kv_reason="default" if tokens == CPU_KV_TOKENS else "as asked",
        context_reason=_context_reason(wish, min(asked or context, tokens)),
    )


def _check(wish: Wish) -> None:
    if wish.context > wish.model_context:
        raise ConfigError(
            "context",
            f"{wish.context} exceeds the model's {wish.model_context} positions",
            f"Use at most {wish.model_context}.",
        )
    if wish.kv_tokens % BLOCK_TOKENS:
        raise ConfigError(
            "kv_tokens", f"{wish.kv_tokens} is not a multiple of {BLOCK_TOKENS}", f"Use {_whole(wish.kv_tokens)}."
        )
    if wish.kv_tokens and wish.context > wish.kv_tokens:
        raise ConfigError(
            "context",
            f"{wish.context} tokens do not fit the KV pool of {wish.kv_tokens}",
            f"Raise kv_tokens to {_whole(wish.context)}.",
        )


def _kv_reason(room: Room, wish: Wish, tokens: int) -> str:
    if wish.kv_tokens:
        return "as asked"
    if tokens == wish.useful:
        return (
            f"{wish.max_batch} requests of {wish.context or wish.model_context:,} tokens, the most that can run at once"
        )
    return f"all that fits, of the {wish.useful:,} that a full batch could use: {room}"


def _context_reason(wish: Wish, context: int) -> str:
    if wish.context:
        return "as asked"
    if context == wish.model_context:
        return "the model's own limit"
    return f"the KV pool (kv_tokens); the model itself reaches {wish.model_context}"


def _whole(tokens: int) -> int:
    """In whole blocks."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.2f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:,.2f} MiB"
