"""Folders of safetensors as GGUF: logits compared with transformers', values, tokenizers, memory, and the command."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from gguf_io import load_tokenizer, open_model
from localllm.cli.main import main
from localllm.library.lookup import find
from localllm.settings import load_settings
from localllm.wings.importing import tensors
from localllm.wings.importing.convert import import_folder
from localllm.wings.importing.errors import CheckpointError
from localllm.wings.importing.families import FAMILIES
from models.registry import ARCHITECTURES, TEXT_ENCODERS
from tests.gguf_io.tokenizer_files import sample_texts
from tests.localllm.wings.importing.conftest import GOLDENS, assert_alike, byte_level, computed_logits, quiet
from tests.localllm.wings.importing.hybrid_models import HYBRIDS
from tests.localllm.wings.importing.more_models import MORE
from tests.localllm.wings.importing.tiny_models import (
    CONFIGS,
    TOKENS,
    VOCABULARY,
    bfloat16,
    values_of,
    write_safetensors,
    write_weights,
)
from tests.oracle import llama_oracle
from tests.systems import use_own_places


@pytest.mark.parametrize("name", sorted({**CONFIGS, **MORE, **HYBRIDS}))
def test_logits_equal_those_of_transformers(name: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    import_folder(folder(name), tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS[name]["logits"])


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ["apertus", "laguna", "nemotron_h-latents"])
def test_llama_cpp_computes_the_same_of_the_file(name: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    import_folder(folder(name), tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(llama_oracle.prefill_logits(tmp_path / "made.gguf", TOKENS)[-1], GOLDENS[name]["logits"], 0.02)


def test_every_architecture_of_the_engine_can_be_imported() -> None:
    imported = {family.architecture for family in FAMILIES.values()}
    assert (ARCHITECTURES.keys() | TEXT_ENCODERS.keys()) - imported == set()


def test_qwen2_vl_is_qwen2_for_text(folder: Callable[..., Path], tmp_path: Path) -> None:
    made = folder("qwen2", model_type="qwen2_5_vl", rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]})
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert file.architecture == "qwen2vl"
        assert file.metadata.get_list("qwen2vl.rope.dimension_sections", int) == [8, 12, 12, 0]
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["qwen2"]["logits"])


def test_experts_that_are_stored_transposed(folder: Callable[..., Path], tmp_path: Path) -> None:
    """As in Qwen 3 VL's repositories; transformers saves them untransposed."""
    made = folder("qwen3_vl_moe")
    stored = {}
    for name, shape in GOLDENS["qwen3_vl_moe"]["shapes"].items():
        values = values_of(name, tuple(shape))
        stored[name] = "BF16", bfloat16(np.swapaxes(values, 1, 2) if ".experts." in name else values)
    write_safetensors(made / "model.safetensors", stored)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["qwen3_vl_moe"]["logits"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mamba2", {"time_step_limit": [0.0, 0.5]}, "time_step_limit"),
        ("falcon_h1-norm", {"mamba_norm_before_gate": True}, "mamba_norm_before_gate is True"),
        ("nemotron_h", {"layers_block_type": ["moe", "mlp", "full_attention", "linear_attention"]}, "with experts and"),
        ("nemotron_h", {"layers_block_type": ["other"]}, "layers are .'other'."),
        ("llama4_text", {"no_rope_layers": [1, 1, 1, 1]}, "no_rope_layers"),
        ("llama4_text", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("laguna", {"gating": "other"}, "gating is 'other'"),
        ("laguna", {"moe_router_logit_softcapping": 5.0}, "moe_router_logit_softcapping is 5.0"),
        ("apertus", {"post_norm": True}, "post_norm is True"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 15}, "shares from 0 to 1"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 64}, "5": {"head_dim": 32}}}, "layers differ in head_dim"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": 3}}, "deepstack_visual_indexes must be a list"),
        (
            "phi3-longrope",
            {
                "original_max_position_embeddings": 0,
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 0},
            },
            "do not fit together",
        ),
        ("hunyuan_v1_dense-rope", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}}, "do not fit together"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused(
    name: str, changes: dict[str, Any], message: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_folder(folder(name, **changes), tmp_path / "made.gguf", None, quiet, quiet)
    assert not (tmp_path / "made.gguf").exists()


def test_nemotrons_older_names(folder: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"layers_block_type": None, "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4,
               "head_dim": None, "attention_head_dim": 32}  # fmt: skip
    import_folder(folder("nemotron_h", **changes), tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["nemotron_h"]["logits"])


def test_laguna_without_windows(folder: Callable[..., Path], tmp_path: Path) -> None:
    """Like M.1, whose configuration states no kinds of layers. XS ends answers with a second token."""
    changes = {"layer_types": None, "sliding_window": None, "num_attention_heads_per_layer": None,
               "eos_token_id": [2, 24]}  # fmt: skip
    import_folder(folder("laguna-full", **changes), tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["laguna-full"]["logits"])
    with open_model(tmp_path / "made.gguf") as file:
        assert load_tokenizer(file).eog_ids >= {2, 24}


def test_a_factor_of_xielu_that_is_missing(folder: Callable[..., Path], tmp_path: Path) -> None:
    made = folder("apertus")
    shapes = {name: shape for name, shape in GOLDENS["apertus"]["shapes"].items() if "1.mlp.act_fn.alpha_p" not in name}
    write_weights(made, shapes)
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.act_fn.alpha_p is missing"):
        import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)


