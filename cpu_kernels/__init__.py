"""Kernels compiled for this processor by Numba and LLVM."""


class UnusableIsaError(ValueError):
    """LOCALLLM_ISA names an instruction set that is unknown or that this processor lacks. Raised by cpu_kernels.isa."""
