"""Measures model quality (perplexity, divergence from a reference), and quantises models."""
