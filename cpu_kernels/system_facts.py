"""What the operating system reports about the processor: sysctl on macOS, and instructions of 64-bit ARM."""

import ctypes
import struct
import sys

# Features by LLVM's names. Linux: bits of the auxiliary vector's entries (asm/hwcap.h), by number of the entry.
# Windows: numbers of IsProcessorFeaturePresent (winnt.h). macOS: names below hw.optional.arm.
_HWCAP, _HWCAP2 = 16, 26
_LINUX = {"neon": (_HWCAP, 1), "dotprod": (_HWCAP, 20), "lse": (_HWCAP, 8), "i8mm": (_HWCAP2, 13)}
_WINDOWS = {"dotprod": 43, "lse": 34, "i8mm": 66}
_MACOS = {"dotprod": "FEAT_DotProd", "lse": "FEAT_LSE", "i8mm": "FEAT_I8MM"}


def is_arm(machine: str) -> bool:
    """Whether a machine or LLVM's name of a target is 64-bit ARM."""
    return machine.lower().startswith(("aarch64", "arm64"))


def sysctl(name: str) -> bytes | None:
    """The value of a system control of macOS, None if it has no such name or this is another system."""
    if sys.platform != "darwin":
        return None
    library, size = ctypes.CDLL(None), ctypes.c_size_t(0)
    if library.sysctlbyname(name.encode(), None, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    value = ctypes.create_string_buffer(size.value)
    if library.sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return value.raw[: size.value]


def sysctl_number(name: str) -> int:
    """The integer value of a system control of macOS, 0 if there is none."""
    return int.from_bytes(sysctl(name) or b"", sys.byteorder)


def efficiency_classes() -> dict[int, int]:
    """The class of each processor of Windows' first group, higher for faster cores; empty on other systems.

    See SYSTEM_CPU_SET_INFORMATION in winnt.h.
    """
    if sys.platform != "win32":
        return {}
    ask, size = ctypes.windll.kernel32.GetSystemCpuSetInformation, ctypes.c_ulong(0)
    ask(None, 0, ctypes.byref(size), None, 0)
    found = ctypes.create_string_buffer(size.value)
    if not ask(found, size, ctypes.byref(size), None, 0):
        return {}
    classes, at = {}, 0
    while at < size.value:
        length, _, _, group, processor, efficiency = struct.unpack_from("<IIIHB3xB", found.raw, at)
        if group == 0:
            classes[processor] = efficiency
        at += length
    return classes


def arm_features() -> frozenset[str]:
    """Those of the features that kernels use on 64-bit ARM which the system says that all cores have.

    LLVM's own answer is no substitute: on Linux it knows few features, and on macOS none.
    """
    if sys.platform == "linux":
        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(name for name, (entry, bit) in _LINUX.items() if getauxval(entry) >> bit & 1)
    if sys.platform == "darwin":
        return frozenset({"neon"} | {name for name, key in _MACOS.items() if sysctl_number(f"hw.optional.arm.{key}")})
    if sys.platform == "win32":
        present = ctypes.windll.kernel32.IsProcessorFeaturePresent
        return frozenset({"neon"} | {name for name, number in _WINDOWS.items() if present(number)})
    return frozenset()
