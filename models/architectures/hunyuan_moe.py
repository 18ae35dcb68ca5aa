"""Hunyuan A13B: Hunyuan with experts beside a shared one."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="hunyuan-moe", rotation=Rotation(RopePairs.HALVES, before_norms=True))
