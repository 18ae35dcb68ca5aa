"""Falcon-H1: in each layer a selective scan beside attention, and a feed-forward network behind both."""

from models.architecture import Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(name="falcon-h1", rotation=Rotation(RopePairs.HALVES), norms=Norms(scans=False))
