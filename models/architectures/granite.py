"""Granite 3 and 4 without states: Llama with factors of embeddings, residuals, scores and logits in the file."""

from models.architecture import Architecture, RopePairs, Rotation, Scales, inverse_root, stated
from models.config import ModelConfig


def _embedding(config: ModelConfig) -> float:
    return config.factors.embedding or 1.0


def _residual(config: ModelConfig) -> float:
    return config.factors.residual or 1.0


def _attention(config: ModelConfig) -> float:
    return config.factors.attention or inverse_root(config)


def _logits(config: ModelConfig) -> float:
    return 1.0 / stated(config, "logit_scale", config.factors.logits or None)


def _turns(config: ModelConfig, layer: int) -> bool:
    return config.rope_finetuned


ROTATION = Rotation(RopePairs.NEIGHBOURS, turns=_turns)
SCALES = Scales(_embedding, _residual, _attention, _logits)
ARCHITECTURE = Architecture(name="granite", rotation=ROTATION, scales=SCALES)
