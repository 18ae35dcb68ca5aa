"""Prefixes whose keys and values are still in memory: a radix tree on token ids over the runner's sequences."""

from collections.abc import Callable, Iterator, Sequence

from localllm.engine.inspection import PrefixView
from localllm.engine.runner import Runner


class _Node:
    """The end of an edge. The path from the root spells a prefix; a leaf holds the sequence that stores it."""

    __slots__ = ("children", "edge", "last_used", "parent", "sequence", "start")

    def __init__(self, parent: "_Node | None", start: int, edge: list[int], last_used: int) -> None:
        self.parent = parent
        self.start = start
        self.edge = edge
        self.last_used = last_used
        self.children: dict[int, _Node] = {}
        self.sequence: int | None = None

    @property
    def depth(self) -> int:
        return self.start + len(self.edge)


class PrefixCache:
    """Keeps the KV of past prompts and answers, and finds the longest known prefix of a new one, to the single token.

    Every leaf owns one sequence of the runner, as long as its path; inner nodes own none, because any leaf below holds
    their tokens. Pages are shared inside the runner, so that a prefix of many conversations is stored once. What was
    used least recently is cut first, from its tail on. The runner's sequences must be such that can be cut (StateCache
    keeps others). Not thread-safe: the engine's thread is the only caller.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._root = _Node(None, 0, [], 0)
        self._leaves: set[_Node] = set()
        self._clock = 0
        self.tokens = 0  # kept, shared prefixes counted once
        self.evicted_tokens = 0

    def __len__(self) -> int:
        """Number of prefixes kept, one sequence each."""
        return len(self._leaves)

    def match(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens are kept. Changes nothing."""
        return self._walk(tokens)[1]

    def fork(self, tokens: Sequence[int], length: int) -> int:
        """Return a new sequence that holds tokens[:length]; length must not exceed match(tokens)."""
        if length == 0:
            return self._runner.create_sequence()
        node = self._split(self._walk(tokens[:length])[0], length)
        self._touch(node)
        return self._runner.fork_sequence(_sequence_below(node), length)

    def holder(self, tokens: Sequence[int]) -> int | None:
        """Return a sequence that begins with all these tokens, or None. It stays the cache's."""
        node, length = self._walk(tokens)
        return _sequence_below(node) if 0 < length == len(tokens) else None

    def insert(self, tokens: Sequence[int], sequence: int) -> None:
        """Take over a sequence that holds exactly these tokens; it is freed at once if they are already kept."""
        node, length = self._walk(tokens)
        if length == len(tokens):
            self._runner.free_sequence(sequence)
            self._touch(self._split(node, length))
            return
        node = self._split(node, length)
        if node.sequence is not None:
            self._runner.free_sequence(node.sequence)
            node.sequence = None
            self._leaves.discard(node)
        leaf = _Node(node, length, list(tokens[length:]), 0)
        leaf.sequence = sequence
        node.children[leaf.edge[0]] = leaf
        self._leaves.add(leaf)
        self.tokens += len(leaf.edge)
        self._touch(leaf)

    def evict(self, pages: int) -> bool:
        """Cut about this many pages (at least one token) off the least recently used prefix; False if none is left."""
        if not self._leaves:
            return False
        leaf = min(self._leaves, key=lambda node: node.last_used)
        page = self._runner.page_size
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
        """Give one sequence handle back: forget the least recently used prefix whole; False if none is left."""
        before = len(self._leaves)
        while self._leaves and len(self._leaves) == before:
            self.evict(self._runner.pages_total())
        return len(self._leaves) < before

    def release_where(self, is_kept_elsewhere: Callable[[list[int]], bool]) -> None:
        """Forget the prefixes that are kept elsewhere, and free what the runner stores of them alone."""
        for leaf in [*self._leaves]:
            node: _Node | None = leaf
            while node in self._leaves and is_kept_elsewhere(_path(node)):
                parent = node.parent
                self._remove(node)
                node = parent

    def check_integrity(self) -> set[int]:
        """Walk the whole tree, raise RuntimeError where it is wrong, and return the sequences it owns."""
        owned: set[int] = set()
        leaves = set()
        for node in self._nodes():
            assert node.parent is not None
            problems = {
                "an empty edge": not node.edge,
                "a wrong parent": node.parent.children.get(node.edge[0]) is not node,
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
        if leaves != self._leaves or self.tokens != sum(len(node.edge) for node in self._nodes()):
            raise RuntimeError("prefix cache: leaves or tokens are not the tree's")
        return owned

    def tree(self) -> tuple[PrefixView, ...]:
        """The prefixes as a tree for people to look at."""
        return tuple(_view(child) for child in self._root.children.values())

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _walk(self, tokens: Sequence[int]) -> tuple[_Node, int]:
        """Return the node in whose edge the longest known prefix ends, and that prefix's length."""
        node, length = self._root, 0
        while length < len(tokens) and (child := node.children.get(tokens[length])):
            shared = common_prefix(child.edge, tokens[length : length + len(child.edge)])
            node, length = child, length + shared
            if shared < len(child.edge):
                break
        return node, length

    def _split(self, node: _Node, length: int) -> _Node:
        """Return the node that ends at `length`, cutting this one's edge in two where needed."""
        if length == node.depth:
            return node
        assert node.parent is not None  # the root's edge is empty, so that it never splits
        head = _Node(node.parent, node.start, node.edge[: length - node.start], node.last_used)
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
        """Take a leaf out. Its sequence serves its parent on, if no other child holds the parent's tokens."""
        parent, sequence = leaf.parent, leaf.sequence
        assert parent is not None and sequence is not None
        del parent.children[leaf.edge[0]]
        self._leaves.discard(leaf)
        self.tokens -= len(leaf.edge)
        if parent.children or parent is self._root:
            self._runner.free_sequence(sequence)
        else:
            self._runner.truncate_sequence(sequence, parent.depth)
            parent.sequence = sequence
            self._leaves.add(parent)


def _path(node: _Node) -> list[int]:
    """The tokens from the root to a node's end."""
    edges = []
    while node.parent is not None:
        edges.append(node.edge)
        node = node.parent
    return [token for edge in reversed(edges) for token in edge]


def _view(node: _Node) -> PrefixView:
    children = tuple(_view(child) for child in node.children.values())
    sharers = sum(child.sharers for child in children) or 1
    return PrefixView(node.start, node.depth, sharers, node.last_used, children)


def _sequence_below(node: _Node) -> int:
    while node.children:
        node = next(iter(node.children.values()))
    assert node.sequence is not None  # check_integrity: every leaf has one
    return node.sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two lists share."""
    if a[: len(b)] == b[: len(a)]:
        return min(len(a), len(b))
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
