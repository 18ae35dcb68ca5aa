"""Cache of prefixes whose keys and values are in memory: radix trees on token ids over the runner's sequences."""

import time
from collections.abc import Callable, Iterator, Sequence

from localllm.engine.inspection import PrefixView
from localllm.engine.pins import Pin, Pins
from localllm.engine.runner import Runner, reusable
from localllm.engine.sequence import KeySpace

# The maximum share of the memory, and of the disk tier, that pinned shared prefixes may take.
PREFIX_SHARE = 0.5


class _Node:
    """The end of an edge. The path from the root spells a prefix; a leaf holds the sequence that stores it."""

    __slots__ = ("children", "edge", "last_used", "parent", "sequence", "space", "start")

    def __init__(self, space: KeySpace, parent: "_Node | None", start: int, edge: list[int]) -> None:
        self.space = space
        self.parent = parent
        self.start = start
        self.edge = edge
        self.last_used = 0
        self.children: dict[int, _Node] = {}
        self.sequence: int | None = None

    @property
    def depth(self) -> int:
        return self.start + len(self.edge)


class PrefixCache:
    """Keeps the KV of past prompts and answers, and finds the longest known prefix of a new one, to the single token.

    Each space has its own radix tree. Every leaf owns one sequence of the runner; inner nodes own none, because any
    leaf below holds their tokens. The runner shares pages, so a prefix of many conversations is stored once. Eviction
    truncates the least recently used prefix, from its end; shared prefixes and what requests pinned go last. The
    runner must be able to truncate sequences (StateCache is for those that cannot). Only the engine's thread calls it.
    """

    def __init__(self, runner: Runner, pinned_tokens: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """pinned_tokens: how many tokens requests may pin."""
        self._runner = runner
        self._pinned_tokens = pinned_tokens
        self._pins: Pins[_Node] = Pins(clock)
        self._roots: dict[KeySpace, _Node] = {}
        self._leaves: set[_Node] = set()
        self._shared_prefixes: set[_Node] = set()
        self._clock = 0
        self.tokens = 0  # cached; shared prefixes count once
        self.evicted_tokens = 0

    def __len__(self) -> int:
        """Number of cached prefixes, one sequence each."""
        return len(self._leaves)

    def match(self, space: KeySpace, tokens: Sequence[int]) -> int:
        """Return how many leading tokens are cached. Changes nothing."""
        root = self._roots.get(space)
        return _walk(root, tokens)[1] if root else 0

    def usable(self, space: KeySpace, tokens: Sequence[int]) -> int:
        """Return after how many of the leading tokens a sequence can be continued: `match`, or fewer."""
        root = self._roots.get(space)
        node, length = _walk(root, tokens) if root else (None, 0)
        return self._holder_of(node, length)[0] if node else 0

    def fork(self, space: KeySpace, tokens: Sequence[int], length: int) -> int:
        """Return a new sequence that holds tokens[:length]; length must be above 0 and at most match(...)."""
        node = self._split(_walk(self._roots[space], tokens[:length])[0], length)
        self._touch(node)
        return self._runner.fork_sequence(self._holder_of(node, length)[1], length)

    def holder(self, space: KeySpace, tokens: Sequence[int]) -> int | None:
        """Return a sequence that starts with all these tokens, or None. The cache still owns it."""
        root = self._roots.get(space)
        node, length = _walk(root, tokens) if root else (None, 0)
        return self._holder_of(node, length)[1] if node and 0 < length == len(tokens) else None

    def insert(self, space: KeySpace, tokens: Sequence[int], sequence: int) -> None:
        """Take over a sequence that holds exactly these tokens; free it if they are already cached or there are none.

        A leaf that is a prefix of the tokens grows, so a conversation is one node however many turns it has.
        """
        root = self._roots.get(space) or _Node(space, None, 0, [])
        node, length = _walk(root, tokens)
        if length == len(tokens):
            self._runner.free_sequence(sequence)
            self._touch(self._split(node, length))
            return
        self._roots[space] = root
        if node.sequence is not None and length == node.depth and not self._is_kept(node):
            self._runner.free_sequence(node.sequence)
            leaf = node
            leaf.edge = [*leaf.edge, *tokens[length:]]
        else:
            node = self._split(node, length)
            if node.sequence is not None:  # a shared prefix or a pin, with which the new leaf's sequence starts
                self._runner.free_sequence(node.sequence)
                self._leaves.discard(node)
                node.sequence = None
            leaf = _Node(space, node, length, list(tokens[length:]))
            node.children[leaf.edge[0]] = leaf
            self._leaves.add(leaf)
        leaf.sequence = sequence
        self.tokens += len(tokens) - length
        self._touch(leaf)

    def pin(self, space: KeySpace, tokens: Sequence[int]) -> None:
        """Pin a shared prefix that is cached; over the limit for shared ones, unpin the least recently used."""
        most = int(PREFIX_SHARE * self._runner.info.pages_total) * self._runner.info.page_size
        tokens = tokens[:most]
        root = self._roots.get(space)
        node, length = _walk(root, tokens) if root else (None, 0)
        if node is None or not 0 < length == len(tokens):
            return
        self._shared_prefixes.add(self._split(node, length))
        while sum(node.depth for node in self._shared_prefixes) > most:
            self._shared_prefixes.remove(min(self._shared_prefixes, key=lambda node: node.last_used))

    def keep(self, space: KeySpace, tokens: Sequence[int], pin: Pin) -> None:
        """Pin a cached prefix for a request."""
        root = self._roots.get(space)
        node, length = _walk(root, tokens) if root else (None, 0)
        if node is None or not 0 < length == len(tokens):
            return
        self._pins.add(self._split(node, length), pin)
        self._pins.limit(_distinct_tokens, self._pinned_tokens, lambda one: one.last_used)

    def evict(self, pages: int) -> bool:
        """Truncate the least recently used prefix by about `pages` pages, at least a token; False if none is left."""
        if not self._leaves:
            return False
        pins = self._pins.current()
        leaf = min(self._leaves, key=lambda node: (node in pins, node in self._shared_prefixes, node.last_used))
        page = self._runner.info.page_size
        keep = max(leaf.start, (leaf.depth - max(pages, 1) * page) // page * page)
        self.evicted_tokens += leaf.depth - keep
        if keep > leaf.start:
            assert leaf.sequence is not None
            self._runner.truncate_sequence(leaf.sequence, keep)
            self.tokens -= leaf.depth - keep
            leaf.edge = leaf.edge[: keep - leaf.start]
        else:
            self._remove(leaf)
        return True

    def drop_oldest(self) -> bool:
        """Free one sequence handle by removing the least recently used prefix entirely; False if none is left."""
        before = len(self._leaves)
        while self._leaves and len(self._leaves) == before:
            self.evict(self._runner.info.pages_total)
        return len(self._leaves) < before

    def release_where(self, is_kept_elsewhere: Callable[[KeySpace, list[int]], bool]) -> None:
        """Remove the prefixes that are stored elsewhere, and free the runner's storage that only they use."""
        for leaf in [*self._leaves]:
            node: _Node | None = leaf
            while node in self._leaves and is_kept_elsewhere(node.space, _path(node)):
                parent = node.parent
                self._remove(node)
                node = parent

    def check_integrity(self) -> set[int]:
        """Check all trees; return the sequences that they own. Raises RuntimeError if a tree is inconsistent."""
        owned: set[int] = set()
        leaves = set()
        tokens = 0
        for node in self._nodes():
            assert node.parent is not None
            tokens += len(node.edge)
            problems = {
                "an empty edge": not node.edge,
                "a wrong parent": node.parent.children.get(node.edge[0]) is not node,
                "a wrong space": node.parent.space != node.space,
                "a gap": node.start != node.parent.depth,
                "a parent used before its child": node.parent.last_used < node.last_used,
                "a leaf without a sequence": not node.children and node.sequence is None,
                "an inner node with a sequence": bool(node.children) and node.sequence is not None,
                "a sequence owned twice": node.sequence in owned,
            }
            if node.sequence is not None:
                owned.add(node.sequence)
                leaves.add(node)
                problems["a sequence of another length"] = self._runner.sequence_length(node.sequence) != node.depth
            for problem, found in problems.items():
                if found:
                    raise RuntimeError(f"prefix cache: {problem} at depth {node.depth}")
        if leaves != self._leaves or self.tokens != tokens or not all(root.children for root in self._roots.values()):
            raise RuntimeError("prefix cache: leaves, tokens or roots are not the trees'")
        if not self._shared_prefixes | self._pins.current() <= {*self._nodes()}:
            raise RuntimeError("prefix cache: a shared prefix or a pin is in no tree")
        return owned

    def tree(self) -> tuple[PrefixView, ...]:
        """The prefix trees, for display."""
        views: dict[_Node, PrefixView] = {}
        for node in reversed([*self._nodes()]):  # children before their parents
            children = tuple(views.pop(child) for child in node.children.values())
            sharers = sum(child.sharers for child in children) or 1
            views[node] = PrefixView(node.start, node.depth, sharers, node.last_used, children)
        return tuple(views[child] for root in self._roots.values() for child in root.children.values())

    def _holder_of(self, node: _Node, length: int) -> tuple[int, int]:
        """The sequence at or below a node that can be continued after most of `length` tokens: (tokens, sequence)."""
        if not self._runner.info.window_tokens or not length:
            return length, _sequence_below(node)
        below = [node]
        for each in below:
            below += each.children.values()
        owned = (each.sequence for each in below if each.sequence is not None)
        return max(((reusable(self._runner, sequence, length), sequence) for sequence in owned), default=(0, -1))

    def _is_kept(self, node: _Node) -> bool:
        return node in self._shared_prefixes or node in self._pins.current()

    def _nodes(self) -> Iterator[_Node]:
        """All nodes but the roots, parents before their children."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _split(self, node: _Node, length: int) -> _Node:
        """Return the node that ends at `length`, splitting this node's edge if needed."""
        if length == node.depth:
            return node
        assert node.parent is not None  # a root's edge is empty, so it is never split
        head = _Node(node.space, node.parent, node.start, node.edge[: length - node.start])
        head.last_used = node.last_used
        node.parent.children[head.edge[0]] = head
        node.parent, node.edge, node.start = head, node.edge[length - node.start :], length
        head.children[node.edge[0]] = node
        return head

    def _touch(self, node: _Node | None) -> None:
        self._clock += 1
        while node is not None:
            node.last_used = self._clock
            node = node.parent

    def _remove(self, leaf: _Node) -> None:
        """Remove a leaf. Its parent takes over the sequence if no other child holds the parent's tokens."""
        parent, sequence = leaf.parent, leaf.sequence
        assert parent is not None and sequence is not None
        del parent.children[leaf.edge[0]]
        self._leaves.discard(leaf)
        self._shared_prefixes.discard(leaf)
        self._pins.discard(leaf)
        self.tokens -= len(leaf.edge)
        if parent.children or parent.parent is None:
            self._runner.free_sequence(sequence)
        else:
            self._runner.truncate_sequence(sequence, parent.depth)
            parent.sequence = sequence
            self._leaves.add(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.space]


def _walk(root: _Node, tokens: Sequence[int]) -> tuple[_Node, int]:
    """Return the node whose edge contains the end of the longest known prefix, and that prefix's length."""
    node, length = root, 0
    while length < len(tokens) and (child := node.children.get(tokens[length])):
        shared = common_prefix(child.edge, tokens[length : length + len(child.edge)])
        node, length = child, length + shared
        if shared < len(child.edge):
            break
    return node, length


def _distinct_tokens(nodes: set[_Node]) -> int:
    """Tokens of the prefixes that end at some nodes; those that prefixes share count once."""
    ways: set[_Node] = set()
    for node in nodes:
        at: _Node | None = node
        while at is not None and at not in ways:
            ways.add(at)
            at = at.parent
    return sum(len(node.edge) for node in ways)


def _path(node: _Node) -> list[int]:
    """The tokens from the root to a node's end."""
    edges = []
    while node.parent is not None:
        edges.append(node.edge)
        node = node.parent
    return [token for edge in reversed(edges) for token in edge]


def _sequence_below(node: _Node) -> int:
    while node.children:
        node = next(iter(node.children.values()))
    assert node.sequence is not None  # check_integrity: every leaf has one
    return node.sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