def test_gemma4s_larger_heads_by_their_older_names(folder: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"per_layer_config": None, "global_head_dim": 64, "num_global_key_value_heads": 1}
    import_folder(folder("gemma4-experts", **changes), tmp_path / "made.gguf", None, quiet, quiet)
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS["gemma4-experts"]["logits"])


def test_matrices_are_quantised_on_the_way(folder: Callable[..., Path], tmp_path: Path) -> None:
    import_folder(folder("qwen3_moe"), tmp_path / "made.gguf", "q8_0", quiet, quiet)
    shapes = GOLDENS["qwen3_moe"]["shapes"]
    name = "model.layers.1.mlp.experts.{}.down_proj.weight"
    values = np.stack([values_of(name.format(i), tuple(shapes[name.format(i)])) for i in range(4)])
    with open_model(tmp_path / "made.gguf") as file:
        expected = quants.quantize(values, GGMLQuantizationType.Q8_0)
        assert bytes(file.data("blk.1.ffn_down_exps.weight")) == expected.tobytes()
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert {kinds[name] for name in kinds if name.endswith("_norm.weight")} == {"F32"}
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"


@pytest.mark.parametrize("name", ["gemma3n", "gemma4-experts", "falcon_h1", "nemotron_h-latents", "mamba2", "laguna"])
def test_models_of_several_parts_are_quantised_too(name: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    """Small tensors and those that are not matrices stay floats. Eight bits cost Gemma 3n's few gates most, a sixth of
    the range.
    """
    import_folder(folder(name), tmp_path / "made.gguf", "Q8_0", quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert "Q8_0" in {tensor.type.name for tensor in file.tensors.values()}
    assert_alike(computed_logits(tmp_path / "made.gguf"), GOLDENS[name]["logits"], 0.25)


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_formats_that_llama_cpp_makes(folder: Callable[..., Path], tmp_path: Path) -> None:
    import_folder(folder(), tmp_path / "made.gguf", "Q4_0", quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].type.name == "Q4_0"
    assert sorted(path.name for path in tmp_path.glob("*.gguf")) == ["made.gguf"]


@pytest.mark.parametrize(("dtype", "codes", "values"), [
    ("F8_E4M3", [0x38, 0x7E, 0x01, 0xB8, 0x00, 0x41], [1.0, 448.0, 2.0**-9, -1.0, 0.0, 2.25]),
    ("F8_E5M2", [0x3C, 0x5B, 0x01, 0xBC, 0x00, 0x41], [1.0, 224.0, 2.0**-16, -1.0, 0.0, 2.5]),
])  # fmt: skip
@pytest.mark.parametrize("scales", ["one", "row", "block"])
def test_fp8_is_multiplied_by_its_scales(
    dtype: str, codes: list[int], values: list[float], scales: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The codes follow the formats' definition (Micikevicius et al., 2022)."""
    made = folder(quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    name = "model.layers.0.mlp.up_proj.weight"
    stored = {
        key: ("BF16", bfloat16(values_of(key, tuple(shape)))) for key, shape in GOLDENS["qwen3"]["shapes"].items()
    }
    rows, k = GOLDENS["qwen3"]["shapes"][name]
    stored[name] = dtype, np.resize(np.array(codes, np.uint8), (rows, k))
    random = np.random.default_rng(1)
    grid = {"one": (1,), "row": (rows, 1), "block": (rows // 16, k // 16)}[scales]
    factors = random.uniform(0.5, 2.0, grid).astype(np.float32)
    stored[name + ("_scale_inv" if scales == "block" else "_scale")] = "F32", factors
    write_safetensors(made / "model.safetensors", stored)
    import_folder(made, tmp_path / "made.gguf", "F16", quiet, quiet)
    whole = np.resize(np.array(values, np.float32), (rows, k))
    wide = np.kron(factors, np.ones((16, 16))) if scales == "block" else np.broadcast_to(factors, (rows, k))
    with open_model(tmp_path / "made.gguf") as file:
        found = file.dequantize("blk.0.ffn_up.weight")
    assert found == pytest.approx(whole * wide, rel=1e-3, abs=1e-7)


def test_several_files_and_parts_that_are_not_used(folder: Callable[..., Path], tmp_path: Path) -> None:
    made, said = folder(), []
    shapes = GOLDENS["qwen3"]["shapes"]
    stored = {key: ("BF16", bfloat16(values_of(key, tuple(shape)))) for key, shape in shapes.items()}
    (made / "model.safetensors").unlink()
    halves = dict(list(stored.items())[:9]), dict(list(stored.items())[9:])
    halves[1]["visual.patch_embed.weight"] = "BF16", np.zeros((4, 4), np.uint16)
    weights = {}
    for number, half in enumerate(halves):
        write_safetensors(made / f"part-{number}.safetensors", half)
        weights |= dict.fromkeys(half, f"part-{number}.safetensors")
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    import_folder(made, tmp_path / "made.gguf", None, quiet, said.append)
    assert said == ["1 tensors of other parts (images, sound, drafts) are left out"]
    with open_model(tmp_path / "made.gguf") as file:
        assert np.array_equal(file.dequantize("output.weight"), values_of("lm_head.weight", (VOCABULARY, 64)))


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


@pytest.mark.parametrize(("pattern", "pre"), [(LLAMA3, "dbrx"), (QWEN2, "qwen2"), (None, "gpt-2")])
def test_byte_level_tokenizers(pattern: str | None, pre: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    from tokenizers import Regex

    made = folder()
    tokenizer = byte_level(pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(made / "tokenizer.json"))
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        found = load_tokenizer(file)
        assert file.metadata.get_str("tokenizer.ggml.pre") == pre
        assert file.metadata.get_str("tokenizer.chat_template") == "{{ messages }}"
        assert file.metadata.get_int("tokenizer.ggml.eos_token_id") == 2
    for text in sample_texts(2, 100):
        if any(special in text for special in ("<s>", "</s>", "<pad>")):
            continue  # which is text to us unless the file says otherwise
        assert list(found.encode(text)) == tokenizer.encode(text).ids


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_sentence_pieces(name: str, folder: Callable[..., Path], tmp_path: Path) -> None:
    made = folder(name)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps[1:] if name == "gemma4" else steps)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False,
        initial_alphabet=["\u2581", *"etaoinshrdl"], limit_alphabet=16,
    )  # fmt: skip
    tokenizer.train_from_iterator(["the rain in spain stays mainly on the plain", "no one told the other"], trainer)
    content = json.loads(tokenizer.to_str())
    for byte in bytes_:
        content["model"]["vocab"][byte] = len(content["model"]["vocab"])
    (made / "tokenizer.json").write_text(json.dumps(content))
    config = json.loads((made / "config.json").read_text())
    config["vocab_size"] = size = len(content["model"]["vocab"]) + 7
    (made / "config.json").write_text(json.dumps(config))
    shapes = {
        key: [size, *shape[1:]] if shape[0] == VOCABULARY else shape for key, shape in GOLDENS[name]["shapes"].items()
    }
    write_weights(made, shapes)
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    expected = Tokenizer.from_str(json.dumps(content))
    with open_model(tmp_path / "made.gguf") as file:
        found = load_tokenizer(file)
        assert file.metadata.get_str("tokenizer.ggml.model") == ("gemma4" if name == "gemma4" else "llama")
    for text in ("the rain on the plain", "Zażółć the 日本 plain", "  two  spaces", "no one told"):
        assert list(found.encode(text, add_special=False)) == expected.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("inside", [False, True])
def test_older_pieces_without_a_space_before_a_text(inside: bool, folder: Callable[..., Path], tmp_path: Path) -> None:
    made = folder()
    step = {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": inside}
    model = {"type": "BPE", "byte_fallback": True, "vocab": {"<unk>": 0, "a": 1, "\u2581": 2}, "merges": []}
    cutter = {"type": "Sequence", "pretokenizers": [step]} if inside else step
    (made / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": cutter}))
    import_folder(made, tmp_path / "made.gguf", None, quiet, quiet)
    with open_model(tmp_path / "made.gguf") as file:
        assert file.metadata.get_bool("tokenizer.ggml.add_space_prefix") == inside


def test_memory_stays_below_the_largest_tensor_and_a_bound(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, width = 12, 512
    made = folder(num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width)
    plain = GOLDENS["qwen3"]["shapes"]
    sizes = {64: width, 96: 4 * width}
    shapes = {
        name.replace("layers.0", f"layers.{layer}"): [sizes.get(size, size) for size in shape]
        if "_norm" not in name or len(shape) > 1 else [sizes.get(shape[0], shape[0])]
        for layer in range(layers)
        for name, shape in plain.items()
        if "layers.1" not in name
    }  # fmt: skip
    for name in shapes:
        if "q_norm" in name or "k_norm" in name:
            shapes[name] = [32]
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            shapes[name] = [64, width]
    write_weights(made, shapes)
    monkeypatch.setattr(tensors, "_PIECE", 1 << 16)
    whole = (made / "model.safetensors").stat().st_size
    largest = 4 * width * width * 2
    tracemalloc.start()
    try:
        import_folder(made, tmp_path / "made.gguf", "F16", quiet, quiet)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bound = 12 << 20  # tables, the tokenizer, and a few copies of a piece
    assert largest + bound < whole // 2
    assert peak < largest + bound


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["localllm", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_the_command_and_the_modelfile(
    folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = folder()
    monkeypatch.setenv("LOCALLLM_MODEL_STORE", str(tmp_path / "store"))
    use_own_places(tmp_path, monkeypatch)
    before = {path: path.read_bytes() for path in made.iterdir()}
    assert call(monkeypatch, "create", "first", "--from", str(made), "--quantize", "Q8_0") == 0
    recipe = tmp_path / "Modelfile"
    recipe.write_text("FROM ./qwen3\nSYSTEM Be short.\n")
    assert call(monkeypatch, "create", "second", "-f", str(recipe)) == 0
    settings = load_settings({})
    for name, kind in (("first", "Q8_0"), ("second", "BF16")):
        found = find(name, settings)
        with open_model(found.path) as file:
            assert file.tensors["blk.0.ffn_up.weight"].type.name == kind
    assert find("second", settings).defaults().system == "Be short."
    assert {path: path.read_bytes() for path in made.iterdir()} == before
