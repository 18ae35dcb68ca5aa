"""Translates a file's header into the standard layout, and presents the model as a file in that layout."""

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf_io.header import Header, TensorInfo
from gguf_io.layouts.draft import ARCHITECTURE, HeaderDraft
from gguf_io.layouts.ollama import OTHER_PARTS, RULES
from gguf_io.metadata import Metadata

# Fills a buffer with a tensor's bytes, from the given byte on.
ReadTensor = Callable[[TensorInfo, int, memoryview], None]
_SPLIT = "split."  # keys that say which part of a model a file is
_VERSION = 3


@dataclass(frozen=True, slots=True)
class Layout:
    """A model in Ollama's own layout, translated to the standard one.

    given: the architecture that the file names. metadata, tensors: replace the header's. encoded: by key, the bytes of
    its value, type included, or their range (start, stop) in the first file. left_out: tensors that are not used.
    """

    given: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    encoded: Mapping[str, bytes | tuple[int, int]]
    left_out: tuple[TensorInfo, ...]

    def changes(self) -> bytes:
        """Bytes that identify what the rules changed in the header, for a digest."""
        values = [(key, value) for key, value in self.encoded.items() if isinstance(value, bytes)]
        return repr((sorted(values), sorted(self.encoded), sorted(self.tensors))).encode()

    def notes(self) -> list[str]:
        """What a user should know: how it was translated, and which parts of the file are not used."""
        name = self.metadata.get_str(ARCHITECTURE)
        became = "" if name == self.given else f" ({self.given} for {name})"
        notes = [f"The file is in Ollama's own layout{became}, translated as it is read."]
        for beginning, what in OTHER_PARTS.items():
            tensors = [tensor for tensor in self.left_out if tensor.name.startswith(beginning)]
            if tensors:
                size = sum(tensor.nbytes for tensor in tensors) / 2**20
                notes.append(f"Not used: {what}, {len(tensors)} tensors {beginning}* of {size:.1f} MiB.")
        return notes


def translate(path: Path, header: Header, tensors: Mapping[str, TensorInfo]) -> Layout | None:
    """The model in the standard layout, None if it is in that layout already. tensors: those of all its files.

    For a file that no rule applies to, this only checks a few keys.
    """
    given = header.metadata.get(ARCHITECTURE)
    if not isinstance(given, str) or given not in RULES:
        return None
    draft = HeaderDraft(path, header, tensors)
    for rule in RULES[given]:
        if rule.applies(draft):
            rule.rewrite(draft)
            draft.leave_out(*OTHER_PARTS)
            return Layout(
                given,
                Metadata(path, draft.values),
                MappingProxyType(draft.tensors),
                MappingProxyType(draft.encoded),
                tuple(draft.left_out),
            )
    return None


class StandardFile:
    """A translated model as a file in the standard layout, produced on demand.

    It is the new header, followed by each tensor as read from the model's files. size: total bytes. read_header: bytes
    start..stop of the first file. read_tensor raises what reading a file raises.
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
        """Fill `target` from an offset on, up to the end of the file. Returns the number of bytes."""
        wanted = max(0, min(len(target), self.size - offset))
        done = 0
        while done < wanted:
            done += self._piece(target[done:wanted], offset + done)
        return wanted

    def _piece(self, target: memoryview, offset: int) -> int:
        """Fill the beginning of `target` from the header, one tensor or padding. Returns its length, never 0."""
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
    """A GGUF header. encoded: values by key, type included. offsets: of tensors, within the data section."""
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
