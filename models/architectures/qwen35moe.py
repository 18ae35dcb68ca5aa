"""Qwen 3.5 with experts and a shared one, which has a gate of its own."""

from dataclasses import replace

from models.architectures.qwen35 import ARCHITECTURE as QWEN35

ARCHITECTURE = replace(QWEN35, name="qwen35moe")
