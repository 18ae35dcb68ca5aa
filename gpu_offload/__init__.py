"""llama.cpp as a backend of the engine: its devices, a plan of what fits on them, and a runner that drives it.

planner.plan places a model; runner.open_planned plans for this machine and loads. Importing them does not import
llama_cpp, which the extra "llama" installs.
"""
