"""InternLM 2 and 2.5: Llama under another name."""

from models.architecture import Architecture, RopePairs, Rotation

ARCHITECTURE = Architecture(name="internlm2", rotation=Rotation(RopePairs.NEIGHBOURS))
