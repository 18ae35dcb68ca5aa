"""LoRA adapters in GGUF, as llama.cpp's convert_lora_to_gguf.py writes them: what a file changes, and in which model.

NAME.lora_a and NAME.lora_b change the model's tensor NAME: x -> W x + weight * alpha / rank * B (A x). A has a row for
each rank and B a row for each output, both for each expert if W has experts. For token embeddings A is transposed. The
heads' matrices of attention on latents have such factors too, of which all heads may share one.
"""

from dataclasses import dataclass
from functools import cached_property

from gguf_io.errors import ModelFileError, shortened
from gguf_io.header import TensorInfo
from gguf_io.model_file import ModelFile

TOKENS = "token_embd.weight"
OF_HEADS = (".attn_k_b.weight", ".attn_v_b.weight")
"""Tensors with a matrix for each head, of attention on latents."""
OLD_OF_HEADS = ".attn_kv_b.weight"
"""Both as one matrix, in older files."""
_A, _B, _NORM = ".lora_a", ".lora_b", "_norm.weight"
_OTHER_MODEL = "It was made for another model: use it with that one."


@dataclass(frozen=True)
class LoraPair:
    """The two factors that change a tensor, and their rank."""

    a: TensorInfo
    b: TensorInfo
    rank: int


class Adapter:
    """An adapter for a model, checked against its header. The file stays the caller's to close.

    pairs: by the name of the changed tensor.
    """

    def __init__(self, file: ModelFile, model: ModelFile) -> None:
        """Raises ModelFileError for a file that is no adapter, or not one for this model."""
        check_kind(file, model.architecture)
        self.file = file
        self.alpha = _alpha(file)
        self.pairs: dict[str, LoraPair] = {}
        for name in file.tensors:
            base, part = name[: -len(_A)], name[-len(_A) :]
            if part == _A:
                self.pairs[base] = _pair(file, model, base)
            elif part == _B:
                if base + _A not in file.tensors:
                    raise ModelFileError(f"{file.path}: {shortened(name)} lacks its other factor, {base}{_A}.")
            elif not name.endswith(_NORM):  # llama.cpp leaves norms unchanged too
                raise ModelFileError(f"{file.path}: {shortened(name)} is neither a {_A} nor a {_B} tensor.")
        if not self.pairs:
            raise ModelFileError(f"{file.path}: the adapter changes no tensor.")

    def factor(self, pair: LoraPair) -> float:
        """What multiplies B (A x), besides the weight that a request chooses."""
        return self.alpha / pair.rank if self.alpha else 1.0

    @cached_property
    def largest_rank(self) -> int:
        """The largest rank of its factors."""
        return max(pair.rank for pair in self.pairs.values())


def check_kind(file: ModelFile, architecture: str) -> None:
    """Raise ModelFileError unless a file is a LoRA adapter for models of this architecture."""
    kind = file.metadata.get_str("adapter.type", "")
    if kind != "lora":
        raise ModelFileError(
            f"{file.path} is not a LoRA adapter in GGUF (adapter.type is {shortened(kind)!r}). Convert one with "
            "localllm create --adapter, or with llama.cpp's convert_lora_to_gguf.py."
        )
    if file.architecture != architecture:
        raise ModelFileError(
            f"{file.path} is an adapter for {shortened(file.architecture)!r}; the model is {architecture!r}."
        )


def _alpha(file: ModelFile) -> float:
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ModelFileError(
            f"{file.path}: the adapter is an activated one (aLoRA), which changes only what follows certain tokens. "
            "That is not supported."
        )
    return file.metadata.get_float("adapter.lora.alpha", 0.0)


def _pair(file: ModelFile, model: ModelFile, name: str) -> LoraPair:
    """The factors of a tensor. Raises ModelFileError if they do not fit it."""
    tensor, a, b = model.tensors.get(name), file.tensors[name + _A], file.tensors.get(name + _B)
    if b is None:
        raise ModelFileError(f"{file.path}: {shortened(a.name)} lacks its other factor, {shortened(name)}{_B}.")
    if tensor is None and name == "output.weight":
        tensor = model.tensors.get(TOKENS)  # the output of models with tied embeddings, which is changed alone
    if tensor is None:
        raise ModelFileError(f"{file.path}: {model.path.name} has no tensor {shortened(name)}. {_OTHER_MODEL}")
    rank = b.shape[-1]
    *experts, outputs, inputs = tensor.shape if len(tensor.shape) > 1 else (1, *tensor.shape)
    expected = ((*experts, rank, inputs), (*experts, outputs, rank))
    if name == TOKENS:
        expected = (outputs, rank), (inputs, rank)
    fits = all(
        found == whole or (found == (1, *whole[1:]) and name.endswith(OF_HEADS))
        for found, whole in zip((a.shape, b.shape), expected, strict=True)
    )
    if not fits or not 1 <= rank <= max(outputs, inputs):
        raise ModelFileError(
            f"{file.path}: the factors of {name} have the shapes {a.shape} and {b.shape}, which do not fit the model's "
            f"tensor of {tensor.shape}. {_OTHER_MODEL}"
        )
    return LoraPair(a, b, rank)
