"""Writing GGUF files with gguf's writer: its last steps, and copies with other metadata."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf


def add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Add values by their Python types; integers and floats in 32 bits."""
    for key, value in keys.items():
        add: Any = {
            list: writer.add_array,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }[type(value)]
        add(key, value)


def finish(writer: gguf.GGUFWriter) -> Path:
    """Write everything added to the writer, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    path = Path(writer.path)
    writer.close()
    return path


def copying(
    source: Path,
    target: Path,
    *,
    architecture: str | None = None,
    without: tuple[str, ...] = (),
    renamed: Callable[[str], str] = str,
    **options: Any,
) -> tuple[gguf.GGUFReader, gguf.GGUFWriter]:
    """A reader of a model, and a writer with all its keys except `without`; the caller adds tensors.

    architecture: another one for the copy. renamed: new names of keys. options: of the writer.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, architecture or reader.fields["general.architecture"].contents(), **options)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", *without):
            items = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(renamed(key), field.contents(), field.types[0], items)
    return reader, writer
