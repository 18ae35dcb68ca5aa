"""What predicting a model's times requires: sizes and operations, from a file's header or from figures."""

import math
from dataclasses import dataclass
from typing import Self

from gguf_io import ModelFile
from localllm.errors import RequestError
from localllm.wings.lab.formulas import memory, speed
from models.config import read_config

_EXPERTS = "_exps."
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes in bytes. Operations are per row; a multiply-add counts as two.

    weights: of the whole file, in memory. dense_bytes and expert_bytes: read by a step, without the output matrix; a
    step reads only the experts that its rows use. latents: whether a token stores one row of head_size values as both
    key and value. lookup_operations: for each token that a row attends to. Sliding windows are ignored: every layer
    attends to the whole context. value_bytes: of each stored number of keys and values.
    """

    name: str
    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head_size: int
    context: int
    weights: float
    dense_bytes: float
    output_bytes: float
    row_operations: float
    output_operations: float
    expert_bytes: float = 0.0
    experts: int = 0
    experts_used: int = 0
    latents: bool = False
    value_bytes: float = memory.F16_BYTES

    @property
    def decode_operations(self) -> float:
        """Operations of a row with logits, without attention: two for each weight used."""
        return self.row_operations + self.output_operations

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        if self.latents:
            return int(memory.latent_kv_bytes_per_token(self.layers, self.head_size, 0, self.value_bytes))
        return int(memory.kv_bytes_per_token(self.layers, self.kv_heads, self.head_size, self.value_bytes))

    @property
    def lookup_operations(self) -> float:
        """Operations of attention for each token that a row attends to, over all layers and heads."""
        return speed.operations_per_token(0, self.layers, self.heads, self.head_size, 1)

    def experts_share(self, rows: float) -> float:
        """The share of experts that a step of `rows` rows reads, 0 to 1."""
        if not self.experts:
            return 0.0
        return speed.experts_read(self.experts, self.experts_used, math.ceil(rows)) / self.experts

    def read_bytes(self, rows: float) -> float:
        """Bytes of weights that a step of `rows` decoding rows reads."""
        return self.dense_bytes + self.expert_bytes * self.experts_share(rows) + self.output_bytes

    def pages(self, memory_bytes: float, page: int) -> int:
        """KV pages of `page` tokens that fit beside the weights. Raises RequestError if not one fits."""
        pages = int((memory_bytes - self.weights) // (self.kv_bytes_per_token * page))
        if pages < 1:
            raise RequestError(
                f"{self.name} takes {self.weights / 1e9:.1f} GB of weights, which leaves nothing of "
                f"{memory_bytes / 1e9:.1f} GB for keys and values. Take fewer bits, more devices, or more --memory."
            )
        return pages

    @classmethod
    def of_file(cls, file: ModelFile) -> Self:
        """From a file's header. Raises UnsupportedModelError for architectures unknown to the native engine."""
        config = read_config(file)
        tensors = file.tensors
        output = tensors[_OUTPUT if _OUTPUT in tensors else _EMBEDDING]
        rest = [each for name, each in tensors.items() if name not in (_EMBEDDING, _OUTPUT)]
        experts = [each for each in rest if _EXPERTS in each.name]
        expert_bytes = sum(each.nbytes for each in experts)
        heads, mixture = config.attention.usual, config.experts
        used = mixture.used / mixture.count if mixture else 0.0
        dense = sum(math.prod(each.shape) for each in rest if _EXPERTS not in each.name)
        return cls(
            name=file.path.name,
            layers=config.layers,
            embedding=config.embedding,
            heads=heads.queries,
            kv_heads=heads.keys,
            head_size=heads.size,
            context=config.context,
            weights=file.weights_bytes,
            dense_bytes=sum(each.nbytes for each in rest) - expert_bytes,
            output_bytes=output.nbytes,
            row_operations=speed.operations_per_token(dense + used * sum(math.prod(each.shape) for each in experts)),
            output_operations=speed.operations_per_token(math.prod(output.shape)),
            expert_bytes=expert_bytes,
            experts=mixture.count if mixture else 0,
            experts_used=mixture.used if mixture else 0,
            latents=config.attention.latents is not None,
        )


def llama_3_8b(bits: float = 4.9) -> StepShape:
    return _llama_3("8B", 8.03e9, bits, layers=32, embedding=4096, heads=32)


def llama_3_70b(bits: float = 4.9) -> StepShape:
    return _llama_3("70B", 70.6e9, bits, layers=80, embedding=8192, heads=64)


def _llama_3(size: str, parameters: float, bits: float, *, layers: int, embedding: int, heads: int) -> StepShape:
    """A shape with separate embedding and output matrices, all weights having the same bits."""
    output = 128256.0 * embedding
    dense = parameters - 2 * output
    return StepShape(
        name=f"Llama-3-{size}'s shape, {bits:g} bits",
        layers=layers,
        embedding=embedding,
        heads=heads,
        kv_heads=8,
        head_size=128,
        context=8192,
        weights=memory.weight_bytes(parameters, bits),
        dense_bytes=memory.weight_bytes(dense, bits),
        output_bytes=memory.weight_bytes(output, bits),
        row_operations=speed.operations_per_token(dense),
        output_operations=speed.operations_per_token(output),
    )
