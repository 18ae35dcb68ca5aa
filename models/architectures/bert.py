"""BERT and XLM-RoBERTa: positions are learnt, and the rows are normalised after each sub-layer."""

from models.architecture import Activation, Architecture, Norms, RopePairs, Rotation

ARCHITECTURE = Architecture(
    name="bert",
    rotation=Rotation(RopePairs.HALVES, turns=lambda _config, _layer: False),
    norms=Norms(layer_norm=True, before=False, sums=True),
    activation=Activation.GELU_ALONE,
    causal=False,
)
