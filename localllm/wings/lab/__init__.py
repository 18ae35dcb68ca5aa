"""Measuring and predicting what a server and a machine can do: formulas, workloads, load tests, cost."""
