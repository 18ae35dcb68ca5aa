"""Converts a folder of safetensors to one GGUF file: headers first, then tensor by tensor, quantising on the way."""

import os
import struct
from collections.abc import Callable, Mapping
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gguf_io import open_model
from localllm.library.entry import LibraryModel, Source
from localllm.library.errors import LibraryError
from localllm.library.manifest import Manifest, blob_name
from localllm.library.own_store import ELSEWHERE, OwnStore, free_bytes
from localllm.wings.importing.checkpoint import Checkpoint
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.families import find_family
from localllm.wings.importing.family import model_keys, pooling_keys, xielu_keys
from localllm.wings.importing.tensors import NewTensor, new_tensors
from localllm.wings.importing.vocabulary import vocabulary_keys
from localllm.wings.lab.quality.quantize import LLAMA_TYPES, TYPES, Progress, is_matrix, quantize, store_model
from models.needs import native_needs
from models.registry import ARCHITECTURES, TEXT_ENCODERS
from models.text_encoder import encoder_needs

_ALWAYS_FLOAT = (
    *(
        "shortconv.conv.weight",
        "ssm_conv1d.weight",
        "ssm_conv1d_q.weight",
        "ssm_conv1d_k.weight",
        "ssm_conv1d_v.weight",
    ),
    *("token_types.weight", "position_embd.weight"),
)
_KEPT = ("MXFP4", "NVFP4")


def imported_model(
    store: OwnStore, folder: Path, kind: str | None, progress: Progress, tell: Callable[[str], None]
) -> LibraryModel:
    """Import a folder's model as a blob of localllm's store.

    Raises what import_folder raises, UnsupportedModelError for a model that the native engine would refuse,
    LibraryError for a full disk.
    """
    checkpoint = Checkpoint(folder)
    size = sum(tensor.stop - tensor.start for tensor in checkpoint.tensors.values())
    if (free := free_bytes(store.root)) < size:
        raise LibraryError(
            f"Importing {folder} may take {size >> 20} MiB, and {free >> 20} MiB of the disk are free. "
            f"Remove a model. {ELSEWHERE}"
        )

    def write(made: Path) -> None:
        import_folder(folder, made, kind, progress, tell)
        with open_model(made) as file:
            plan = encoder_needs if file.architecture in TEXT_ENCODERS.keys() - ARCHITECTURES.keys() else native_needs
            plan(file)  # refuses missing tensors and wrong shapes

    layer = store_model(store, write)
    path = store.blobs / blob_name(layer.digest)
    return LibraryModel(
        (os.path.basename(os.path.realpath(folder)),), Source.OWN, path, Manifest((layer,)), blobs=store.blobs
    )


def import_folder(
    folder: Path, target: Path, kind: str | None, progress: Progress, tell: Callable[[str], None]
) -> None:
    """Write a folder's model to `target`, which must not exist. kind: the format of matrices; None keeps their own.

    Uses memory for the largest tensor in its new format and a few MiB. tell: called with notes on what is left out.
    Raises CheckpointError for what cannot be imported, before anything is written; what quantize raises; OSError.
    """
    kind = kind.upper() if kind else None
    if kind is not None and kind not in TYPES:
        raise CheckpointError(f"There is no type {kind}. Choose one of {', '.join(TYPES)}.")
    if kind not in LLAMA_TYPES:
        _write(folder, target, kind, progress, tell)
        return
    whole = target.with_name(f"{target.stem}-whole{target.suffix}")
    try:
        _write(folder, whole, None, progress, tell, refuse_blocks=True)
        quantize(whole, target, kind, progress)
    finally:
        whole.unlink(missing_ok=True)


