"""Embedding models: pooled rows compared with transformers' states, and their tokenizers."""

import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from gguf_io import load_tokenizer, open_model
from gguf_io.pooling import Pooling, pooling_of
from gguf_io.tokenizer.pairs import Pairs
from localllm.library.own_store import OwnStore
from localllm.wings.importing.convert import import_folder, imported_model
from localllm.wings.importing.errors import CheckpointError
from models.text_encoder import TextEncoder
from tests.gguf_io.test_tokenizer_unigram import fields
from tests.localllm.wings.importing.conftest import GOLDENS, assert_alike, byte_level, quiet
from tests.localllm.wings.importing.more_models import ENCODERS, RERANKED
from tests.localllm.wings.importing.remote_models import REMOTE_ENCODERS, weights_of
from tests.localllm.wings.importing.tiny_models import TOKENS, VOCABULARY, bfloat16, values_of, write_safetensors
from tests.oracle import llama_oracle

Folder = Callable[..., Path]
# GGUF has one GELU, the tanh approximation; BERT's is exact.
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


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ["roberta", "eurobert", "jina_embeddings_v3"])
def test_llama_cpp_computes_the_same_of_the_file(name: str, folder: Folder, tmp_path: Path) -> None:
    made = folder(name)
    pooled(made)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(llama_oracle.pooled(tmp_path / "made.gguf", TOKENS, 64), GOLDENS[name]["logits"], ROUNDED)


def written(folder: Folder, name: str, **changes: Any) -> Path:
    """A folder with the configuration and names of a repository with remote code."""
    remote = REMOTE_ENCODERS[name]
    made = folder(remote.equal, **{**remote.config, **changes})
    stored = remote.stored(weights_of(GOLDENS[remote.equal]["shapes"]))
    write_safetensors(made / "model.safetensors", {key: ("BF16", bfloat16(values)) for key, values in stored})
    pooled(made)
    return made


@pytest.mark.parametrize(("name", "said"), [("nomic-bert-moe", "expert biases"), ("jina-bert-v3", "task adapters")])
def test_pooled_rows_equal_the_states_of_the_equal_model(name: str, said: str, folder: Folder, tmp_path: Path) -> None:
    heard: list[str] = []
    import_folder(written(folder, name), tmp_path / "made.gguf", None, quiet, heard.append)
    with open_model(tmp_path / "made.gguf") as file, TextEncoder(file) as encoder:
        assert file.architecture == name
        found = encoder.pooled([list(TOKENS)])[0]
    assert_alike(found, GOLDENS[REMOTE_ENCODERS[name].equal]["logits"], ROUNDED)
    assert [said in line for line in heard] == [True]


JINA = {"model_type": "bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu", "emb_pooler": "mean"}


