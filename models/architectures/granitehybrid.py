"""Granite 4 H: as Granite, with selective scans in place of most layers' attention, with and without experts."""

from dataclasses import replace

from models.architecture import Architecture
from models.architectures.granite import ROTATION, SCALES
from models.config import ModelConfig


def _logits(config: ModelConfig) -> float:
    return 1.0 / (config.factors.logits or 1.0)


ARCHITECTURE = Architecture(name="granitehybrid", rotation=ROTATION, scales=replace(SCALES, logits=_logits))
