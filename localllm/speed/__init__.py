"""How fast this machine is, as benchmarks measured it, and what that predicts for a model."""
