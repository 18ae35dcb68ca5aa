"""The optimiser: Muon for the matrices, Adam for the embedding and the norms.

Muon (Keller Jordan, 2024) replaces a matrix's momentum by the nearest orthogonal matrix, which a Newton-Schulz
iteration finds with matrix products only. Each process computes its share of the matrices.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.training.network import Network

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MATRIX_RATE, OTHER_RATE, MOMENTUM = 0.012, 3e-3, 0.95
# Noise in queries and keys multiplies: at the full rate attention becomes sharp before it has learned where to attend.
QUERY_KEY_FACTOR = 0.8


def orthogonal(matrix: Tensor, steps: int = 4) -> Tensor:
    """Approximately the nearest matrix whose singular values are all one, of the same shape."""
    first, second, third = _COEFFICIENTS
    rows = matrix / (matrix.norm() + 1e-7)
    tall = rows.shape[0] > rows.shape[1]
    rows = rows.T if tall else rows
    for _ in range(steps):
        square = rows @ rows.T
        rows = first * rows + (second * square + third * square @ square) @ rows
    return rows.T if tall else rows


class Optimiser:
    """Muon and Adam with their state. The gradients must be the same in all processes."""

    def __init__(self, network: Network, rank: int, processes: int) -> None:
        named = {name: p for name, p in network.named_parameters() if p.dim() == 2 and "blk" in name}
        self.matrices = list(named.values())
        self.rates = [MATRIX_RATE * (QUERY_KEY_FACTOR if "attn_q" in n or "attn_k" in n else 1.0) for n in named]
        others = [p for name, p in network.named_parameters() if name not in named]
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        self.adam = torch.optim.Adam(others, lr=OTHER_RATE, betas=(0.9, 0.97))
        self._rank, self._processes = rank, processes

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update all parameters. factor: scales the learning rates."""
        for group in self.adam.param_groups:
            group["lr"] = OTHER_RATE * factor
        self.adam.step()
        moves = torch.zeros(sum(matrix.numel() for matrix in self.matrices))
        start = 0
        for index, (matrix, momentum) in enumerate(zip(self.matrices, self.momenta, strict=True)):
            momentum.lerp_(matrix.grad, 1 - MOMENTUM)
            if index % self._processes == self._rank:
                move = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                moves[start : start + matrix.numel()] = move.flatten()
            start += matrix.numel()
        dist.all_reduce(moves)
        start = 0
        for matrix, rate in zip(self.matrices, self.rates, strict=True):
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.sub_(moves[start : start + matrix.numel()].view_as(matrix), alpha=rate * scale * factor)
            start += matrix.numel()

    def state(self) -> dict[str, Any]:
        """The optimiser's state for a checkpoint."""
        return {"momenta": self.momenta, "adam": self.adam.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        for momentum, kept in zip(self.momenta, state["momenta"], strict=True):
            momentum.copy_(kept)
        self.adam.load_state_dict(state["adam"])
