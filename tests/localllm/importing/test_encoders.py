"""Models of embeddings: pooled rows beside the states that transformers computes, and their tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from gguf_io import load_tokenizer, open_model
from gguf_io.pooling import Pooling, pooling_of
from localllm.importing.convert import import_folder
from localllm.importing.errors import CheckpointError
from models.text_encoder import TextEncoder
from tests.localllm.importing.conftest import GOLDENS, assert_alike, quiet
from tests.localllm.importing.more_models import ENCODERS
from tests.localllm.importing.tiny_models import TOKENS, VOCABULARY, bfloat16, values_of, write_safetensors

Folder = Callable[..., Path]
# GGUF has one GELU, by a tanh, where BERT's is exact.
ROUNDED = 0.02


def pooled(made: Path, way: str = "mean_tokens") -> None:
    (made / "1_Pooling").mkdir()
    (made / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{way}": True, "word_embedding_dimension": 64})
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_pooled_rows_equal_the_states_of_transformers(name: str, folder: Folder, tmp_path: Path) -> None:
    made = folder(name)
    pooled(made)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file, TextEncoder(file) as encoder:
        assert pooling_of(file) is Pooling.MEAN
        found = encoder.pooled([list(TOKENS)])[0]
    assert_alike(found, GOLDENS[name]["logits"], ROUNDED)


def test_dense_layers_behind_the_pooling(folder: Folder, tmp_path: Path) -> None:
    made = folder("embedding_gemma")
    pooled(made)
    shapes = {2: (96, 64), 3: (64, 96)}
    for number, shape in shapes.items():
        place = made / f"{number}_Dense"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({"activation_function": "torch.nn.modules.linear.Identity"}))
        stored = {"linear.weight": ("BF16", bfloat16(values_of(f"dense {number}", shape)))}
        write_safetensors(place / "model.safetensors", stored)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file, TextEncoder(file) as encoder:
        found = encoder.pooled([list(TOKENS)])[0]
    row = np.array(GOLDENS["embedding_gemma"]["logits"])
    for number, shape in shapes.items():
        row = values_of(f"dense {number}", shape) @ row
    assert_alike(found, row.tolist(), ROUNDED)


def test_another_pooling_is_refused(folder: Folder, tmp_path: Path) -> None:
    made = folder("bert")
    pooled(made, "max_tokens")
    with pytest.raises(CheckpointError, match="pools by max; one of mean, cls, lasttoken"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces(lowercase: bool, folder: Folder, tmp_path: Path) -> None:
    made = folder("bert")
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz.,!",
        "The",
        "the",
        "rain",
        "##s",
    ]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz"] + ["cafe", "café", "日"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(made / "tokenizer.json"))
    roles = {
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(roles))
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        found = load_tokenizer(file)
    assert len(pieces) < VOCABULARY
    for text in ("The rain, the rains!", "café cafe CAFÉ", "日 unknown 漢 words", "a.b  c\n"):
        assert list(found.encode(text, add_special=True)) == tokenizer.encode(text).ids, text
