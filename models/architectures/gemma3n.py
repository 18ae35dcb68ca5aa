"""Gemma 3n: parallel residual streams, a low-rank path beside attention, sparse gates in the first layers.

Like Gemma 4 it has a second embedding for each layer, normalised values, and layers that share keys and values.
"""

from dataclasses import replace

from models.architecture import windows
from models.architectures.gemma4 import ARCHITECTURE as GEMMA4

_PERIOD = 5

ARCHITECTURE = replace(GEMMA4, name="gemma3n", window=windows(_PERIOD), logit_cap=30.0)
