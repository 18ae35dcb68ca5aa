"""The commands of the laboratory: bench, loadtest, simulate and others."""
