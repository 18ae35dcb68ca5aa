"""Nemotron-H with experts beside a shared one in place of its networks."""

from dataclasses import replace

from models.architecture import Experts, Gating, stated_expert_scale
from models.architectures.nemotron_h import ARCHITECTURE as NEMOTRON_H

ARCHITECTURE = replace(
    NEMOTRON_H,
    name="nemotron_h_moe",
    experts=Experts(gating=lambda config: Gating.SIGMOID, normalise=None, scale=stated_expert_scale),
)
