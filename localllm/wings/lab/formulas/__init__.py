"""The field's formulas as plain functions; docs/inference.md explains them with worked examples.

Sizes are in bytes, times in seconds, rates per second, power in watts.
"""
