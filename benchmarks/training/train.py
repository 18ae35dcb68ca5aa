"""Train the built-in model on the CPU: several processes with one thread each, which average their gradients.

    python -m benchmarks.training.train FOLDER --steps 1400

The learning rate rises for a few steps, stays constant, and decays to zero over the last part of the steps, while the
pieces of text get longer. An interrupted run continues from FOLDER/checkpoint.pt; --steps may be changed then, as long
as the decay has not started.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.nn import functional

from benchmarks.training.muon import Optimiser
from benchmarks.training.network import Network, Shape
from benchmarks.training.tokens import load_encoder, stream, train_tokenizer

TOKENS = 1024  # per step and process
# Pieces are short at first, since attention learns faster on them, and as long as the context in the end.
SHORT, MIDDLE, LONG = 256, 512, 1024
MIDDLE_FROM, LONG_FROM = 0.7, 0.87
WARM_UP, FALLING = 30, 0.45
# Otherwise glibc returns each operation's large buffers to the system and faults them in again: three times slower.
ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def factor_at(step: int, steps: int) -> float:
    """The learning rate's factor."""
    return min((step + 1) / WARM_UP, 1.0, (steps - step) / (FALLING * steps))


def length_at(step: int, steps: int) -> int:
    """The length of a step's pieces in tokens."""
    if step < MIDDLE_FROM * steps:
        return SHORT
    return MIDDLE if step < LONG_FROM * steps else LONG


def weighted_loss(network: Network, tokens: np.ndarray, weights: np.ndarray, length: int) -> torch.Tensor:
    """Weighted mean negative log-likelihood of all tokens but the first of each row of `length` tokens."""
    rows = torch.from_numpy(tokens).view(-1, length)
    counts = torch.from_numpy(weights).view(-1, length)[:, 1:].flatten()
    logits = network(rows[:, :-1])
    losses = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return (losses * counts).sum() / counts.sum()


def average_gradients(network: Network, processes: int) -> None:
    """Replace every process's gradients by their mean over all processes, clipped to norm 1."""
    gradients = [parameter.grad for parameter in network.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= processes
    flat *= min(1.0, 1.0 / (float(flat.norm()) + 1e-6))
    start = 0
    for gradient in gradients:
        gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
        start += gradient.numel()


def work(rank: int, folder: Path, steps: int, processes: int, seed: int) -> None:
    """Run one process of the training."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes, timeout=timedelta(hours=1)
    )
    network = Network(Shape())
    optimiser = Optimiser(network, rank, processes)
    done = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        kept = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(kept["network"])
        optimiser.restore(kept["optimiser"])
        done = kept["steps"]
    pieces = stream(load_encoder(folder / "tokenizer.json"), seed * 1000 + rank, TOKENS)
    for _ in range(done):
        next(pieces)
    started, seen = time.monotonic(), 0.0
    for step in range(done, steps):
        loss = weighted_loss(network, *next(pieces), length_at(step, steps))
        loss.backward()
        average_gradients(network, processes)
        optimiser.step(factor_at(step, steps))
        network.zero_grad()
        seen = 0.95 * seen + 0.05 * loss.item()
        if rank == 0 and (step % 20 == 19 or step == steps - 1):
            speed = (step + 1 - done) * TOKENS * processes / (time.monotonic() - started)
            mean = seen / (1 - 0.95 ** (step + 1 - done))
            sys.stderr.write(f"step {step + 1}/{steps}  loss {mean:.4f}  {speed:.0f} tokens/s\n")
            sys.stderr.flush()
        if rank == 0 and (step % 50 == 49 or step == steps - 1):
            torch.save(
                {"network": network.state_dict(), "optimiser": optimiser.state(), "steps": step + 1},
                f"{checkpoint}.new",
            )
            Path(f"{checkpoint}.new").replace(checkpoint)
    dist.destroy_process_group()


def main() -> None:
    """Train the tokenizer if it does not exist, then the network."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    if not (folder / "tokenizer.json").exists():
        train_tokenizer(chosen.seed).save(str(folder / "tokenizer.json"))
    os.environ.update(ALLOCATION)
    multiprocessing.spawn(work, (folder, chosen.steps, chosen.processes, chosen.seed), nprocs=chosen.processes)


if __name__ == "__main__":
    main()
