"""Previous rows that short convolutions need, kept in the pages of tokens and shared with them.

For each layer a page holds the last convolution rows written to it (cpu_kernels.short_convolution). A full page is thus
a snapshot, and a sequence that continues at the last row written to its last page needs no recomputation. Anywhere else
in a page, e.g. in a fork, the page's rows are recomputed from its first token on, whose ids it stores: less than a
page.

A sequence truncated within the latest step, e.g. when drafted tokens are rejected, takes the state after its last row
from those that the step kept, and recomputes nothing.
"""

import numpy as np

from cpu_kernels.kv_types import PAGE_TOKENS
from cpu_kernels.memory import aligned_zeros, zeros_from_the_front
from models.sizes.convolution import ConvolutionSizes

STATE_ROWS = 64
"""Rows of a step whose states are kept. Steps with drafts are shorter; truncation beyond these rows recomputes."""


class ConvolutionStates:
    """Pages of rows, and the states after the rows of the latest step.

    pages: uint8 [group][layer][1][page of the group][bytes], like pages of keys.
    group_places: place numbers that a group spans in a page table.
    """

    def __init__(self, sizes: ConvolutionSizes, groups: int, group: int, group_places: int) -> None:
        self.sizes, self.group_places = sizes, group_places
        layers = np.flatnonzero(sizes.layers).tolist()
        self.pages = zeros_from_the_front((groups, len(layers), 1, group, sizes.layer_bytes))
        self._numbers = {layer: i for i, layer in enumerate(layers)}
        self.latest = aligned_zeros((len(layers), STATE_ROWS, sizes.rows, sizes.padded), np.float32)
        """The kept states of a step."""

    def arguments(self, layer: int) -> dict[str, int]:
        """Arguments of cpu_kernels.short_convolution about a layer's pages and states."""
        number = self._numbers[layer]
        return {
            "pages": self.pages[0, number].ctypes.data,
            "page_bytes": self.sizes.layer_bytes,
            "group_bytes": self.pages.strides[0],
            "places": self.group_places,
            "states": self.latest[number].ctypes.data,
            "kept": STATE_ROWS,
        }

    def take_back(self, row: int, position: int, group: int, slot: int) -> None:
        """Restore a page's rows to their state after row `row` of the latest step, which is at `position`."""
        page = self.pages[group, :, 0, slot].view(np.float32).reshape(-1, self.sizes.rows, self.sizes.padded)
        for back in range(min(self.sizes.rows, position % PAGE_TOKENS + 1)):
            place = (position - back) % self.sizes.rows
            page[:, place] = self.latest[:, row, place]
