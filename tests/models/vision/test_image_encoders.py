"""Image encoders: rows equal llama.cpp's, sizes follow the makers' rules, and no thread or file changes a result."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest

from cpu_kernels.formats.table import WEIGHT_FORMATS
from gguf_io import open_model
from gguf_io.errors import LocalLLMError, ModelFileError, PictureError
from gguf_io.interruption import CHECKPOINT
from gguf_io.pictures import Budget
from models.errors import UnsupportedModelError
from models.vision.config import read_vision_config
from models.vision.encoder import FAMILIES, ImageEncoder, header_layout, open_encoder, rows_together, vision_needs
from models.vision.layout import PictureSizeError
from models.vision.tower import heads_of
from tests.cpu_kernels.kernel_harness import random_weights
from tests.gguf_files import copying, finish
from tests.oracle import llama_oracle
from tests.oracle.vision_oracle import LlamaVision
from tests.projector_files import KINDS, write_projector, write_qwen2vl

Q = gguf.GGMLQuantizationType
# Sizes that neither we nor llama.cpp resize, so that only the encoders are compared; a budget of as many tokens.
_QWEN = [(96, 64), (16, 256), (256, 48), (208, 176), (448, 400)]
WHOLE = {
    "gemma3": [(96, 96)],
    "gemma4uv": [(120, 96), (108, 108), (12, 840), (36, 288)],
    "gemma4v": [(120, 96), (108, 108), (12, 840), (36, 288)],
    "idefics3": [(128, 128), (128, 96)],
    "internvl": [(48, 48), (96, 96), (144, 96), (48, 192)],
    "lfm2": [(256, 256), (384, 288), (64, 2048), (1024, 1024), (1536, 512)],
    "mlp": [(32, 32), (64, 31), (20, 32), (5, 7)],
    "pixtral": [(64, 48), (16, 256), (256, 48), (208, 176), (400, 448)],
    "qwen2vl_merger": _QWEN[:2],
    "qwen2.5vl_merger": _QWEN,
    "qwen3vl_merger": [(256, 64), *_QWEN[3:], (128, 144)],
}
# Side of what becomes one row, where a budget decides how many there are.
UNITS = {"gemma4uv": 12, "gemma4v": 12}
ODD = [(1, 1), (1, 3000), (3000, 1), (7, 5), (90, 31), (31, 90), (64, 64), (97, 64)]


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Random pixels on a gradient, so that resizing leaves something to see."""
    rng = np.random.default_rng([width, height, seed])
    noise = rng.integers(0, 120, (height, width, 3))
    slope = np.linspace(0, 135, width)[None, :, None] * np.array([1, 0.5, 0.2])
    return (noise + slope).astype(np.uint8)


