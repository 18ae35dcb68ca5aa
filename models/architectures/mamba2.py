"""Mamba-2: layers of selective scans, and nothing else."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="mamba2", rotation=Rotation(RopePairs.HALVES))
