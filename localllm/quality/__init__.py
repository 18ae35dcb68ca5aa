"""How good a model still is: perplexity, divergence from a reference, and the quantising that both are asked about."""
