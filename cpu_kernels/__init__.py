"""Kernels compiled for this processor by Numba and LLVM."""


class VariableError(ValueError):
    """A variable that the kernels read has a value that they cannot follow."""


class UnusableIsaError(VariableError):
    """LOCALLLM_ISA names an instruction set that is unknown or that this processor lacks. Raised by cpu_kernels.isa."""


class PrefetchError(VariableError):
    """LOCALLLM_PREFETCH has no distances. Raised by cpu_kernels.tuning."""
