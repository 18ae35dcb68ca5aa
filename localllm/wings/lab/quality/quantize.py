"""Quantises a model file: with our own code for simple formats, with llama.cpp for the others.

Our own output equals llama.cpp's, tensor for tensor: gguf.quants computes the same blocks, and the choice of tensors
follows llama_model_quantize (src/llama-quant.cpp).
"""

import ctypes
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io import open_model
from gguf_io.errors import ModelFileError
from gguf_io.model_file import ModelFile, TensorInfo
from gguf_io.system import replace, sync_file, sync_folder
from gpu_offload.library import llama, muted
from gpu_offload.library import logger as llama_log
from localllm.errors import RequestError
from localllm.files import TEMPORARY, listed, stale, usual_mode
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError
from localllm.library.manifest import Layer, Manifest, blob_name
from localllm.library.own_store import ELSEWHERE, OwnStore, free_bytes
from models.registry import ARCHITECTURES

OWN_TYPES = ("F16", "BF16", "Q8_0")
LLAMA_TYPES = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M"),
    *("Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_M", "TQ1_0", "TQ2_0"),
)
TYPES = (*OWN_TYPES, *LLAMA_TYPES)

Progress = Callable[[str, float], None]

log = logging.getLogger(__name__)

_EXACT = frozenset({"F32", "F16", "BF16"})
_QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION
_UNFINISHED = ".gguf.tmp"
_SMALL_BLOCKS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"})  # of 32 numbers; all others have 256
_TENSOR_DONE = re.compile(r"\[ *(\d+)/ *(\d+)\]")  # begins the line of each tensor in llama.cpp's log
_NEVER = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight")


def quantize(source: Path, target: Path, kind: str, progress: Progress, threads: int | None = None) -> None:
    """Write a copy of `source` with its matrices in the format `kind`, one of TYPES. `target` appears only if complete.

    Raises RequestError for an unknown kind, a source that is already quantised or a target that exists, ModelFileError,
    and LlamaCppMissingError if llama.cpp is needed.
    """
    kind = kind.upper()
    if kind not in TYPES:
        raise RequestError(f"There is no type {kind}. Choose one of {', '.join(TYPES)}.")
    _refuse_existing(target)
    with open_model(source) as file:
        if file.notes:
            raise RequestError(
                f"{source} cannot be quantised. {file.notes[0]} Start from a file in llama.cpp's layout."
            )
        found = sorted({tensor.type.name for tensor in file.tensors.values()} - _EXACT)
        if found:
            raise RequestError(
                f"{source} is quantised already ({', '.join(found)}), and quantising twice adds the errors of both. "
                "Start from the F16, BF16 or F32 file."
            )
        own = kind in OWN_TYPES and file.architecture in ARCHITECTURES
        with _whole(target) as unfinished:
            if own:
                _write(file, unfinished, kind, progress)
            else:
                _by_llama(file, unfinished, kind, progress, threads)


def quantized_model(store: OwnStore, base: LibraryModel, kind: str, progress: Progress) -> LibraryModel:
    """The same model with its weights in another format, stored as a blob of localllm's store.

    Raises what quantize raises, LibraryError if the disk is too full, and what progress raises, which stops the work.
    """
    with open_model(base.path) as file:
        size = file.size_bytes
    if (free := free_bytes(store.root)) < size:
        raise LibraryError(
            f"Quantising {base.name} may take {size >> 20} MiB, and {free >> 20} MiB of the disk are free. "
            f"Remove a model. {ELSEWHERE}"
        )
    layer = store_model(store, lambda made: quantize(base.path, made, kind, progress))
    rest = () if base.manifest is None else tuple(one for one in base.manifest.layers if one.kind != "model")
    path = store.blobs / blob_name(layer.digest)
    manifest = Manifest((layer, *rest), projector_link=base.manifest.projector_link if base.manifest else None)
    return LibraryModel(base.names, Source.OWN, path, manifest, blobs=base.blobs or store.blobs)


