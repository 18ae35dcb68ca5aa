"""What a child process does to try a build of llama.cpp: the built-in model on its devices, and on the CPU engine."""

import json
import sys

import numpy as np
from numpy.typing import NDArray

from gguf_io import load_tokenizer, open_model
from gpu_offload import library
from gpu_offload.devices import gpus
from gpu_offload.errors import LlamaCppMissingError
from gpu_offload.options import LlamaOptions
from gpu_offload.runner import LlamaCppRunner
from localllm.engine.runner import Runner
from localllm.errors import LocalLLMError
from models import builtin
from models.native_runner import NativeRunner

TEXT = "Once upon a time there was a little fox who lived near the river with his mother and two sisters."
# Both engines round activations and weights in their own ways. A token counts as another one only if the CPU engine's
# logits of the two differ by more than this part of all logits' spread.
TOLERANCE = 0.15


def main() -> None:
    """Compare, and print the result as JSON: devices (name, kind), rows, wrong; or error."""
    library.try_library = lambda: None  # this process is the one that may crash
    try:
        sys.stdout.write(json.dumps(compared()))
    except LlamaCppMissingError as error:
        sys.stdout.write(json.dumps({"error": error.reason.rstrip(".")}))
    except LocalLLMError as error:
        sys.stdout.write(json.dumps({"error": str(error).rstrip(".")}))


def compared() -> dict[str, object]:
    """The devices, how many rows were computed, and for how many of them the next token is another one."""
    library.llama()  # the package itself; the devices need its libraries only
    devices = [(gpu.label, gpu.backend) for gpu in gpus()]
    with open_model(builtin.path()) as file:
        tokens = load_tokenizer(file).encode(TEXT)
        theirs = LlamaCppRunner(file, LlamaOptions(context_tokens=512, max_sequences=1))
        got = logits(theirs, tokens)
        theirs.close()
        ours = NativeRunner(file, kv_bytes=16 << 20)
        expected = logits(ours, tokens)
        ours.close()
    return {"devices": devices, "rows": len(tokens), "wrong": wrong_rows(got, expected)}


def logits(runner: Runner, tokens: list[int]) -> NDArray[np.float32]:
    """The logits of each token's row, half of them computed as a prompt and half as decoding."""
    sequence, half = runner.create_sequence(), len(tokens) // 2
    rows = [runner.run(tokens[:half], range(half), [sequence] * half, range(half)).copy()]
    for position in range(half, len(tokens)):
        rows.append(runner.run([tokens[position]], [position], [sequence], [0]).copy())
    return np.concatenate(rows)


def wrong_rows(got: NDArray[np.float32], expected: NDArray[np.float32]) -> int:
    """In how many rows the likeliest token is another one without a near tie, or a number is not finite."""
    rows = np.arange(len(expected))
    behind = expected.max(axis=1) - expected[rows, got.argmax(axis=1)]
    allowed = TOLERANCE * expected.std(axis=1)
    return int(np.sum((behind > allowed) | ~np.isfinite(got).all(axis=1)))
