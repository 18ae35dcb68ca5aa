"""Granite 3 and 4 with experts, in some beside a shared one."""

from models.architecture import Architecture
from models.architectures.granite import ROTATION, SCALES

ARCHITECTURE = Architecture(name="granitemoe", rotation=ROTATION, scales=SCALES)
