"""Small models with a multi-token prediction layer, to be written by tests.models.synthetic."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from models.native_runner import NativeRunner
from tests.models.architecture_models import MODELS
from tests.models.synthetic import Synthetic, shapes, write


def drafts(runner: NativeRunner, wanted: list[tuple[int, int, int]]) -> list[list[int]]:
    """Drafts of so many tokens, however likely they are."""
    found = runner.draft([(sequence, token, (0.0,) * count) for sequence, token, count in wanted])
    return [[token for token, _ in draft] for draft in found]


def predicting(model: Synthetic, *, own_ends: bool = False) -> Synthetic:
    """The model with one such layer. own_ends: with its own embedding, norm and output."""
    prefix = f"blk.{model.layers}.nextn."
    joins = {"eh_proj": f"{model.embedding}, {2 * model.embedding}", "enorm": "width", "hnorm": "width"}
    ends = {
        "embed_tokens": "vocabulary, width",
        "shared_head_head": "vocabulary, width",
        "shared_head_norm": "width",
    }
    further = joins | (ends if own_ends else {})
    return replace(
        model,
        layers=model.layers + 1,
        extra={**model.extra, "nextn_predict_layers": 1},
        beside={**model.beside, **{f"{prefix}{name}.weight": shape for name, shape in further.items()}},
    )


PREDICTING = {
    name: predicting(MODELS[name], own_ends=at % 2 == 0)
    for at, name in enumerate(("qwen35", "qwen35moe", "qwen3next", "glm4moe", "glm4moe-355b", "deepseek2-groups"))
}


def _predicting_nemotron() -> Synthetic:
    """A layer with both attention and experts, after layers that have one of them."""
    model = MODELS["nemotron_h_moe"]
    made = predicting(model)
    behind = {"attention.head_count_kv": 2, "feed_forward_length": 128}
    lists = {key: [*model.extra[key], value] for key, value in behind.items()}
    prefix = f"blk.{model.layers}."
    norms = {f"{prefix}post_attention_norm.weight": "width", f"{prefix}nextn.shared_head_norm.weight": "width"}
    return replace(made, extra={**made.extra, **lists}, beside={**made.beside, **norms}, tied=False)


PREDICTING["nemotron_h_moe"] = _predicting_nemotron()


def counting(path: Path, seed: int = 3, vocabulary: int = 320, embedding: int = 256) -> Path:
    """Write a model whose layers add nothing: each token is followed by the next id, in the drafting layer too."""
    model = predicting(replace(MODELS["qwen35"], tied=False, vocabulary=vocabulary, embedding=embedding))
    random = np.random.default_rng(seed)
    values = {}
    for name, shape in shapes(model).items():
        values[name] = (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
        if len(shape) == 1 and name.endswith("norm.weight"):
            values[name] = np.ones(shape, np.float32)
        if name.endswith(("attn_output.weight", "ffn_down.weight", "ssm_out.weight")):
            values[name] = np.zeros(shape, np.float32)
    width = model.embedding
    joins = f"blk.{model.layers - 1}.nextn."
    values[joins + "eh_proj.weight"] = np.eye(width, 2 * width, dtype=np.float32)
    for name in ("enorm", "hnorm"):
        values[f"{joins}{name}.weight"] = np.ones(width, np.float32)
    values["output.weight"] = values["token_embd.weight"][np.roll(np.arange(model.vocabulary), 1)]
    return write(model, path, values=values)
