"""Converts LoRA adapters of PEFT, folders of safetensors, to GGUF: names and the order of rows as the model's import.

A product of B and A is changed as the weights are: import reorders, splits and joins rows, which are B's. So B is
converted like a stored tensor, and A stays. What changes columns or values does not fit the model and is refused.
Format: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gguf_io import ModelFile, open_model
from gguf_io.errors import ModelFileError
from gguf_io.lora import OF_HEADS, TOKENS, Adapter
from localllm.text import shortened
from localllm.wings.importing.checkpoint import CheckpointFolder, StoredTensor
from localllm.wings.importing.config import Config
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.families import FAMILIES
from localllm.wings.importing.family import Family
from localllm.wings.importing.matrices import Floats, Plain, row_count
from localllm.wings.importing.tensors import fitted, names_of, new_name, of_expert, of_text_model

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)\.lora_(embedding_)?([AB])(?:\.weight)?")
_PLAIN = re.compile(r"[\w.]+")
_COUNTS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "qk_rope_head_dim": "rope.dimension_count",
    "qk_nope_head_dim": "attention.key_length_mla",
    "v_head_dim": "attention.value_length_mla",
}
Factors = dict[str, tuple[Floats, Floats]]


def convert_adapter(folder: Path, target: Path, model: ModelFile) -> None:
    """Write an adapter as GGUF, to `target`, for a model. Raises CheckpointError for what cannot be converted."""
    from gguf import GGUFWriter

    stated = Config(CheckpointFolder(folder).json(CONFIG), str(folder / CONFIG))
    stated.expect_all(peft_type="LORA", use_dora=False, bias="none", fan_in_fan_out=False)
    for name in ("modules_to_save", "alora_invocation_tokens"):
        if stated.values.get(name):
            raise CheckpointError(f"{folder / CONFIG}: {name} is set, which a LoRA adapter in GGUF has no place for.")
    made = _converted(folder, stated, model)
    writer = GGUFWriter(target, model.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_name(folder.resolve().name)
    writer.add_float32("adapter.lora.alpha", 0.0)  # the factor is in B, where it may differ by tensor
    for name, (a, b) in made.items():
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
        writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    try:
        with open_model(target) as file:
            Adapter(file, model)
    except ModelFileError as error:
        raise CheckpointError(error.message.replace(str(target), str(folder))) from error


def _converted(folder: Path, stated: Config, model: ModelFile) -> Factors:
    """The factors by the names of the model's tensors, by the first family of its architecture that has all."""
    pairs = _pairs(folder)
    families = [family for family in FAMILIES.values() if family.architecture == model.architecture]
    if not families:
        raise CheckpointError(
            f"{folder}: adapters for models of the architecture {model.architecture!r} cannot be converted. Convert it "
            "with llama.cpp's convert_lora_to_gguf.py."
        )
    errors = []
    for family in families:
        try:
            return _of_family(pairs, stated, family, model)
        except CheckpointError as error:
            errors.append(error)
    raise errors[0]


def _of_family(
    pairs: Mapping[str, tuple[StoredTensor, StoredTensor]], stated: Config, family: Family, model: ModelFile
) -> Factors:
    config = _config_of(model, stated.where)
    names = names_of(family, config.layers)
    found: dict[str, dict[int, tuple[Floats, Floats]]] = {}
    for name, (stored_a, stored_b) in pairs.items():
        plain, expert = of_expert(of_text_model(name))
        a = stored_a.floats(stored_a.raw())
        factor = _factor(stated, name, len(a))
        try:
            made = family.renamed(f"{plain}.weight", Plain(stored_b), config)
        except (ValueError, IndexError) as error:
            raise _no_place(stored_b) from error
        for renamed, matrix in made:
            new = new_name(names, renamed)
            if new is None:
                raise _no_place(stored_b)
            if new == TOKENS:  # B has a row for each value of an embedding, and A a column for each token
                missing = max(config.whole("vocab_size") - a.shape[1], 0)
                both = np.pad(a, ((0, 0), (0, missing))).T, stored_b.floats(stored_b.raw())
            else:
                rows = fitted(new, matrix, family, config)
                both = a, rows.floats(np.arange(row_count(rows.shape))).reshape(rows.shape)
                if new.endswith(OF_HEADS):  # all heads share A; keys' matrices are transposed
                    both = (a[None], both[1]) if "attn_v_b" in new else (both[1], a.T[None])
            found.setdefault(new, {})[expert] = both[0], both[1] * np.float32(factor)
    return {name: _joined(name, parts, model, stated.where) for name, parts in found.items()}


def _joined(name: str, parts: dict[int, tuple[Floats, Floats]], model: ModelFile, where: str) -> tuple[Floats, Floats]:
    """The factors of a tensor, or of all its experts; experts without factors get zeros."""
    if -1 in parts:
        return parts[-1]
    tensor, shapes = model.tensors.get(name), {(a.shape, b.shape) for a, b in parts.values()}
    if tensor is None or len(shapes) != 1 or max(parts) >= tensor.shape[0]:
        raise CheckpointError(f"{where}: the experts of {name} do not fit the model {model.path.name}.")
    a, b = (np.zeros((tensor.shape[0], *shape), np.float32) for shape in next(iter(shapes)))
    for expert, (one_a, one_b) in parts.items():
        a[expert], b[expert] = one_a, one_b
    return a, b


def _pairs(folder: Path) -> dict[str, tuple[StoredTensor, StoredTensor]]:
    """A and B by the name of the module that they change."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor in CheckpointFolder(folder).stored(WEIGHTS):
        match = _NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 2:
            raise _no_place(tensor)
        found.setdefault(match[1], {})[match[3]] = tensor
    for name, parts in found.items():
        if len(parts) < 2:
            raise CheckpointError(f"{folder / WEIGHTS}: {shortened(name)} has only one of lora_A and lora_B.")
        if parts["A"].shape[0] != parts["B"].shape[1]:
            raise CheckpointError(f"{folder / WEIGHTS}: {shortened(name)} has factors of different ranks.")
    return {name: (parts["A"], parts["B"]) for name, parts in found.items()}


def _factor(stated: Config, name: str, rank: int) -> float:
    """What multiplies B A: alpha / rank, or with rsLoRA alpha / sqrt(rank)."""
    alphas = stated.table("alpha_pattern")
    if any(not _PLAIN.fullmatch(key) for key in alphas.values):
        raise CheckpointError(f"{alphas.where} has patterns; only names of modules can be converted.")
    matching = [key for key in alphas.values if f".{name}".endswith(f".{key}")]
    alpha = alphas.number(matching[0]) if matching else stated.number("lora_alpha")
    return alpha / (math.sqrt(rank) if stated.flag("use_rslora") else rank)


def _config_of(model: ModelFile, where: str) -> Config:
    """The sizes of a model's header under the names of a configuration."""
    values: dict[str, Any] = {}
    for name, key in _COUNTS.items():
        value = model.metadata.get(f"{model.architecture}.{key}")
        if isinstance(value, int):
            values[name] = value
    if "qk_nope_head_dim" in values:
        values["qk_nope_head_dim"] -= values.get("qk_rope_head_dim", 0)
    values["vocab_size"] = model.tensors[TOKENS].shape[0] if TOKENS in model.tensors else 0
    return Config(values, where)


def _no_place(tensor: StoredTensor) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: the model has no place for the change {shortened(tensor.name)}. Train the adapter for other "
        "modules, or convert it with llama.cpp's convert_lora_to_gguf.py."
    )
