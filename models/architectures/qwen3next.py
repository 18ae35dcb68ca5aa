"""Qwen3-Next: as Qwen 3.5 with experts, but value heads that share a key head lie side by side."""

from dataclasses import replace

from models.architectures.qwen35moe import ARCHITECTURE as QWEN35MOE

ARCHITECTURE = replace(QWEN35MOE, name="qwen3next", value_heads_together=True)
