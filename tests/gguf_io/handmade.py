"""GGUF files assembled byte by byte, so that any field can be wrong."""

import struct
from collections.abc import Sequence

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes, length: int | None = None) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str | bytes, type_id: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", type_id) + payload


def u32(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def text(name: str, value: str | bytes) -> bytes:
    return key(name, STRING, string(value))


def array(name: str, item_type: int, count: int, payload: bytes = b"") -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", item_type, count) + payload)


def tensor(name: str | bytes, dims: Sequence[int], type_id: int = 0, offset: int = 0) -> bytes:
    """A row of the tensor table; dims in the file's order, innermost first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf_file(
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; the counts may be wrong."""
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data
