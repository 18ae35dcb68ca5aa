"""Arrays of numbered pages: the keys and values of some of a model's layers, 16 tokens in each page.

cpu_kernels.kv_types defines the layout of a head's page. Within a group of pages each KV head of each layer has a
contiguous run, so that attention reads long streams. Groups are contiguous too, so that a growing pool takes memory
from the front, in huge pages. If layers differ in head size or number of heads, each kind has its own arrays, and a
group is one page.
"""

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Ordered

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.kv_types import Plane
from cpu_kernels.memory import give_back, zeros_from_the_front
from cpu_kernels.pages import HeadPages, KVPages
from models.kv_layout import KVTypes, page_layouts
from models.sizes.attention import Heads

_GROUP = 8
"""Pages of a group. More pages make longer streams, but a first token takes a whole group of memory."""
_Kind = tuple[int, int]
"""What layers must share for their pages to be in one array: key-value heads, and values of a padded head."""


class PageArrays:
    """`count` pages of the layers in `heads`, which store keys and values. Page numbers begin at 0.

    A page's place is its distance from the first page of a layer's head, in pages of one head, or of all layers of a
    kind if there are several kinds (see `of_layer`).
    """

    def __init__(self, heads: Mapping[int, Heads], types: KVTypes, count: int, of_window: bool = False) -> None:
        counts: Counter[_Kind] = Counter()
        self._layers: dict[int, tuple[_Kind, int]] = {}
        for layer, each in heads.items():
            kind = each.keys, each.padded
            self._layers[layer] = kind, counts[kind]
            counts[kind] += 1
        self.group = self.group_places = 1
        if len(counts) == 1:
            [((keys, _), layers)] = counts.items()
            self.group, self.group_places = _GROUP, _GROUP * layers * keys
        self.groups = -(-count // self.group)
        self._of_window = of_window
        # Keys and values of each kind of layer (one array for latents, which are both): [group][layer][head][page][...]
        self._kinds: dict[_Kind, list[NDArray[np.uint8]]] = {}
        self.all: list[tuple[NDArray[np.uint8], Ordered[Plane]]] = []
        """All arrays, each with the planes of a page; none for other data that is kept in pages."""
        for layer, (kind, number) in self._layers.items():
            for layout in page_layouts(heads[layer], types) if number == 0 else ():
                shape = self.groups, counts[kind], kind[0], self.group, layout.page_bytes
                pages = zeros_from_the_front(shape)
                self._kinds.setdefault(kind, []).append(pages)
                self.all.append((pages, layout.planes))
        self._resident = np.zeros(self.groups, np.bool_)

    def __contains__(self, layer: int) -> bool:
        return layer in self._layers

    def of_layer(self, layer: int) -> KVPages:
        """The pages of a layer that stores keys and values, as arguments of attention and of kernels that store."""
        kind, number = self._layers[layer]
        keys, values = (
            HeadPages(
                first=array[0, number].ctypes.data,
                head_bytes=array.strides[2],
                place_bytes=array.strides[0] // self.group_places,
            )
            for array in (self._kinds[kind][0], self._kinds[kind][-1])
        )
        return KVPages(keys=keys, values=values, of_window=int(self._of_window))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the groups that were written, and not given back since."""
        return int(np.count_nonzero(self._resident)) * self.group_bytes

    def touch(self, number: int) -> bool:
        """Note that a page is written; return whether its group takes more memory for that."""
        group = number // self.group
        new = not self._resident[group]
        self._resident[group] = True
        return new

    def give_back(self, free: Ordered[int]) -> None:
        """Return the memory of groups to the system whose pages are all among these free ones."""
        counts = np.bincount(np.asarray(free, np.intp) // self.group, minlength=self.groups)
        for group in np.flatnonzero((counts == self.group) & self._resident).tolist():
            for pages, _ in self.all:
                give_back(pages[group])
            self._resident[group] = False

    @property
    def group_bytes(self) -> int:
        return sum(pages[0].nbytes for pages, _ in self.all)

    def place(self, number: int) -> int:
        """A page's place."""
        return number // self.group * self.group_places + number % self.group

    def places(self, numbers: NDArray[np.integer]) -> NDArray[np.integer]:
        """The places of pages."""
        return numbers // self.group * self.group_places + numbers % self.group

    def number(self, place: int) -> int:
        """The page at a place."""
        group, slot = divmod(place, self.group_places)
        return group * self.group + slot

    def numbers(self, places: NDArray[np.generic]) -> NDArray[np.intp]:
        """The pages at these places."""
        group, slot = np.divmod(np.asarray(places, np.intp), self.group_places)
        return group * self.group + slot

    def views(self, number: int) -> list[tuple[NDArray[np.uint8], Ordered[Plane]]]:
        """A page in each array: a view [layer][head][...], with its planes."""
        group, slot = divmod(number, self.group)
        return [(pages[group, :, :, slot], planes) for pages, planes in self.all]

    def zero(self, number: int) -> None:
        """Zero a page."""
        for view, _ in self.views(number):
            view[...] = 0

    def copy(self, source: int, target: int) -> None:
        """Copy a page to another."""
        for (old, _), (new, _) in zip(self.views(source), self.views(target), strict=True):
            new[...] = old

    def clear(self, number: int, slots: NDArray[np.intp]) -> None:
        """Zero the elements of the tokens in these slots of a page."""
        for view, planes in self.views(number):
            clear(view, planes, slots)

    def read(self, numbers: NDArray[np.intp], last: NDArray[np.intp]) -> bytes:
        """Whole pages: for each array [page][layer][head][bytes]. last: the slots of the last page to zero."""
        group, slot = np.divmod(numbers, self.group)
        copies = [(pages[group, :, :, slot], planes) for pages, planes in self.all]
        for pages, planes in copies if len(last) else ():
            clear(pages[-1], planes, last)
        return b"".join(pages.data for pages, _ in copies)

    def parts(self, numbers: NDArray[np.intp], data: bytes | memoryview) -> list[NDArray[np.uint8]]:
        """What `read` returned for that many pages, divided by array. Raises ValueError for a wrong size."""
        sizes = [pages[0, :, :, 0].nbytes * len(numbers) for pages, _ in self.all]
        stored = np.frombuffer(data, np.uint8)
        if len(stored) != sum(sizes):
            raise ValueError(f"{len(numbers)} stored pages have {len(stored)} bytes instead of {sum(sizes)}")
        found = zip(self.all, np.split(stored, np.cumsum(sizes)[:-1]), strict=True)
        return [part.reshape(len(numbers), *pages.shape[1:3], -1) for (pages, _), part in found]

    def write(self, numbers: NDArray[np.intp], data: bytes | memoryview, first: NDArray[np.intp]) -> None:
        """Write what `read` returned. first: the only slots of the first page to write; empty for all of it.

        Raises ValueError for a wrong size.
        """
        group, slot = np.divmod(numbers, self.group)
        for (pages, planes), copies in zip(self.all, self.parts(numbers, data), strict=True):
            begin = 0
            if len(first) and planes:  # the first page also holds other tokens
                begin = 1
                for plane in planes:
                    tokens = plane.tokens(np.moveaxis(copies[:1], 0, 2))[:, :, first]
                    plane.put(pages[group[0], :, :, slot[0]], first, tokens)
            pages[group[begin:], :, :, slot[begin:]] = copies[begin:]


def clear(page: NDArray[np.uint8], planes: Ordered[Plane], slots: NDArray[np.intp]) -> None:
    """Zero the elements of tokens in these slots of a page [layer][head][bytes]."""
    for plane in planes:
        plane.put(page, slots, np.zeros((1, 1, 1, *plane.token_shape), plane.dtype))
