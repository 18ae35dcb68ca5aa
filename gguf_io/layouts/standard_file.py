"""A translated model as one file in the standard layout, of which only the header is made: no tensor is copied."""

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping

from gguf_io.header import TensorInfo
from gguf_io.layouts.layout import Layout

# Fills a buffer with a tensor's bytes from the one of that number on.
ReadTensor = Callable[[TensorInfo, int, memoryview], None]
_SPLIT = "split."  # keys that say which part of a model a file is
_VERSION = 3


class StandardFile:
    """The bytes of that file, made as they are asked for: the new header, then each tensor from where it lies.

    size: bytes of all. read_header: bytes start..stop of the first file. read_tensor raises what reading a file raises.
    """

    def __init__(
        self, layout: Layout, alignment: int, read_header: Callable[[int, int], bytes], read_tensor: ReadTensor
    ) -> None:
        encoded = {
            key: value if isinstance(value, bytes) else read_header(*value)
            for key, value in layout.encoded.items()
            if not key.startswith(_SPLIT)
        }
        self._tensors = list(layout.tensors.values())
        offsets, end = [], 0
        for tensor in self._tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // alignment) * alignment
        header = _header(encoded, self._tensors, offsets)
        self._header = header + bytes(-len(header) % alignment)
        self._starts = [len(self._header) + offset for offset in offsets]
        self._read_tensor = read_tensor
        self.size = len(self._header) + end

    def read_into(self, target: memoryview, offset: int) -> int:
        """Fill `target` from an offset on, as far as the file goes. Returns how many bytes that are."""
        wanted = max(0, min(len(target), self.size - offset))
        done = 0
        while done < wanted:
            done += self._piece(target[done:wanted], offset + done)
        return wanted

    def _piece(self, target: memoryview, offset: int) -> int:
        """Fill the beginning of `target`: as much as lies together. Returns its length, never 0."""
        if offset < len(self._header):
            piece = self._header[offset : offset + len(target)]
            target[: len(piece)] = piece
            return len(piece)
        number = bisect_right(self._starts, offset) - 1
        tensor, start = self._tensors[number], offset - self._starts[number]
        if start < tensor.nbytes:
            length = min(len(target), tensor.nbytes - start)
            self._read_tensor(tensor, start, target[:length])
            return length
        following = self._starts[number + 1] if number + 1 < len(self._starts) else self.size
        length = min(len(target), following - offset)
        target[:length] = bytes(length)
        return length


def _header(encoded: Mapping[str, bytes], tensors: list[TensorInfo], offsets: list[int]) -> bytes:
    """A GGUF header. encoded: values by key, type and all. offsets: of tensors, in the data that follows."""
    pieces = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(encoded))]
    for key, value in encoded.items():
        pieces += (_string(key), value)
    for tensor, offset in zip(tensors, offsets, strict=True):
        dimensions = len(tensor.shape)
        shape = struct.pack(f"<I{dimensions}Q", dimensions, *reversed(tensor.shape))
        pieces += (_string(tensor.name), shape, struct.pack("<IQ", tensor.type.type_id, offset))
    return b"".join(pieces)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
