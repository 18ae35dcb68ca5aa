"""Kernels compiled before all tests, on all cores: else processes that need the same ones would wait for each other."""

from importlib import import_module
from itertools import chain
from pkgutil import iter_modules

import cpu_kernels
from cpu_kernels.attention import attention_kernel
from cpu_kernels.compile_children import compile_in_children
from cpu_kernels.formats.table import WEIGHT_FORMATS, WORD_FORMATS
from cpu_kernels.kernel import Kernel, _declared
from cpu_kernels.kernel_cache import read_kernel
from cpu_kernels.kv_types import OF_LATENTS
from tests.cpu_kernels.test_attention_kernels import CASES
from tests.cpu_kernels.test_latents import SHAPES


def declared_kernels() -> list[Kernel]:
    """All kernels of cpu_kernels, whose modules are imported."""
    for module in iter_modules(cpu_kernels.__path__):
        if not module.name.startswith("compile"):  # what imports Numba and declares no kernel
            import_module(f"cpu_kernels.{module.name}")
    list(chain(WEIGHT_FORMATS.values(), WORD_FORMATS.values()))  # imports the modules that declare them
    return [kernel for kernel in _declared.values() if kernel.module.startswith("cpu_kernels.")]


def compile_kernels() -> None:
    """Compile what is not in the cache: all kernels but those of attention that no test uses."""
    attention = [attention_kernel(*types, shape.group) for shape, types in CASES]
    attention += [attention_kernel(kind, None, shape.heads) for kind in OF_LATENTS for shape in SHAPES]
    others = [kernel for kernel in declared_kernels() if not kernel.name.startswith("attention.")]
    longest_first = {kernel.name: kernel for kernel in [*attention, *others]}.values()
    missing = [kernel for kernel in longest_first if read_kernel(kernel.module, kernel.name) is None]
    compile_in_children([(kernel.module, kernel.name) for kernel in missing])