def _write(
    folder: Path,
    target: Path,
    kind: str | None,
    progress: Progress,
    tell: Callable[[str], None],
    *,
    refuse_blocks: bool = False,
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    checkpoint = Checkpoint(folder)
    where = str(folder / "config.json")
    config = Config(checkpoint.config, where)
    family = find_family(checkpoint.model_type, config)
    try:
        keys, factors = model_keys(family, config)
    except (ArithmeticError, ValueError) as error:
        raise CheckpointError(f"{where}: its numbers do not fit together ({error}). Download it again.") from error
    tensors, notes = new_tensors(checkpoint, family, config)
    keys |= pooling_keys(checkpoint)
    vocabulary = vocabulary_keys(checkpoint, keys.pop("vocab_size")) | xielu_keys(checkpoint, config.layers)
    if kind is None and refuse_blocks and (kept := sorted({tensor.exact for tensor in tensors} & set(_KEPT))):
        raise CheckpointError(
            f"{folder}: weights are {kept[0]} already, and quantising twice adds the errors of both. "
            "Leave out --quantize, or choose Q8_0, which quantises the rest."
        )
    for note in notes:
        tell(note)
    kinds = {tensor.name: _kind(tensor, kind) for tensor in tensors}
    tensors, of_blocks = _block_factors(tensors, kinds)
    factors |= of_blocks
    with closing(GGUFWriter(target, family.architecture)) as writer:
        writer.add_name(os.path.basename(os.path.realpath(folder)))
        writer.add_quantization_version(2)
        matrices = {kinds[tensor.name] for tensor in tensors if is_matrix(tensor.name, tensor.shape)}
        main = kind or next((each for each in matrices if len(matrices) == 1 or each == "NVFP4"), "F16")
        writer.add_file_type(LlamaFileType.ALL_F32 if main == "F32" else LlamaFileType[f"MOSTLY_{main}"])
        for key, value in keys.items():
            _add(writer, f"{family.architecture}.{key}", value)
        for key, value in vocabulary.items():
            _add(writer, key, value)
        for name, values in factors.items():
            writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
        for tensor in tensors:
            block_type = GGMLQuantizationType[kinds[tensor.name]]
            shape = quants.quant_shape_to_byte_shape(tensor.shape, block_type)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), prod(shape), block_type)
        writer.write_header_to_file()
        try:
            writer.write_kv_data_to_file()
        except (ValueError, struct.error) as error:  # half a surrogate pair in a token, and the like
            target.unlink()
            raise CheckpointError(
                f"{folder}: config.json or the tokenizer has a value that GGUF cannot hold: {error}. Download it again."
            ) from error
        writer.write_ti_data_to_file()
        for values in factors.values():
            writer.write_tensor_data(values)
        for done, tensor in enumerate(tensors):
            progress("importing", done / len(tensors))
            writer.write_tensor_data(_blocks(tensor, kinds[tensor.name]))
    progress("importing", 1.0)


def _kind(tensor: NewTensor, kind: str | None) -> str:
    """The format of a tensor. Norms, biases, routers and convolutions are floats, whatever the format of matrices.

    Blocks in formats that GGUF also has are kept.
    """
    if not is_matrix(tensor.name, tensor.shape) or tensor.name.endswith(_ALWAYS_FLOAT):
        return "F32"
    if kind is None or tensor.exact in _KEPT:
        return tensor.exact
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind


def _block_factors(
    tensors: list[NewTensor], kinds: Mapping[str, str]
) -> tuple[list[NewTensor], dict[str, NDArray[np.float32]]]:
    """The remaining tensors, and by name the factors of matrices kept as NVFP4: one, or one for each expert.

    A tensor of the same name that the model has itself (Gemma 4's scales of experts) is multiplied into the factors.
    """
    found: dict[str, NDArray[np.float32]] = {}
    for tensor in tensors:
        if kinds[tensor.name] == "NVFP4":
            name = f"{tensor.name.removesuffix('weight')}scale"
            found[name] = np.array([part.factor for part in tensor.parts], np.float32)
    for tensor in tensors:
        if tensor.name in found:
            found[tensor.name] *= tensor.parts[0].floats(np.arange(len(found[tensor.name])))[:, 0]
    return [tensor for tensor in tensors if tensor.name not in found], found


def _blocks(tensor: NewTensor, kind: str) -> NDArray[np.uint8]:
    from gguf import GGMLQuantizationType, quants

    block_type = GGMLQuantizationType[kind]
    width = tensor.shape[-1]
    out = np.empty(quants.quant_shape_to_byte_shape((prod(tensor.shape) // width, width), block_type), np.uint8)
    first = 0
    for part, rows in tensor.pieces():
        if kind in _KEPT:
            packed = part.blocks(rows)
        else:
            packed = quants.quantize(part.floats(rows).reshape(-1, width), block_type)
        out[first : first + len(packed)] = np.ascontiguousarray(packed).view(np.uint8)
        first += len(packed)
    return out


def _add(writer: Any, key: str, value: Any) -> None:
    """Write a key with the GGUF type of its value."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)
