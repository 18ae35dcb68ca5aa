"""Sizes of layers that keep a state of all tokens before, in place of attention or beside it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass


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
    @abstractmethod
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that a thread needs."""
