"""A minimal Llama in PyTorch, for training and for comparing logits."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the network. Matrix sizes are multiples of 256, the size of the largest quantised blocks."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 4
    feed_forward: int = 512
    context: int = 1024
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square norm with a learned factor for each column."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, rows: Tensor) -> Tensor:
        """rows: any shape whose last dimension is the width."""
        return functional.rms_norm(rows, (rows.shape[-1],), self.weight, self.epsilon)


def rotations(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotation angles by position and pair of columns: (context, head width / 2) each."""
    size = shape.width // shape.heads
    speeds = shape.rope_base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * speeds
    return angles.cos().float(), angles.sin().float()


def turn(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate neighbouring columns (2i, 2i+1) of (batch, head, position, column), as GGUF's llama does."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1).flatten(-2)


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attn_norm = RMSNorm(width, shape.norm_epsilon)
        self.attn_q = nn.Linear(width, width, bias=False)
        self.attn_k = nn.Linear(width, width, bias=False)
        self.attn_v = nn.Linear(width, width, bias=False)
        self.attn_output = nn.Linear(width, width, bias=False)
        self.ffn_norm = RMSNorm(width, shape.norm_epsilon)
        self.ffn_gate = nn.Linear(width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, width, bias=False)

    def forward(self, rows: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """rows: (batch, position, width). Returns the same shape."""
        batch, length, width = rows.shape
        normed = self.attn_norm(rows)
        query, key, value = (
            project(normed).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        query, key = turn(query, cosines, sines), turn(key, cosines, sines)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        rows = rows + self.attn_output(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.ffn_norm(rows)
        return rows + self.ffn_down(functional.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class Network(nn.Module):
    """Maps token ids to logits of the next token; the output matrix is tied to the embedding.

    Parameters are named as GGUF names tensors.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.output_norm = RMSNorm(shape.width, shape.norm_epsilon)
        cosines, sines = rotations(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        nn.init.normal_(self.token_embd.weight, std=0.05)
        for name, parameter in self.blk.named_parameters():
            if parameter.dim() == 2:
                # Outputs added to the residual stream start smaller, so that it does not grow with depth.
                adds = name.endswith(("attn_output.weight", "ffn_down.weight"))
                size = parameter.shape[1] * (2 * shape.layers if adds else 1)
                nn.init.normal_(parameter, std=size**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (batch, position) of int64. Returns (batch, position, vocabulary)."""
        rows = self.token_embd(tokens)
        length = tokens.shape[1]
        for layer in self.blk:
            rows = layer(rows, self.cosines[:length], self.sines[:length])
        return functional.linear(self.output_norm(rows), self.token_embd.weight)
