"""The byte-pair tokenizer, and the stream of tokens that the network is trained on."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.training.corpus import texts

BEGIN, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (BEGIN, TURN, END)
VOCABULARY = 2048
# User turns have a low weight in the loss: the model should learn to answer, not to ask.
QUESTION_WEIGHT = 0.1


def train_tokenizer(seed: int, count: int = 8000) -> Tokenizer:
    """Train a byte-pair tokenizer with GPT-2's alphabet on `count` texts; control tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(texts(seed), count), trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer that training wrote."""
    return Tokenizer.from_file(str(path))


def load_encoder(path: Path) -> Callable[[str], list[int]]:
    """A function that encodes text with the tokenizer that training wrote."""
    tokenizer = load_tokenizer(path)
    return lambda text: list(tokenizer.encode(text).ids)


def weights_of(tokens: list[int], control: tuple[int, ...], assistant: int) -> list[float]:
    """Each token's weight in the loss: 1 for answers and bare stories, QUESTION_WEIGHT for the rest."""
    begin, turn, end = control
    weights = []
    weight = 1.0
    for place, token in enumerate(tokens):
        if token == turn:
            weight = QUESTION_WEIGHT
        weights.append(QUESTION_WEIGHT if token == begin else weight)
        if token == end:
            weight = QUESTION_WEIGHT
        if place >= 2 and tokens[place - 2] == turn and tokens[place - 1] == assistant:
            weight = 1.0
    return weights


def stream(
    encode: Callable[[str], list[int]], seed: int, size: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Concatenated texts cut into pieces of `size` tokens, each with the tokens' weights; both (size,)."""
    control = tuple(encode(name)[0] for name in CONTROL)
    (assistant,) = encode("assistant")
    tokens: list[int] = []
    weights: list[float] = []
    for text in texts(seed):
        ids = [control[0], *encode(text)]
        tokens += ids
        weights += weights_of(ids, control, assistant)
        while len(tokens) >= size:
            yield np.array(tokens[:size], dtype=np.int64), np.array(weights[:size], dtype=np.float32)
            tokens, weights = tokens[size:], weights[size:]