def jina_bert_v2(folder: Folder, code: bool, **changes: Any) -> Path:
    """A model whose tensors have the names of jina-embeddings-v2-base-en, or those of -base-code."""
    made = folder(
        "bert", **{**JINA, "num_attention_heads": 2, **changes}
    )  # heads as large as those of -base-code must be
    shapes = {name: tuple(shape) for name, shape in GOLDENS["bert"]["shapes"].items() if "position" not in name}
    gated, down = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
    for layer in range(2):
        prefix = f"encoder.layer.{layer}."
        for part in ("intermediate.dense", "output.dense", "output.LayerNorm"):
            for end in ("weight", "bias"):
                del shapes[f"{prefix}{part}.{end}"]
        shapes |= {f"{prefix}mlp.{gated}.weight": (192, 64), f"{prefix}mlp.{down}.weight": (64, 96)}
        shapes[f"{prefix}mlp.{down}.bias"] = (64,)
        norms = ["layer_norm_2", "layer_norm_1", "attention.self.layer_norm_q", "attention.self.layer_norm_k"]
        for norm in norms if code else ["mlp.layernorm"]:
            shapes |= {f"{prefix}{norm}.weight": (64,), f"{prefix}{norm}.bias": (64,)}
    stored = {name: ("BF16", bfloat16(values_of(name, shape))) for name, shape in shapes.items()}
    write_safetensors(made / "model.safetensors", stored)
    return made


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("code", [False, True])
def test_jina_bert_v2_beside_llama_cpp(code: bool, folder: Folder, tmp_path: Path) -> None:
    import_folder(jina_bert_v2(folder, code), tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file, TextEncoder(file) as encoder:
        assert (file.architecture, pooling_of(file)) == ("jina-bert-v2", Pooling.MEAN)
        found = encoder.pooled([list(TOKENS)])[0]
        name = f"encoder.layer.1.mlp.{'up_gated_layer' if code else 'gated_layers'}.weight"
        first, second = ("up", "gate") if code else ("gate", "up")
        halves = np.split(values_of(name, (192, 64)), 2)
        assert np.array_equal(file.dequantize(f"blk.1.ffn_{first}.weight"), halves[0])
        assert np.array_equal(file.dequantize(f"blk.1.ffn_{second}.weight"), halves[1])
    assert_alike(found, llama_oracle.pooled(tmp_path / "made.gguf", TOKENS, 64).tolist(), ROUNDED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_type": "original"}, "feed_forward_type is 'original'"),
        ({"architectures": ["JinaBertForSequenceClassification"]}, "Jina's rerankers cannot be imported"),
    ],
)
def test_other_jinas_are_refused(changes: dict[str, Any], message: str, folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_folder(jina_bert_v2(folder, False, **changes), tmp_path / "made.gguf", None, quiet, quiet)


def test_experts_of_another_number_are_refused(folder: Folder, tmp_path: Path) -> None:
    made = written(folder, "nomic-bert-moe", num_experts=5)
    with pytest.raises(CheckpointError, match=r"mlp.experts.mlp.w1 has the shape \[384, 64\]"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


@pytest.mark.parametrize("name", [*ENCODERS, "reranker", *REMOTE_ENCODERS, "base", "code"])
def test_the_store_takes_them_quantised(name: str, folder: Folder, tmp_path: Path) -> None:
    if name in ("base", "code"):
        made = jina_bert_v2(folder, name == "code")
    else:
        made = written(folder, name) if name in REMOTE_ENCODERS else folder(name)
    model = imported_model(OwnStore(tmp_path / "store"), made, "Q8_0", quiet, quiet)
    with open_model(model.path) as file:
        assert file.tensors["token_embd.weight"].type.name == "Q8_0"


def test_a_reranker_scores_as_transformers_does(folder: Folder, tmp_path: Path) -> None:
    import_folder(folder("reranker"), tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file, TextEncoder(file) as encoder:
        assert pooling_of(file) is Pooling.RANK
        found = encoder.pooled([list(text) for text in RERANKED])[:, 0]
    assert_alike(found, GOLDENS["reranker"]["logits"], ROUNDED)


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


@pytest.mark.parametrize(
    ("rules", "longest"),
    [({}, 100), ({"lowercase": False}, 100), ({"clean_text": False, "handle_chinese_chars": False}, 12)],
)
def test_word_pieces(rules: dict[str, bool], longest: int, folder: Folder, tmp_path: Path) -> None:
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
    pieces += ["\u1112", "##\u1161", "##\u11ab"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=longest))
    tokenizer.normalizer = normalizers.BertNormalizer(**rules)
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
    texts = ("The rain, the rains!", "café cafe CAFÉ", "日 unknown 漢 words", "a.b  c\n", "한 하", "a\0b", "日日")
    for text in (*texts, "a" * 12, "a" * 13, "a" * 100, "a" * 101):
        assert list(found.encode(text, add_special=True)) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize("step", [pre_tokenizers.Whitespace(), pre_tokenizers.WhitespaceSplit(), None])
def test_word_pieces_cut_by_other_rules(step: Any, folder: Folder, tmp_path: Path) -> None:
    made = folder("bert")
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    if step is not None:
        tokenizer.pre_tokenizer = step
    tokenizer.save(str(made / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="splits words by other rules than BERT"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


def test_robertas_byte_level_tokenizer(folder: Folder, tmp_path: Path) -> None:
    made, tokenizer = folder("roberta"), byte_level()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    tokenizer.save(str(made / "tokenizer.json"))
    roles = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "pad_token": "<pad>"}
    (made / "tokenizer_config.json").write_text(json.dumps(roles))
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        found = load_tokenizer(file)
        pairs = Pairs(file.metadata, found)
    for text in ("the rain in Spain", "  two  spaces\n", "café 日本", "It's 1,000", ""):
        assert list(found.encode(text, add_special=True)) == tokenizer.encode(text).ids, text
        assert pairs.encode(text, "plain") == tokenizer.encode(text, "plain").ids, text


@cache
def unigram() -> Tokenizer:
    """Pieces, and sentencepiece's character map for NFKC, as in XLM-RoBERTa's tokenizer.json."""
    written, chance = io.BytesIO(), random.Random(5)
    words = ("rain", "Spain", "plain", "one", "café", "naïve", "日本", "Żółć", "1,000", "don't", "(x)", "ﬁn")
    SentencePieceTrainer.Train(
        sentence_iterator=(" ".join(chance.choices(words, k=6)) for _ in range(500)),
        model_writer=written, vocab_size=120, model_type="unigram", normalization_rule_name="nmt_nfkc",
        hard_vocab_limit=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
    processor = SentencePieceProcessor(model_proto=written.getvalue())
    pieces = [(processor.IdToPiece(i), processor.GetScore(i)) for i in range(3, processor.GetPieceSize())]
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = Tokenizer(models.Unigram([*special, *pieces, ("<mask>", 0.0)], unk_id=3, byte_fallback=False))
    normalizer = next(content for number, content in fields(written.getvalue()) if number == 3)
    characters = next(content for number, content in fields(normalizer) if number == 2)
    tokenizer.normalizer = normalizers.Precompiled(characters)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


CUTTERS: dict[str, Any] = {
    "xlm-roberta": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    "bare": pre_tokenizers.Metaspace(prepend_scheme="never"),
}
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
TEXTS = (
    *("the rain in Spain", "one one", "  two  spaces ", "café ﬁn 日本 Żółć", "漢 unknown 漢字 (x)"),
    *("don't\n\tstop", "\uff11\uff10\uff10 \u2167 \u2460", ""),
)


def by_strips(tokenizer: Tokenizer) -> None:
    """As older converters wrote it."""
    strips = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, *strips])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()


@pytest.mark.parametrize("cutter", [*CUTTERS, "strips"])
def test_unigram(cutter: str, folder: Folder, tmp_path: Path) -> None:
    made, tokenizer = folder("xlm-roberta"), Tokenizer.from_str(unigram().to_str())
    if cutter == "strips":
        by_strips(tokenizer)
    else:
        tokenizer.pre_tokenizer = CUTTERS[cutter]
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps(ROLES))
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        found = load_tokenizer(file)
        assert file.metadata.get_int("tokenizer.ggml.token_type_count") == 1
        assert (found.bos_id, found.eos_id, found.vocabulary.need_unk_id()) == (0, 2, 3)
    for text in TEXTS:
        assert list(found.encode(text, add_special=True)) == tokenizer.encode(text).ids, text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["model"].update(byte_fallback=True), "byte fallback"),
        (lambda content: content.update(normalizer={"type": "Lowercase"}), "normalises or cuts by Lowercase"),
        (lambda content: content.update(pre_tokenizer={"type": "Digits"}), "normalises or cuts by Digits"),
        (lambda content: content.update(pre_tokenizer={"type": "Metaspace"}), "keeps runs of spaces"),
        (lambda content: content["normalizer"].update(precompiled_charsmap="?"), "is not base64"),
        (lambda content: content["model"].update(unk_id=5000), "is damaged"),
    ],
)
def test_other_unigrams_are_refused(
    change: Callable[[dict[str, Any]], object], message: str, folder: Folder, tmp_path: Path
) -> None:
    made, content = folder("xlm-roberta"), json.loads(unigram().to_str())
    change(content)
    (made / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
