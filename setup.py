"""Refuses a C library for which dependencies have no wheels, before pip tries for minutes to compile LLVM."""

import platform
import sys

from setuptools import setup

if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
    sys.exit(
        "localllm needs glibc: Numba and llguidance have no wheels for musl (Alpine). Use a distribution or image "
        "with glibc, such as Debian's."
    )
setup()
