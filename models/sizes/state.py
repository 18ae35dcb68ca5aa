"""Sizes of layers that keep a state of all tokens before, in place of attention or beside it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from models.sizes.reading import whole_vectors


@dataclass(frozen=True)
class StateSizes:
    """layers: which layers have the state. reach: rows that their convolution reads, the row's own included."""

    layers: tuple[bool, ...]
    reach: int

    def attends(self, heads: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which layers have attention. heads: those for which the file states key-value heads."""
        return heads


@dataclass(frozen=True)
class SlotSizes(StateSizes, ABC):
    """Of a state that is too large for every page: it is kept in slots, whose parts are divided among threads."""

    @property
    @abstractmethod
    def inner(self) -> int:
        """Values of an output row."""

    @property
    @abstractmethod
    def slot_parts(self) -> int:
        """Parts of a layer's slot."""

    @property
    @abstractmethod
    def part_bytes(self) -> int:
        """Bytes of one part of a layer's slot."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(self.layers) * self.slot_parts * self.part_bytes

    @property
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""


@dataclass(frozen=True)
class HeadSlotSizes(SlotSizes, ABC):
    """Of a delta network. head_size: values of a query, a key and a value of each head."""

    head_size: int

    @property
    def padded(self) -> int:
        """A head's values rounded up to whole vectors."""
        return whole_vectors(self.head_size)
