"""LFM2 with experts behind the first layers; a bias takes part in their choice and not in their weights."""

from models.architecture import Architecture, Experts, stated_gating
from models.architectures.lfm2 import NORMS, ROTATION

ARCHITECTURE = Architecture(name="lfm2moe", rotation=ROTATION, norms=NORMS, experts=Experts(stated_gating))
