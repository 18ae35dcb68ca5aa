"""llama.cpp as a backend of the engine: its devices, a plan of what fits on them, and a runner that drives it.

planner.plan decides from a file's header alone; opening.open_planned plans for this machine and loads; runner has
LlamaCppRunner. Importing any of them does not import llama_cpp, which the extra "llama" installs.
"""
