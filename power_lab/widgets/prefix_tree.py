"""The prefix tree as people read it: stretches of blocks without a fork, each below the one that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from power_lab.engine.vitals import PrefixNode, PrefixTree


@dataclass(frozen=True, slots=True)
class Stretch:
    """Nodes in order, each the only one that goes on from the one before it, alike in kind, in being held, and in namespace.

    Attributes:
        level: forks above it; lead: the lines of the tree in front of it.
        alike: characters at its beginning that are the same in all that go on from the same block.
    """

    nodes: tuple[PrefixNode, ...]
    level: int
    lead: str
    alike: int = 0

    @property
    def first(self) -> PrefixNode:
        return self.nodes[0]

    @property
    def tokens(self) -> int:
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def hits(self) -> int:
        """Of its first block: one that serves further on serves from there, too."""
        return max(node.hits for node in self.nodes)

    @property
    def tokens_saved(self) -> int:
        return sum(node.tokens_saved for node in self.nodes)

    @property
    def seconds_saved(self) -> float | None:
        known = [node.seconds_saved for node in self.nodes if node.seconds_saved is not None]
        return sum(known) if known else None

    @property
    def nbytes(self) -> int:
        return sum(node.nbytes for node in self.nodes)

    @property
    def age_s(self) -> float:
        return max(node.age_s for node in self.nodes)

    @property
    def last_hit_s(self) -> float | None:
        return min((node.last_hit_s for node in self.nodes if node.last_hit_s is not None), default=None)

    @property
    def refs(self) -> int:
        return max(node.refs for node in self.nodes)

    @property
    def eviction(self) -> int:
        """The place of its block that goes first, -1 where all are held."""
        return min((node.eviction for node in self.nodes if node.eviction >= 0), default=-1)


def stretches(tree: PrefixTree) -> list[Stretch]:
    """Depth first; of several that go on from one block, the one that saved most comes first. A parent that is not told of makes a root."""
    known = {node.hash for node in tree.nodes}
    children: dict[str, list[PrefixNode]] = {}
    for node in tree.nodes:
        children.setdefault(node.parent if node.parent in known and node.parent != node.hash else "", []).append(node)
    for siblings in children.values():
        siblings.sort(key=lambda node: (-node.tokens_saved, node.namespace, node.block))
    out: list[Stretch] = []
    roots = children.get("", [])
    todo = [(root, 0, "", "", _same(roots)) for root in reversed(roots)]
    seen: set[str] = set()
    while todo:
        node, level, lead, below, alike = todo.pop()
        if node.hash in seen:  # a hash that is told of twice
            continue
        run = _run(node, children, seen)
        out.append(Stretch(tuple(run), level, lead, alike))
        following = [child for child in children.get(run[-1].hash, ()) if child.hash not in seen]
        for at, child in reversed(list(enumerate(following))):
            last = at == len(following) - 1
            todo.append(
                (child, level + 1, below + ("└ " if last else "├ "), below + ("  " if last else "│ "), _same(following))
            )
    return out


def _same(siblings: Sequence[PrefixNode]) -> int:
    if len(siblings) < 2:
        return 0
    low, high = (
        min(node.piece for node in siblings),
        max(node.piece for node in siblings),
    )  # the others lie between them
    return next((at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _run(node: PrefixNode, children: dict[str, list[PrefixNode]], seen: set[str]) -> list[PrefixNode]:
    run = [node]
    seen.add(node.hash)
    while (
        len(following := children.get(run[-1].hash, ())) == 1
        and _alike(run[-1], following[0])
        and following[0].hash not in seen
    ):
        run.append(following[0])
        seen.add(following[0].hash)
    return run


def _alike(one: PrefixNode, other: PrefixNode) -> bool:
    return (one.kind, one.namespace, one.refs, one.hits) == (other.kind, other.namespace, other.refs, other.hits)


def next_evictions(nodes: Sequence[PrefixNode], most: int) -> list[PrefixNode]:
    """The nodes that go first, in order."""
    return sorted((node for node in nodes if node.eviction >= 0), key=lambda node: node.eviction)[:most]
