"""Folders of tiny models, the results of transformers for them, and those of the engine."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gguf_io import open_model
from models.native_runner import NativeRunner
from models.needs import native_needs
from tests.gguf_io.tokenizer_files import sample_texts
from tests.localllm.wings.importing.hybrid_models import SMALLER
from tests.localllm.wings.importing.tiny_models import TOKENS, VOCABULARY, write_weights

GOLDENS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "goldens.json").read_text())
# For KV in f16 and another order of products; a misplaced tensor is off by the logits' whole range.
TOLERANCE = 0.005


def quiet(*_: object) -> None:
    pass


def byte_level(pattern: pre_tokenizers.PreTokenizer | None = None) -> Tokenizer:
    """A byte-level tokenizer of at most VOCABULARY tokens, the first three special."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pattern] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 5,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(1, 200), trainer)
    return tokenizer


@pytest.fixture(scope="module")
def usual_tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture
def folder(tmp_path: Path, usual_tokenizer: Tokenizer) -> Callable[..., Path]:
    """A function that writes a family's tiny model and returns its folder."""

    def write(name: str = "qwen3", **changes: Any) -> Path:
        made = tmp_path / name
        made.mkdir()
        config = {**GOLDENS[name]["config"], **changes}
        (made / "config.json").write_text(json.dumps(config))
        usual_tokenizer.save(str(made / "tokenizer.json"))
        (made / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"})
        )
        write_weights(made, GOLDENS[name]["shapes"], SMALLER.get(name, ("nothing", 1.0)))
        return made

    return write


def computed_logits(path: Path) -> np.ndarray:
    """Logits of the last of TOKENS. The loaded weights take what the header's plan says."""
    with open_model(path) as file:
        runner = NativeRunner(file, kv_bytes=8 << 20, threads=1)
        planned = native_needs(file, threads=1).weights
    try:
        assert sum(packed.nbytes for packed in runner.packed.values()) == planned
        sequence = runner.create_sequence()
        last = len(TOKENS) - 1
        return runner.run(TOKENS, range(len(TOKENS)), [sequence] * len(TOKENS), [last])[0]
    finally:
        runner.close()


def assert_alike(found: np.ndarray, expected: list[float], tolerance: float = TOLERANCE) -> None:
    values = np.array(expected)
    assert np.sqrt(((found - values) ** 2).mean()) < tolerance * values.std()
