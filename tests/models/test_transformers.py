"""Models compared with transformers: the logits of the last token, pooled states, and a reranker's scores."""

import json
from pathlib import Path

import numpy as np
import pytest

from gguf_io import open_model
from models.native_runner import NativeRunner
from models.text_encoder import TextEncoder
from tests.localllm.wings.importing.tiny_models import TOKENS
from tests.models.transformers_models import TWINS, write_twin

GOLDENS = json.loads((Path(__file__).parent / "transformers_goldens.json").read_text())
# For KV in f16 and another order of products; a misplaced tensor is off by the whole range.
TOLERANCE = 0.005
# GGUF has one GELU, the tanh approximation, where these have an exact one.
ROUNDED = {"jina-bert-v3": 0.02, "modern-bert": 0.02}


@pytest.mark.parametrize("name", TWINS)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    twin, golden = TWINS[name], GOLDENS[name]
    path = write_twin(twin, golden["shapes"], tmp_path / "model.gguf")
    found, expected = _row(path, twin.kind), np.array(golden["row"])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < ROUNDED.get(name, TOLERANCE) * expected.std()


def _row(path: Path, kind: str) -> np.ndarray:
    tokens = list(TOKENS)
    with open_model(path) as file:
        if kind != "CausalLM":
            with TextEncoder(file) as encoder:
                scored = [tokens[:end] for end in range(1, len(tokens) + 1)]
                return encoder.pooled(scored if kind else [tokens]).ravel()
        runner = NativeRunner(file, kv_bytes=16 << 20)
    sequence = runner.create_sequence()
    row = runner.run(tokens, list(range(len(tokens))), [sequence] * len(tokens), [len(tokens) - 1])[0].copy()
    runner.close()
    return row
