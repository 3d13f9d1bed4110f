"""Prefix caching: which blocks of the pool hold the keys and values of which token ids.

Keys and values of a token depend on all tokens before it, so a block is known by its own token ids
and the block before it, down to a root that names what else they depend on. The index is the tree
of these: a dict per block, from the ids of the next block to the block. A lookup compares whole
ids under the very parent; hashes only order the dicts, and one that collides cannot find a wrong
block. Only full blocks are in it, and a block in it is never written again, so that sequences may
share it (automatic prefix caching over the paged pool of Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmlab.kv.allocator import BlockAllocator


@dataclass(frozen=True)
class Root:
    """What keys and values depend on besides token ids. `adapter` is null without one."""

    model: str
    weights_dtype: str
    kv_dtype: str
    adapter: str | None = None


@dataclass(eq=False)
class Node:
    """A block in the index: an entry of `siblings`, under its ids, as long as it is `findable`."""

    block: int
    ids: tuple[int, ...]
    siblings: Nodes
    children: Nodes = field(default_factory=dict)
    findable: bool = True


Nodes = dict[tuple[int, ...], Node]


@dataclass
class Place:
    """How far a sequence has been followed in the index: `blocks` full blocks, down to `node`."""

    node: Node | None = None
    blocks: int = 0


class PrefixIndex:
    """The findable blocks of one pool, `nodes` by their block. Takes the allocator's `on_evict`.

    A block that is given up takes all that follow it out of the index, since nobody could reach
    them any more; those that a sequence holds become its private blocks.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[Root, Nodes] = {}
        self.nodes: dict[int, Node] = {}
        allocator.on_evict = self._evict

    def match(self, root: Root, tokens: Sequence[int]) -> list[Node]:
        """The longest run of blocks that holds the first tokens, but never the last one.

        The last token is always left to compute, since its logits are what the caller is after.
        """
        size = self._allocator.block_tokens
        found: list[Node] = []
        nodes = self._roots.get(root, {})
        for start in range(0, len(tokens) - size, size):
            node = nodes.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            found.append(node)
            nodes = node.children
        return found

    def add(
        self, root: Root, tokens: Sequence[int], computed: int, blocks: Sequence[int], place: Place
    ) -> None:
        """Make findable what the first `computed` tokens fill and `place` has not passed.

        Moves `place`. Where the index already has a block with the same content, that one stays,
        and the sequence's own copy is not findable.
        """
        size = self._allocator.block_tokens
        full = computed // size
        if full == place.blocks:
            return
        node, passed = place.node, place.blocks
        if node is not None and not node.findable:
            node, passed = None, 0  # lost to an eviction: follow again from the root
        for i in range(passed, full):
            nodes = node.children if node is not None else self._roots.setdefault(root, {})
            ids = tuple(tokens[i * size : (i + 1) * size])
            node = nodes.get(ids)
            if node is None:
                node = nodes[ids] = self.nodes[blocks[i]] = Node(blocks[i], ids, nodes)
                self._allocator.keep(blocks[i])
        place.node, place.blocks = node, full

    def clear(self) -> None:
        """Forget everything; blocks that no sequence holds become free."""
        for nodes in self._roots.values():
            for node in list(nodes.values()):
                self._drop(node)

    def _evict(self, block: int) -> None:
        self._drop(self.nodes[block])

    def _drop(self, top: Node) -> None:
        """Take a block and all that follow it out of the index."""
        doomed = [top]
        while doomed:
            node = doomed.pop()
            doomed += node.children.values()
            node.findable = False
            del node.siblings[node.ids], self.nodes[node.block]
            self._allocator.unkeep(node.block)
