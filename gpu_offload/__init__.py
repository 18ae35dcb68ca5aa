"""llama.cpp as a backend of the engine: its devices, the memory that models take on them, and a runner that drives it.

localllm.placement decides what goes where. Importing the modules does not import
llama_cpp, which the extra "llama" installs.
"""
