"""Qwen 3.5 with experts and a shared one, which has a gate of its own."""

from models.architecture import Architecture, Experts, stated_expert_scale
from models.architectures.qwen35 import NORMS, ROTATION

EXPERTS = Experts(scale=stated_expert_scale)
ARCHITECTURE = Architecture(name="qwen35moe", rotation=ROTATION, norms=NORMS, experts=EXPERTS, gated_attention=True)
