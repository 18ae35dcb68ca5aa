"""From a file's header to what it says in the standard layout."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gguf_io.header import SCALAR_CODES, Header, TensorInfo
from gguf_io.layouts.draft import ARCHITECTURE, Draft
from gguf_io.layouts.ollama import OTHER_PARTS, RULES
from gguf_io.metadata import Metadata, MetadataArray, Value

_STRING, _ARRAY = 8, 9
_TYPE_IDS = {code: type_id for type_id, code in SCALAR_CODES.items()} | {"s": _STRING}


@dataclass(frozen=True, slots=True)
class Layout:
    """A model that another program wrote its own way, in the standard layout.

    given: its architecture as the file has it. metadata, tensors: what stands for the header's. encoded: by key, the
    bytes of its value, type and all, or where they lie in the first file: (start, stop). left_out: tensors that are not
    used.
    """

    program: str
    given: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    encoded: Mapping[str, bytes | tuple[int, int]]
    left_out: tuple[TensorInfo, ...]

    def changes(self) -> bytes:
        """What the rules made of the header: another rule, other bytes."""
        values = [(key, value) for key, value in self.encoded.items() if isinstance(value, bytes)]
        return repr((sorted(values), sorted(self.encoded), sorted(self.tensors))).encode()

    def notes(self) -> list[str]:
        """What a user should know: whose layout it is, and which parts of the file are not used."""
        name = self.metadata.get_str(ARCHITECTURE)
        became = "" if name == self.given else f" ({self.given} for {name})"
        notes = [f"The file is in {self.program}'s own layout{became}, translated as it is read."]
        for beginning, what in OTHER_PARTS.items():
            tensors = [tensor for tensor in self.left_out if tensor.name.startswith(beginning)]
            if tensors:
                size = sum(tensor.nbytes for tensor in tensors) / 2**20
                notes.append(f"Not used: {what}, {len(tensors)} tensors {beginning}* of {size:.1f} MiB.")
        return notes


def translate(path: Path, header: Header, tensors: Sequence[TensorInfo]) -> Layout | None:
    """The model in the standard layout, None where it is that already. tensors: those of all its files.

    Costs no more than a look at some keys for a file that no rule concerns.
    """
    given = header.metadata.get(ARCHITECTURE)
    if not isinstance(given, str) or given not in RULES:
        return None
    draft = Draft(path, dict(header.metadata), tensors)
    rule = next((rule for rule in RULES[given] if rule.applies(draft)), None)
    if rule is None:
        return None
    rule.rewrite(draft)
    draft.leave_out(*OTHER_PARTS)
    encoded = {
        key: _encoded(draft.codes[key], draft.values[key]) if key in draft.codes else header.encoded[draft.sources[key]]
        for key in draft.values
    }
    return Layout(
        "Ollama",
        given,
        Metadata(path, draft.values),
        MappingProxyType(draft.tensors),
        MappingProxyType(encoded),
        tuple(draft.left_out),
    )


def _encoded(code: str, value: Value) -> bytes:
    """A value as a header has it: its type, then itself."""
    if isinstance(value, MetadataArray):
        return struct.pack("<IIQ", _ARRAY, _TYPE_IDS[code], len(value)) + value.raw()
    if isinstance(value, str):
        data = value.encode()
        return struct.pack("<IQ", _STRING, len(data)) + data
    return struct.pack(f"<I{code}", _TYPE_IDS[code], value)
