"""Train a draft head for the built-in model, and write it as a GGUF file in llama.cpp's EAGLE-3 layout.

    python -m benchmarks.training.draft_head head.gguf --steps 600

Only the built-in model's file is needed. The head learns to predict the model's probabilities two tokens ahead from the
inputs of three of its layers. Training unrolls it as in drafting: each further place reads the head's own previous
state (EAGLE-3, Li et al., 2025). Prints how often its likeliest token is the model's, on held-out text. Uses one
process and one thread.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor, multiprocessing, nn
from torch.nn import functional

from benchmarks.training.export import add_shape, add_weights, finish
from benchmarks.training.network import Network, RMSNorm, Shape, turn
from benchmarks.training.tokens import stream
from benchmarks.training.train import ALLOCATION
from gguf_io import ModelFile, load_tokenizer, open_model
from models.builtin import path as built_in

READ_LAYERS = (1, 2, 3)  # layers whose inputs the head reads
VOCABULARY = 1024  # tokens that the head can draft: the most frequent half
ROWS, LENGTH = 4, 256  # of a training step
PLACES, LATER = 4, 0.8  # consecutive drafts that are trained, and the loss factor of each further one
RATE, WARM_UP = 2e-3, 20
_HELD_OUT_SEED = 987_654_321


class DraftHead(nn.Module):
    """One layer that reads an embedding and a state, concatenated; parameters are named as in the file."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape, width = shape, shape.width
        self.fc = nn.Linear(len(READ_LAYERS) * width, width, bias=False)
        self.output_norm = RMSNorm(width, shape.norm_epsilon)
        self.output = nn.Linear(width, vocabulary, bias=False)
        layer = nn.Module()
        for name in ("attn_norm", "attn_norm_2", "ffn_norm"):
            layer.add_module(name, RMSNorm(width, shape.norm_epsilon))
        for name in ("attn_q", "attn_k", "attn_v"):
            layer.add_module(name, nn.Linear(2 * width, width, bias=False))
        layer.add_module("attn_output", nn.Linear(width, width, bias=False))
        for name in ("ffn_gate", "ffn_up"):
            layer.add_module(name, nn.Linear(width, shape.feed_forward, bias=False))
        layer.add_module("ffn_down", nn.Linear(shape.feed_forward, width, bias=False))
        self.blk = nn.ModuleList([layer])

    def forward(self, embedded: Tensor, features: Tensor, cosines: Tensor, sines: Tensor) -> Iterator[Tensor]:
        """Yield the logits of PLACES consecutive drafts, each (batch, position, vocabulary).

        embedded: embedding of each next token. features: the layer inputs that the head reads, (batch, position,
        3 * width). The first k rows of place k are meaningless.
        """
        layer, heads = self.blk[0], self.shape.heads
        batch, length, width = embedded.shape
        tokens, state = layer.attn_norm(embedded), self.fc(features)
        causal = torch.ones(length, length, dtype=torch.bool)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for place in range(PLACES):
            if place:
                state = _later(state, 1, 1)
            joined = torch.cat((tokens, layer.attn_norm_2(state)), dim=-1)
            query, key, value = (
                project(joined).view(batch, length, heads, width // heads).transpose(1, 2)
                for project in (layer.attn_q, layer.attn_k, layer.attn_v)
            )
            query, key = turn(query, cosines, sines) * (width // heads) ** -0.5, turn(key, cosines, sines)
            keys.append(key)
            values.append(value)
            # Attend to the rows of the known text, and then to one row of each draft up to this one.
            scores = [(query @ keys[0].mT).masked_fill(~causal.tril(-place), -torch.inf)]
            own = range(1, place + 1)
            scores += [(query * _later(keys[at], place - at, 2)).sum(-1, keepdim=True) for at in own]
            weights = torch.cat(scores, dim=-1).softmax(dim=-1)
            mixed = weights[..., :length] @ values[0]
            for at in own:
                mixed = mixed + weights[..., length + at - 1, None] * _later(values[at], place - at, 2)
            state = state + layer.attn_output(mixed.transpose(1, 2).reshape(batch, length, width))
            normed = layer.ffn_norm(state)
            state = state + layer.ffn_down(functional.silu(layer.ffn_gate(normed)) * layer.ffn_up(normed))
            yield self.output(self.output_norm(state))


def begin_with(head: DraftHead, network: Network, kept: Tensor) -> None:
    """Initialise the head as the model's last layer, which reads its own input and ignores the next token."""
    layer, last, width = head.blk[0], network.blk[-1], network.shape.width
    head.fc.weight.data.zero_()[:, -width:].copy_(torch.eye(width))
    head.output_norm.load_state_dict(network.output_norm.state_dict())
    head.output.weight.data.copy_(network.token_embd.weight[kept])
    layer.attn_norm_2.load_state_dict(last.attn_norm.state_dict())
    for name in ("attn_q", "attn_k", "attn_v"):
        getattr(layer, name).weight.data[:, width:].copy_(getattr(last, name).weight)
    for name in ("attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"):
        getattr(layer, name).load_state_dict(getattr(last, name).state_dict())


def _later(rows: Tensor, by: int, dimension: int) -> Tensor:
    """Shift rows to later positions, filling with zeros."""
    if not by:
        return rows
    length = rows.shape[dimension]
    return torch.cat(
        (torch.zeros_like(rows.narrow(dimension, 0, by)), rows.narrow(dimension, 0, length - by)), dimension
    )


def load_network(file: ModelFile) -> Network:
    """Load a file's model, without gradients."""
    network = Network(Shape())
    network.load_state_dict({name: torch.from_numpy(file.dequantize(name).copy()) for name in file.tensors})
    return network.eval().requires_grad_(False)


@torch.no_grad()
def teach(network: Network, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs of READ_LAYERS, (batch, position, 3 * width), and the model's logits."""
    rows, inputs, length = network.token_embd(tokens), [], tokens.shape[1]
    for layer in network.blk:
        inputs.append(rows)
        rows = layer(rows, network.cosines[:length], network.sines[:length])
    logits = functional.linear(network.output_norm(rows), network.token_embd.weight)
    return torch.cat([inputs[layer] for layer in READ_LAYERS], dim=-1), logits


def pieces(file: ModelFile, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Concatenated texts in pieces of (ROWS, LENGTH) tokens, and each token's weight in the loss."""
    tokenizer = load_tokenizer(file)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, parse_special=True)

    for piece in stream(encode, seed, ROWS * LENGTH):
        tokens, weights = (torch.from_numpy(each).view(ROWS, LENGTH) for each in piece)
        yield tokens, weights


def guesses(head: DraftHead, network: Network, tokens: Tensor) -> tuple[Iterator[Tensor], Tensor]:
    """The head's logits of each place, and the model's logits as their target: (batch, position, vocabulary)."""
    features, logits = teach(network, tokens)
    length = tokens.shape[1] - 1
    embedded = network.token_embd(tokens[:, 1:])
    return head(embedded, features[:, :-1], network.cosines[:length], network.sines[:length]), logits[:, 1:]


def loss_of(head: DraftHead, network: Network, batch: tuple[Tensor, Tensor], kept: Tensor) -> Tensor:
    """Cross entropy between the model's and the head's probabilities, over the tokens that the head can draft."""
    tokens, weights = batch
    found, wanted = guesses(head, network, tokens)
    probabilities = wanted.softmax(dim=-1)[..., kept]
    counts = functional.pad(weights[:, 2:], (0, 1))
    total = torch.zeros(())
    for place, logits in enumerate(found):
        losses = -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1)[:, place:]
        total = total + LATER**place * (losses * counts[:, place:]).sum() / counts[:, place:].sum()
    return total


@torch.no_grad()
def agreement(head: DraftHead, network: Network, file: ModelFile, kept: Tensor, count: int) -> list[float]:
    """How often each place drafts the model's likeliest token if all earlier places did, on held-out answers."""
    right, asked = torch.zeros(PLACES), torch.zeros(PLACES)
    for tokens, weights in itertools.islice(pieces(file, _HELD_OUT_SEED), count):
        found, wanted = guesses(head, network, tokens)
        likeliest = wanted.argmax(dim=-1)
        counts = functional.pad(weights[:, 2:] == 1, (0, 1))
        before = counts.clone()
        for place, logits in enumerate(found):
            before = _later(before, 1, 1) & counts if place else before
            asked[place] += before.sum()
            before = before & (kept[logits.argmax(dim=-1)] == likeliest)
            right[place] += before.sum()
    return (right / asked).tolist()


def frequent(file: ModelFile, seed: int, count: int) -> Tensor:
    """The most frequent tokens of the training text, ascending."""
    seen = torch.cat([tokens.flatten() for tokens, _ in itertools.islice(pieces(file, seed), count)])
    counts = torch.bincount(seen, minlength=Shape().vocabulary)
    return counts.argsort(descending=True, stable=True)[:VOCABULARY].sort().values


def write_head(head: DraftHead, kept: Tensor, model: ModelFile, target: Path) -> None:
    """Write the head in Q8_0, norms in F32, with the model's vocabulary."""
    shape, unfinished = head.shape, target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "eagle3")
    writer.add_name("localllm demo draft head")
    writer.add_license("Apache-2.0")
    add_shape(writer, replace(shape, layers=1))
    writer.add_array("eagle3.target_layers", READ_LAYERS)
    writer.add_uint32("eagle3.target_hidden_size", shape.width)
    writer.add_bool("eagle3.norm_before_residual", False)
    metadata = model.metadata
    for key in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
        writer.add_string(key, metadata.get_str(key))
    writer.add_token_list(metadata.get_list("tokenizer.ggml.tokens", str))
    writer.add_token_types(metadata.get_list("tokenizer.ggml.token_type", int))
    writer.add_token_merges(metadata.get_list("tokenizer.ggml.merges", str))
    for key in ("bos", "eos"):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", metadata.get_int(f"tokenizer.ggml.{key}_token_id"))
    add_weights(writer, head.state_dict(), "Q8_0")
    writer.add_tensor("d2t", kept.numpy().astype(np.int64), raw_dtype=GGMLQuantizationType.I64)
    finish(writer, unfinished, target)


def work(_rank: int, target: Path, steps: int, seed: int) -> None:
    """Train, measure, write."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with open_model(built_in()) as file:
        network, kept = load_network(file), frequent(file, seed, 100)
        head = DraftHead(network.shape, VOCABULARY)
        begin_with(head, network, kept)
        optimiser = torch.optim.Adam(head.parameters(), lr=RATE, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min((step + 1) / WARM_UP, 1.0) * (0.02 + 0.98 * (1 - step / steps))
        )
        started, seen = time.monotonic(), 0.0
        for step, batch in enumerate(itertools.islice(pieces(file, seed), steps)):
            loss = loss_of(head, network, batch, kept)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            seen = 0.95 * seen + 0.05 * loss.item()
            if step % 20 == 19 or step == steps - 1:
                speed = (step + 1) * ROWS * LENGTH / (time.monotonic() - started)
                sys.stderr.write(f"step {step + 1}/{steps}  loss {seen / (1 - 0.95 ** (step + 1)):.4f}")
                sys.stderr.write(f"  {speed:.0f} tokens/s\n")
                sys.stderr.flush()
        agreed = agreement(head, network, file, kept, 20)
        write_head(head, kept, file, target)
    sys.stdout.write(f"the model's likeliest token, by place: {', '.join(f'{share:.3f}' for share in agreed)}\n")


def main() -> None:
    """Parse the arguments and train in a process with ALLOCATION set."""
    parser = argparse.ArgumentParser(description="Train a head that drafts for the built-in model.")
    parser.add_argument("target", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    os.environ.update(ALLOCATION)
    multiprocessing.spawn(work, (chosen.target.resolve(), chosen.steps, chosen.seed), nprocs=1)


if __name__ == "__main__":
    main()
