"""Roofline analysis: this machine's limits, a model's speeds, and the share of the limits that it reaches."""