def budget_of(kind: str, width: int, height: int) -> Budget:
    return Budget(most_tokens=width * height // UNITS[kind] ** 2) if kind in UNITS else Budget()


# Sizes whose rows have whole blocks of 256 values.
BLOCKS = {"width": 256, "hidden": 512, "text": 256}
BLOCKS_OF = {"gemma4uv": {"patch": 16}}


def similarity(found: np.ndarray, expected: np.ndarray) -> float:
    """The least cosine between two rows."""
    assert found.shape == expected.shape
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float((np.einsum("ij,ij->i", found, expected) / norms).min())


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("projectors")
    return {kind: write_projector(folder / f"{kind}.gguf", kind) for kind in KINDS}


@pytest.fixture(scope="module")
def encoders(paths: dict[str, Path]) -> Iterator[dict[str, ImageEncoder]]:
    with ExitStack() as stack:
        found = {}
        for kind, path in paths.items():
            with open_model(path) as file:
                found[kind] = stack.enter_context(open_encoder(file, threads=2))
        yield found


def language_model(kind: str, data_dir: Path, folder: Path, name: str = "stories260K-F32") -> Path:
    """A tiny model, of width 64 unless named, whose positions have several components for Qwen's pictures."""
    plain = data_dir / f"models/gguf/{name}.gguf"
    return write_qwen2vl(plain, folder / "qwen.gguf") if kind.startswith("qwen") else plain


def of_llama(path: Path, kind: str, **options) -> Path:
    """The projector for llama.cpp, which gives a class's position to the first patch, and the last one to the class."""

    def roll(tensors: dict[str, np.ndarray]) -> None:
        tensors["v.position_embd.weight"] = np.roll(tensors["v.position_embd.weight"], -1, axis=0)

    changed = {"changed": roll} if kind in ("internvl", "mlp") else {}
    return write_projector(path, kind, **changed, **options)


def same_rows(kind: str, found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The least cosine of rows, whose runs llama.cpp divides by tile, and of which it loses LLaVA's first."""
    mine, others = np.concatenate(found), np.concatenate(expected)
    return similarity(mine[1:], others[:-1]) if kind == "mlp" else similarity(mine, others)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("kind", WHOLE)
def test_rows_and_marks_are_llama_cpps(kind, paths, encoders, data_dir, tmp_path) -> None:
    model = language_model(kind, data_dir, tmp_path)
    llama = LlamaVision(of_llama(tmp_path / "projector.gguf", kind), model)
    try:
        for width, height in WHOLE[kind]:
            pixels = picture(width, height)
            layout = encoders[kind].layout(width, height, budget_of(kind, width, height))
            found, expected = encoders[kind].encode(pixels, layout), llama.pieces(pixels)
            rows = [piece for piece in expected if isinstance(piece, np.ndarray)]
            assert layout.tokens == sum(map(len, rows))
            assert same_rows(kind, found, rows) > 0.9999
            marks = [piece for piece in layout.pieces if isinstance(piece, str)]
            texts = [tuple(llama_oracle.tokenize(model, mark, add_special=False)) for mark in marks]
            if kind not in ("idefics3", "lfm2"):  # whose marks are single tokens, which this model has not
                assert texts == [piece for piece in expected if not isinstance(piece, np.ndarray)]
    finally:
        llama.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_a_picture_of_many_passes_is_as_in_llama_cpp(tmp_path, data_dir) -> None:
    """900 patches: attention reaches over passes of 512 rows and spans of 256."""
    path = write_projector(tmp_path / "projector.gguf", "gemma3", side=240)
    llama = LlamaVision(path, language_model("gemma3", data_dir, tmp_path))
    try:
        with open_model(path) as file, open_encoder(file, threads=2) as encoder:
            (found,) = encoder.encode(picture(240, 240), encoder.layout(240, 240))
        assert similarity(found, llama.rows(picture(240, 240))[0]) > 0.9999
    finally:
        llama.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_a_pixtral_whose_patches_are_rows_is_as_in_llama_cpp(tmp_path, data_dir) -> None:
    """Pixtral 12B does not merge patches."""
    path = write_projector(tmp_path / "projector.gguf", "pixtral", merge=1)
    llama = LlamaVision(path, language_model("pixtral", data_dir, tmp_path))
    try:
        with open_model(path) as file, open_encoder(file, threads=2) as encoder:
            (found,) = encoder.encode(picture(120, 88), encoder.layout(120, 88))
        assert similarity(found, llama.rows(picture(120, 88))[0]) > 0.9999
    finally:
        llama.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_rows_for_later_layers_are_llama_cpps(tmp_path, data_dir) -> None:
    """Qwen3-VL's rows for its first layers come beside those for its input."""
    path = write_projector(tmp_path / "projector.gguf", "qwen3vl_merger", deep=2)
    llama = LlamaVision(path, _with_deepstack(data_dir / "models/gguf/stories260K-F32.gguf", tmp_path / "model.gguf"))
    try:
        with open_model(path) as file, open_encoder(file, threads=2) as encoder:
            assert encoder.width == llama.width == 3 * 64
            (found,) = encoder.encode(picture(208, 176), encoder.layout(208, 176))
        assert similarity(found, llama.rows(picture(208, 176))[0]) > 0.9999
    finally:
        llama.close()


def _with_deepstack(source: Path, path: Path) -> Path:
    """A Llama's weights as a Qwen3-VL that takes images into its first two layers too."""
    reader, writer = copying(
        source, path, architecture="qwen3vl", renamed=lambda key: key.replace("llama.", "qwen3vl.")
    )
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    writer.add_uint32("qwen3vl.n_deepstack_layers", 2)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            writer.add_tensor(tensor.name.replace(".weight", "_norm.weight"), np.ones(8, np.float32))
    return finish(writer)


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(
    ("kind", "width", "heads"),
    [
        ("gemma3", 144, 2),
        ("qwen3vl_merger", 144, 2),
        ("qwen2.5vl_merger", 160, 2),
        ("pixtral", 144, 2),
        ("gemma3", 240, 5),
    ],
)
def test_heads_of_other_sizes_than_whole_vectors(kind: str, width: int, heads: int, tmp_path: Path, data_dir) -> None:
    """Heads of 72 and 80 values take 80, rotated in halves of 40. Five heads of 48 would fill no row, and take 64."""
    sizes = {"width": width, "heads": heads}
    path = write_projector(tmp_path / "projector.gguf", kind, **sizes)
    pixels = picture(*WHOLE[kind][-1])
    llama = LlamaVision(of_llama(tmp_path / "llama.gguf", kind, **sizes), language_model(kind, data_dir, tmp_path))
    try:
        with open_model(path) as file, open_encoder(file, threads=2) as encoder:
            padded = heads_of(read_vision_config(file, merge=3)).padded
            assert padded == (64 if heads == 5 else 80)
            found = encoder.encode(pixels, encoder.layout(*WHOLE[kind][-1]))
        assert same_rows(kind, found, llama.rows(pixels)) > 0.9999
    finally:
        llama.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("weights", [Q.F16, Q.BF16, Q.Q8_0], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", WHOLE)
def test_rows_are_llama_cpps_with_other_weights(kind, weights, tmp_path, data_dir) -> None:
    path = write_projector(tmp_path / "projector.gguf", kind, weights=weights)
    width, height = WHOLE[kind][0]
    others = of_llama(tmp_path / "llama.gguf", kind, weights=weights)
    llama = LlamaVision(others, language_model(kind, data_dir, tmp_path))
    try:
        with open_model(path) as file, open_encoder(file, threads=1) as encoder:
            layout = encoder.layout(width, height, budget_of(kind, width, height))
            pixels = picture(width, height)
            # llama.cpp rounds activations for Q8_0 in blocks of 32, for BF16 to eight bits.
            least = 0.9999 if weights is Q.F16 else 0.999
            assert same_rows(kind, encoder.encode(pixels, layout), llama.rows(pixels)) > least
    finally:
        llama.close()


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize(
    ("kind", "weights"),
    [*((kind, Q.Q4_K) for kind in WHOLE), *(("qwen3vl_merger", each) for each in (Q.Q2_K, Q.Q3_K, Q.Q5_K, Q.Q6_K))],
)
def test_rows_are_llama_cpps_with_k_quants(kind: str, weights: Q, tmp_path: Path, data_dir: Path) -> None:
    sizes = BLOCKS | BLOCKS_OF.get(kind, {})
    path = write_projector(tmp_path / "projector.gguf", kind, weights=weights, **sizes)
    others = of_llama(tmp_path / "llama.gguf", kind, weights=weights, **sizes)
    width, height = (480, 384) if kind == "gemma4uv" else WHOLE[kind][0]
    model = language_model(kind, data_dir, tmp_path, "stories260K-pad256-Q8_0")
    llama = LlamaVision(others, model)
    try:
        with open_model(path) as file, open_encoder(file, threads=1) as encoder:
            left = {name for name, each in file.tensors.items() if each.type.name == "F16"}
            assert not left and weights.name in {each.type.name for each in file.tensors.values()}
            budget = Budget(most_tokens=80) if kind == "gemma4uv" else budget_of(kind, width, height)
            layout, pixels = encoder.layout(width, height, budget), picture(width, height)
            # Activations are rounded. Scores of gemma4v are not scaled down, so that this shows more.
            least = 0.998 if kind == "gemma4v" else 0.999
            assert same_rows(kind, encoder.encode(pixels, layout), llama.rows(pixels)) > least
    finally:
        llama.close()


def random_blocks(values: np.ndarray, kind: Q) -> np.ndarray:
    """Blocks of random bits in place of matrices, as no library makes all types."""
    return values if kind is Q.F32 else random_weights(kind.name, *values.shape)


@pytest.mark.parametrize("name", ["BF16", "Q4_1", "Q3_K", "I8", "I32", "F64", "Q8_K"])
def test_a_weight_type_is_refused_from_the_header_or_computed(name: str, tmp_path: Path) -> None:
    path = write_projector(tmp_path / "p.gguf", "lfm2", weights=Q[name], **BLOCKS, blocks=random_blocks)
    with open_model(path) as file:
        try:
            vision_needs(file, 1)
        except UnsupportedModelError as error:
            assert re.search(rf"v\.blk\.0\.\S+: there are no kernels for weights of type {name}\.", str(error))
            assert name not in WEIGHT_FORMATS
            return
        with open_encoder(file, threads=1) as encoder:
            (rows,) = encoder.encode(picture(64, 64), encoder.layout(64, 64))
    assert np.isfinite(rows).all() and rows.any()


@pytest.mark.parametrize("kind", KINDS)
def test_any_size_is_encoded_the_same_on_any_number_of_threads(kind, paths, encoders) -> None:
    with open_model(paths[kind]) as file, open_encoder(file, threads=1) as alone:
        for width, height in ODD:
            layout = alone.layout(width, height)
            assert layout == encoders[kind].layout(width, height) and layout.tokens >= 1
            pixels = picture(width, height)
            first, second = alone.encode(pixels, layout), encoders[kind].encode(pixels, layout)
            assert [(len(rows), rows.shape[1]) for rows in first] == [(run.count, alone.width) for run in layout.runs]
            for mine, others in zip(first, second, strict=True):
                assert np.isfinite(mine).all()
                np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_reports_progress_and_ends_when_it_is_cancelled(kind, encoders) -> None:
    encoder, (width, height) = encoders[kind], (640, 500)
    layout, seen = encoder.layout(width, height), []
    whole = encoder.encode(picture(width, height), layout, seen.append)
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1.0)
    passes = len(seen)
    del seen[:]

    def check() -> None:
        if seen:
            raise InterruptedError

    token = CHECKPOINT.set(check)
    try:
        with pytest.raises(InterruptedError) if passes > 1 else nullcontext():
            encoder.encode(picture(width, height), layout, seen.append)
    finally:
        CHECKPOINT.reset(token)
    assert len(seen) == 1
    again = encoder.encode(picture(width, height), layout)
    for mine, others in zip(whole, again, strict=True):
        np.testing.assert_array_equal(mine, others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_from_the_header_what_the_encoder_packs(kind, paths, encoders) -> None:
    with open_model(paths[kind]) as file:
        needs, layout = vision_needs(file, threads=2), header_layout(file)
        assert needs.weights >= 0.9 * sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 2) / 2
        assert needs.buffers > 4 * encoders[kind].layout(640, 500).tokens * encoders[kind].width
    assert layout(640, 500) == encoders[kind].layout(640, 500)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_do_not_fit_are_refused_by_name(kind, tmp_path) -> None:
    with open_model(write_projector(tmp_path / "whole.gguf", kind)) as file:
        names = list(file.tensors)
    for number, name in enumerate(names):
        for problem in ("missing", "wide"):

            def change(tensors: dict[str, np.ndarray], name: str = name, problem: str = problem) -> None:
                values = tensors.pop(name)
                if problem == "wide":
                    tensors[name] = np.concatenate([values, values], axis=-1)

            path = write_projector(tmp_path / f"{number}-{problem}.gguf", kind, changed=change)
            with open_model(path) as file:
                if _optional(kind, name, problem):
                    vision_needs(file, 1)
                    continue
                with pytest.raises((UnsupportedModelError, ModelFileError)) as caught:
                    vision_needs(file, 1)
                text = str(caught.value)
                assert str(path) in text and "\n" not in text
                assert re.search(r"\b(v|mm)\.\w+", text), text  # the tensor, or the one that it leaves without a use
            path.unlink()

    def more(tensors: dict[str, np.ndarray]) -> None:
        tensors["v.unknown.weight"] = np.ones(8, np.float32)

    unused = pytest.raises(UnsupportedModelError, match=r"v\.unknown\.weight would not be used")
    with open_model(write_projector(tmp_path / "more.gguf", kind, changed=more)) as file, unused:
        vision_needs(file, 1)


def _optional(kind: str, name: str, problem: str) -> bool:
    """Tensors that an encoder of the kind may lack, or that may have other sizes."""
    if kind == "mlp" and name.startswith("v.blk.2."):
        return True  # not computed
    if problem == "wide":
        return kind == "gemma3" and name.startswith("mm.input_projection")  # as wide as the language model
    return name.endswith(".bias") or ".ls" in name


@pytest.mark.parametrize(
    "keys",
    [
        {"clip.vision.patch_size": 0},
        {"clip.vision.patch_size": 1 << 20},
        {"clip.vision.embedding_length": 1 << 30},
        {"clip.vision.image_std": [0.0, 0.0, 0.0]},
        {"clip.vision.image_mean": [float("inf"), 0.0, 0.0]},
        {"clip.vision.projector.scale_factor": 0, "clip.vision.spatial_merge_size": 0},
        {"clip.vision.attention.layer_norm_epsilon": float("nan")},
        {"clip.vision.block_count": 1 << 20},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_headers_out_of_range_are_refused(keys, tmp_path) -> None:
    path = write_projector(tmp_path / "p.gguf", "gemma4uv", keys=keys)
    with open_model(path) as file, pytest.raises(ModelFileError) as caught:
        header_layout(file)
    assert str(tmp_path) in str(caught.value)


def test_other_projectors_and_other_files_are_refused(tmp_path) -> None:
    other = write_projector(tmp_path / "other.gguf", "gemma4uv", keys={"clip.projector_type": "resampler"})
    sound = write_projector(tmp_path / "sound.gguf", "gemma4uv", keys={"clip.has_vision_encoder": False})
    model = write_projector(tmp_path / "model.gguf", "gemma4uv", keys={"general.architecture": "llama"})
    for path, words in ((other, "'resampler'.*--backend llama"), (sound, "for sound"), (model, "not a projector")):
        with open_model(path) as file, pytest.raises(LocalLLMError, match=words):
            open_encoder(file)


# Every name of a projector that llama.cpp knows, but for those that FAMILIES has (tools/mtmd/clip-impl.h).
OTHER_EYES = [
    "ldp",
    "ldpv2",
    "resampler",
    "adapter",
    "glm_edge",
    "ling3vl",
    "step3vl",
    "gemma3nv",
    "phi4",
    "llama4",
    "qwen2.5o",
    "kimivl",
    "paddleocr",
    "lightonocr",
    "cogvlm",
    "janus_pro",
    "dots_ocr",
    "dots3note_v",
    "deepseekocr",
    "deepseekocr2",
    "deepseek4v",
    "glm4v",
    "glm5v",
    "youtuvl",
    "yasa2",
    "kimik25",
    "nemotron_v2_vl",
    "exaone4_5",
    "hunyuanvl",
    "minicpmv4_6",
    "mimovl",
    "minimax_m3",
    "granite4_vision",
    "muse-glimmer",
]
OTHER_EARS = [
    "gemma3na",
    "gemma4a",
    "ultravox",
    "qwen2a",
    "qwen3a",
    "glma",
    "voxtral",
    "meralion",
    "musicflamingo",
    "dots3note_a",
    "lfm2a",
    "granite_speech",
    "mimo_audio",
    "parakeet",
    "qwen3tts_spkenc",
    "pockettts_spkenc",
]


@pytest.mark.parametrize("kind", OTHER_EYES)
def test_encoders_that_only_llama_cpp_has_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    for key in ("clip.projector_type", "clip.vision.projector_type"):
        keys = {"clip.projector_type": None, key: kind}
        with open_model(write_projector(tmp_path / f"{key}.gguf", "gemma4uv", keys=keys)) as file:
            for refuses in (open_encoder, vision_needs, header_layout, rows_together):
                with pytest.raises(UnsupportedModelError, match=rf"{re.escape(repr(kind))}.*--backend llama"):
                    refuses(file)


@pytest.mark.parametrize("kind", OTHER_EARS)
def test_projectors_of_sound_alone_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    sound = {"clip.has_vision_encoder": None, "clip.has_audio_encoder": True, "clip.vision.patch_size": None}
    for key in ("clip.projector_type", "clip.audio.projector_type"):
        keys = {"clip.projector_type": None, key: kind, **sound}
        refused = pytest.raises(UnsupportedModelError, match=rf"for sound, of the type {kind!r}.*--backend llama")
        with open_model(write_projector(tmp_path / f"{key}.gguf", "gemma4uv", keys=keys)) as file, refused:
            open_encoder(file)


def test_every_type_is_tested() -> None:
    assert set(FAMILIES) == set(KINDS)


@pytest.mark.parametrize("wrong", [{"most_tokens": 0}, {"least_tokens": -1}, {"least_tokens": 9, "most_tokens": 8}])
def test_budgets_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PictureError):
        Budget(**wrong)


# Tokens of 224 x 224, 896 x 896, 1280 x 720 and 720 x 1280 pixels by the makers' own processors.
COUNTS = {
    "gemma3": ({"side": 896, "patch": 14, "merge": 4, "width": 32, "heads": 1, "hidden": 32}, (256, 256, 256, 256)),
    "gemma4uv": ({"patch": 16, "merge": 3}, (256, 256, 264, 264)),
    "gemma4v": ({"patch": 16, "merge": 3}, (256, 256, 264, 264)),
    "idefics3": ({"side": 512, "patch": 16, "merge": 4}, (1088, 1088, 832, 832)),
    "internvl": ({"side": 448, "patch": 14}, (256, 1280, 2304, 2304)),
    "lfm2": ({"side": 256, "patch": 16}, (64, 1280, 764, 764)),
    "pixtral": ({"side": 1540, "patch": 14}, (71, 1055, 1221, 1241)),
    "qwen2.5vl_merger": ({"patch": 14}, (64, 1024, 1196, 1196)),
    "qwen3vl_merger": ({"patch": 16}, (64, 784, 880, 880)),
    "mlp": ({"side": 336, "patch": 14}, (576, 576, 576, 576)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_tokens_are_those_of_the_makers_processors(kind, tmp_path) -> None:
    sizes, counts = COUNTS[kind]
    with open_model(write_projector(tmp_path / "p.gguf", kind, **sizes)) as file:
        layout = header_layout(file)
    found = [layout(*size).tokens for size in ((224, 224), (896, 896), (1280, 720), (720, 1280))]
    assert found == list(counts)


def test_gemma_4_sees_all_rows_of_a_picture_unless_the_model_is_small(tmp_path) -> None:
    for text, sees_all in ((1536, False), (2560, False), (2816, True), (5376, True)):
        path = write_projector(tmp_path / f"{text}.gguf", "gemma4v", text=text)
        with open_model(path) as file:
            assert [run.sees_all for run in header_layout(file)(640, 480).runs] == [sees_all]
            assert rows_together(file) == (1120 if sees_all else 0)


def test_pixtral_keeps_a_budget_with_the_rows_after_lines(tmp_path) -> None:
    with open_model(write_projector(tmp_path / "p.gguf", "pixtral", side=1540, patch=14)) as file:
        layout = header_layout(file)
    for most in (1, 20, 300, 1000):
        for source in ((1280, 720), (90, 5000), (3000, 1)):
            assert layout(*source, Budget(most_tokens=most)).tokens <= most
    assert layout(100, 100).tokens == 19 and layout(100, 100, Budget(least_tokens=500)).tokens >= 500
    assert layout(100, 100, Budget(least_tokens=4000)) == layout(100, 100, Budget(least_tokens=3025))


def test_lfm2_cuts_large_pictures_unless_the_budget_forbids_tiles(tmp_path) -> None:
    with open_model(write_projector(tmp_path / "p.gguf", "lfm2", side=256, patch=16)) as file:
        layout = header_layout(file)
    assert layout(1280, 720).tiles == (1, 2) and layout(1280, 720, Budget(most_tokens=500)).tiles == (1, 1)
    assert layout(4000, 4000, Budget(most_tokens=5 * 256)).tiles == (2, 2)
    for most in (100, 256, 800, 1300):
        assert layout(1280, 720, Budget(most_tokens=most)).tokens <= most
    assert layout(1280, 720, Budget(most_tokens=800)).tiles == (1, 2)
    assert layout(640, 480, Budget(least_tokens=300)) == layout(640, 480, Budget(least_tokens=256))


@pytest.mark.parametrize(("kind", "tile"), [("idefics3", 64), ("internvl", 256)])
def test_tiles_fit_the_budget(kind, tile, tmp_path) -> None:
    with open_model(write_projector(tmp_path / "p.gguf", kind, **COUNTS[kind][0])) as file:
        layout = header_layout(file)
    for source in ((1280, 720), (720, 1280), (4000, 3000)):
        whole = layout(*source).tokens
        found = [layout(*source, Budget(most_tokens=most)).tokens for most in (1, tile, 3 * tile, 7 * tile, 99 * tile)]
        assert found[:2] == [tile, tile] and found[2] <= 3 * tile and found[2] <= found[3] <= 7 * tile
        assert found[1] < found[3] < whole == found[4]


def test_gemma_4_fills_its_budget(tmp_path) -> None:
    with open_model(write_projector(tmp_path / "p.gguf", "gemma4uv", patch=16)) as file:
        layout = header_layout(file)
    for most in (70, 140, 280, 560, 1120):
        for source in ((1280, 720), (224, 224), (5000, 3400), (333, 777)):
            found = layout(*source, Budget(most_tokens=most))
            assert 0.75 * most <= found.tokens <= most
            assert found.tokens == found.resized[0] * found.resized[1] // 48**2
    assert layout(3000, 1).resized == (280 * 48, 48)
    assert layout(640, 480, Budget(least_tokens=560)).tokens > 500
    assert layout(640, 480, Budget(most_tokens=4000)) == layout(640, 480, Budget(most_tokens=1120))
    with pytest.raises(PictureSizeError, match="cannot be shown"):
        layout(0, 10)
