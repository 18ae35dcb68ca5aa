"""The child process of cpu_kernels.compile_children: compiles kernels, checks them, and sends the code back.

A request is a line on standard input: a module, the name of a kernel that importing it declares, and "portable" if it
is to be built without this processor's special instructions. The reply is a line
of JSON, followed by the object file if the JSON has its number of bytes.
"""

import gc
import importlib
import json
import logging
import os
import signal
import sys
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any

from cpu_kernels.compiler import CompileError, compile_kernel
from cpu_kernels.isa import TARGET, Isa, plain_target
from cpu_kernels.kernel import EntryPoint, Function, Kernel, LoadError, find_kernel, load_object
from cpu_kernels.kernel_cache import CachedKernel, cache_directory
from cpu_kernels.self_check import differing

# Garbage collection threshold in objects: more than compiling a kernel creates, since collecting costs a tenth of it.
_GARBAGE = 500_000
log = logging.getLogger("localllm.kernels")


class _WrongKernelError(Exception):
    """A build whose results differ from its source's, or on Windows one that does what the processor refuses."""


def build(kernel: Kernel, only_portable: bool = False) -> CachedKernel | None:
    """Compile a kernel and check it on its samples.

    If the build is wrong, or only a portable one is wanted, build without this processor's special instructions.
    Returns None if that is wrong too.
    """
    function = kernel.make()
    for target in (TARGET, plain_target(Isa.PORTABLE))[only_portable:]:
        try:
            code = compile_kernel(function, kernel.symbol, target)
            _check(kernel, function, code)
        except (CompileError, LoadError, _WrongKernelError) as error:
            log.warning("%s; it is not used. Please report it with what localllm doctor prints.", error)
            continue
        return CachedKernel(code, portable=target is not TARGET)
    return None


def _check(kernel: Kernel, function: Function, code: bytes) -> None:
    """Load the code; raise _WrongKernelError if its results differ from the function's on any sample."""
    compiled = EntryPoint(load_object(code, kernel.symbol))
    build = f"kernel {kernel.name}: as compiled for {TARGET.cpu} ({TARGET.isa})"
    try:
        wrong = kernel.samples is not None and differing(kernel.samples(), compiled, function)
    except OSError as error:  # as which ctypes raises illegal instructions and addresses on Windows
        raise _WrongKernelError(f"{build}, it crashes ({error})") from error
    if wrong:
        raise _WrongKernelError(f"{build}, its results are wrong")


def serve() -> None:
    """Answer requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with replies
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    warnings: SimpleQueue[logging.LogRecord] = SimpleQueue()
    log.addHandler(QueueHandler(warnings))
    for line in sys.stdin:
        module, name, *how = line.split()
        reply: dict[str, Any] = {"cache": cache_directory(module).name}
        code = b""
        try:
            importlib.import_module(module)
            kernel = find_kernel(name)
        except (ImportError, KeyError):
            reply["error"] = f"importing {module} does not declare the kernel {name}, so it cannot be compiled."
        else:
            built = build(kernel, only_portable=bool(how))
            if built is None:
                reply["error"] = f"no build of the kernel {name} computes what its source says on this processor."
            else:
                code = built.code
                reply |= {"bytes": len(code), "portable": built.portable}
        reply["warnings"] = [warnings.get().getMessage() for _ in range(warnings.qsize())]
        replies.write(json.dumps(reply).encode() + b"\n" + code)
        replies.flush()
