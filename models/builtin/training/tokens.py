"""Text to tokens: the byte-pair tokenizer, and the stream of tokens that the network is trained on."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.builtin.training.corpus import texts

BEGIN, TURN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (BEGIN, TURN, END)
VOCABULARY = 2048
# Of what users say only a little is learned: the model is to answer, not to ask.
QUESTION_WEIGHT = 0.1


def train_tokenizer(seed: int, count: int = 8000) -> Tokenizer:
    """Byte pairs of GPT-2's alphabet, learned from that many texts; the control tokens come first."""
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
    """The tokenizer that training has written."""
    return Tokenizer.from_file(str(path))


def weights_of(tokens: list[int], control: tuple[int, ...], assistant: int) -> list[float]:
    """How much each token counts in the loss: answers and bare stories in full, the rest by QUESTION_WEIGHT."""
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
    tokenizer: Tokenizer, seed: int, size: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    """Texts one after the other, cut into pieces of size tokens, each with the tokens' weights; both (size,)."""
    control = tuple(tokenizer.encode(name).ids[0] for name in CONTROL)
    (assistant,) = tokenizer.encode("assistant").ids
    tokens: list[int] = []
    weights: list[float] = []
    for text in texts(seed):
        ids = [control[0], *tokenizer.encode(text).ids]
        tokens += ids
        weights += weights_of(ids, control, assistant)
        while len(tokens) >= size:
            yield np.array(tokens[:size], dtype=np.int64), np.array(weights[:size], dtype=np.float32)
            tokens, weights = tokens[size:], weights[size:]