def store_model(store: OwnStore, write: Callable[[Path], None]) -> Layer:
    """Call `write` with a new path, and make the model file that it writes there a blob of the store."""
    store.prepare()
    made = store.temporary(".gguf")
    try:
        write(made)
        with made.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        layer = Layer("model", digest, made.stat().st_size)
        made.replace(store.blobs / blob_name(layer.digest))
    finally:
        made.unlink(missing_ok=True)
    sync_folder(store.blobs)
    return layer


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix that quantised files store in blocks; norms, biases and routers keep their type."""
    return name.endswith("weight") and len(shape) >= 2 and not name.endswith(_NEVER)


def _write(file: ModelFile, target: Path, kind: str, progress: Progress) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    types = {name: _type_of(tensor, kind) for name, tensor in file.tensors.items()}
    with closing(GGUFWriter(target, file.architecture)) as writer:
        _copy_metadata(file.path, writer)
        writer.add_quantization_version(_QUANTIZATION_VERSION)
        writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
        for name, tensor in file.tensors.items():
            block_type = GGMLQuantizationType[types[name]]
            shape = quants.quant_shape_to_byte_shape(tensor.shape, block_type)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), prod(shape), block_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, name in enumerate(file.tensors):
            progress("quantising", done / len(file.tensors))
            writer.write_tensor_data(_blocks(file, name, types[name]))
    progress("quantising", 1.0)


def _type_of(tensor: TensorInfo, kind: str) -> str:
    """The format of a tensor in the new file; F16 if its rows are not a multiple of the block length."""
    if not is_matrix(tensor.name, tensor.shape):
        return tensor.type.name
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind


def _blocks(file: ModelFile, name: str, kind: str) -> NDArray[np.uint8]:
    from gguf import GGMLQuantizationType, quants

    if file.tensors[name].type.name == kind:
        return file.data(name)
    try:
        with np.errstate(invalid="raise", over="raise"):  # instead of a warning and wrong values
            quantized = quants.quantize(file.dequantize(name), GGMLQuantizationType[kind])
    except FloatingPointError as error:
        raise ModelFileError(
            f"{file.path}: the tensor {name} has values that are not finite, or too large for {kind}. Quantise to BF16 "
            "where they are large; otherwise the file is damaged: download or convert it again."
        ) from error
    return np.ascontiguousarray(quantized).view(np.uint8)


def _copy_metadata(source: Path, writer: Any) -> None:
    """Copy all keys with their types, except those that the new file sets itself and those of split files."""
    from gguf import GGUFReader, GGUFValueType

    for field in GGUFReader(source).fields.values():
        if field.name.startswith(("GGUF.", "split.")) or field.name in (
            "general.architecture",
            "general.file_type",
            "general.quantization_version",
        ):
            continue
        is_array = field.types[0] is GGUFValueType.ARRAY
        writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if is_array else None)


def _by_llama(file: ModelFile, target: Path, kind: str, progress: Progress, threads: int | None) -> None:
    library = llama()
    parameters = library.llama_model_quantize_default_params()
    parameters.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = threads or 0
    with muted(), _progress_from_log(lambda share: progress("quantising with llama.cpp", share)):
        status = library.llama_model_quantize(os.fsencode(file.path), os.fsencode(target), ctypes.byref(parameters))
    progress("quantising with llama.cpp", 1.0)
    if status != 0:
        raise RequestError(f"llama.cpp cannot quantise {file.path} to {kind}; --debug shows its messages.")
    block = 32 if kind in _SMALL_BLOCKS else 256
    matrices = [tensor for tensor in file.tensors.values() if is_matrix(tensor.name, tensor.shape)]
    if larger := sum(matrix.shape[-1] % block > 0 for matrix in matrices):
        log.warning("%d matrices have rows that %s cannot hold, and are stored in larger types", larger, kind)


@contextmanager
def _progress_from_log(progress: Callable[[float], None]) -> Iterator[None]:
    """Read the number of finished tensors from llama.cpp's log, since it has no callback for that.

    What progress raises is raised at the end; llama.cpp cannot be stopped.
    """
    shown_from, level = llama_log.getEffectiveLevel(), llama_log.level
    raised: BaseException | None = None

    def passes(record: logging.LogRecord) -> bool:
        nonlocal raised
        if (done := _TENSOR_DONE.match(record.getMessage())) and raised is None:
            try:
                progress((int(done[1]) - 1) / int(done[2]))
            except BaseException as error:  # must not propagate through C frames
                raised = error
        return record.levelno >= shown_from

    llama_log.addFilter(passes)
    llama_log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        llama_log.setLevel(level)
        llama_log.removeFilter(passes)
    if raised is not None:
        raise raised


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise RequestError(f"{target} exists already. Name another file, or remove it first.")


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """A temporary file beside the target that replaces it on success. Raises RequestError.

    Files that a killed process left for the same target are removed.
    """
    folder, prefix = target.absolute().parent, f"{TEMPORARY}{target.name}."
    try:
        for left in listed(folder):
            if left.name.startswith(prefix) and left.name.endswith(_UNFINISHED) and stale(left):
                left.unlink()
        handle, name = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=_UNFINISHED)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror}.") from error
    os.close(handle)
    try:
        os.chmod(name, usual_mode())  # mkstemp makes files that only the user can read
        yield Path(name)
        with open(name, "r+b") as file:
            sync_file(file.fileno())
        _refuse_existing(target)  # again: quantising takes minutes
        replace(Path(name), target)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror}.") from error
    finally:
        Path(name).unlink(missing_ok=True)
