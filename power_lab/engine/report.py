"""What an engine says of itself: decisions with reasons, memory, load. Plain structs that cross the engine socket unchanged."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One setting or mechanism in force, who owns it (DESIGN section 5) and why it is as it is."""

    key: str
    value: str
    owner: str
    reason: str


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the device, planned; `resident` is what the operating system counts for the process now.

    Attributes:
        weights: bytes of the model's tensors; mapped from the file, shared with other processes.
        pool: KV pool; pages: its blocks; page_bytes: bytes of one block over all layers.
        states, graphs: recurrent states and recorded graphs.
        workspace: activations and scratch.
    """

    weights: int
    pool: int
    pages: int
    page_bytes: int
    states: int
    graphs: int
    workspace: int
    resident: int
    reason: str

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.states + self.graphs + self.workspace


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for panels: requests, blocks, totals since start, and the age of the last step in seconds."""

    running: int
    waiting: int
    steps: int
    requests: int
    tokens: int
    drafted: int
    accepted: int
    cached_tokens: int
    prompt_tokens: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    last_step_s: float
