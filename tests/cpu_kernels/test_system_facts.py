"""Questions to operating systems, with the answers of systems that this machine does not run."""

import ctypes
import struct
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cpu_kernels import system_facts
from cpu_kernels.system_facts import arm_features, efficiency_classes, sysctl, sysctl_number


class Controls:
    """The C library of macOS, with some system controls."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values

    def sysctlbyname(self, name: bytes, to: Any, size: Any, _new: None, _new_size: Any) -> int:
        if (value := self.values.get(name.decode())) is None:
            return -1
        if to is not None:
            to[: len(value)] = value
        ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = len(value)
        return 0


def macos(monkeypatch: pytest.MonkeyPatch, **values: bytes) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    controls = Controls({name.replace("__", "."): value for name, value in values.items()})
    monkeypatch.setattr(system_facts.ctypes, "CDLL", lambda _name: controls)


def test_system_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sysctl("hw.ncpu") is None or sys.platform == "darwin"
    macos(monkeypatch, hw__perflevel0__physicalcpu=(6).to_bytes(4, "little"), hw__wide=(7 << 33).to_bytes(8, "little"))
    assert sysctl("hw.perflevel0.physicalcpu") == b"\6\0\0\0"
    assert sysctl_number("hw.perflevel0.physicalcpu") == 6
    assert sysctl_number("hw.wide") == 7 << 33
    assert sysctl("hw.nothing") is None and sysctl_number("hw.nothing") == 0


def linux(monkeypatch: pytest.MonkeyPatch, entries: dict[int, int]) -> None:
    class Function:
        def __call__(self, number: int) -> int:
            return entries.get(number, 0)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(system_facts.ctypes, "CDLL", lambda _name: SimpleNamespace(getauxval=Function()))


# Entries of the auxiliary vector: of a Cortex-A72, a Cortex-A76 and a Neoverse V2.
@pytest.mark.parametrize(
    ("hwcap", "hwcap2", "features"),
    [
        (0x000000FF, 0, {"neon"}),
        (0x00100FFF, 0, {"neon", "dotprod", "lse"}),
        (0xEFFFFFFF, 0x0001E3FF | 1 << 13, {"neon", "dotprod", "lse", "i8mm"}),
    ],
    ids=["A72", "A76", "V2"],
)
def test_features_on_linux(hwcap: int, hwcap2: int, features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    linux(monkeypatch, {16: hwcap, 26: hwcap2})
    assert arm_features() == features


def test_features_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    yes, no = (1).to_bytes(4, "little"), bytes(4)
    macos(monkeypatch, hw__optional__arm__FEAT_DotProd=yes, hw__optional__arm__FEAT_LSE=yes)
    assert arm_features() == {"neon", "dotprod", "lse"}
    macos(monkeypatch, hw__optional__arm__FEAT_DotProd=yes, hw__optional__arm__FEAT_I8MM=no)
    assert arm_features() == {"neon", "dotprod"}
    macos(monkeypatch, hw__optional__arm__FEAT_DotProd=yes, hw__optional__arm__FEAT_I8MM=yes)
    assert arm_features() == {"neon", "dotprod", "i8mm"}


def test_features_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    kernel = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number in (34, 43)))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert arm_features() == {"neon", "dotprod", "lse"}


def test_efficiency_classes_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processors of two classes, and one of another group, in entries that later versions may lengthen."""
    entries = [(0, 0, 1), (0, 1, 1), (0, 2, 0), (0, 3, 0), (1, 0, 0)]
    data = b"".join(
        struct.pack("<IIIHBBBBBB", 40, 0, 256 + i, group, processor, processor, 0, 0, efficiency, 0).ljust(40, b"\0")
        for i, (group, processor, efficiency) in enumerate(entries)
    )

    def ask(to: Any, _size: Any, needed: Any, _process: None, _flags: int) -> int:
        ctypes.cast(needed, ctypes.POINTER(ctypes.c_uint32))[0] = len(data)
        if to is None:
            return 0
        to[: len(data)] = data
        return 1

    monkeypatch.setattr(sys, "platform", "win32")
    kernel = SimpleNamespace(GetSystemCpuSetInformation=ask)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)
    assert efficiency_classes() == {0: 1, 1: 1, 2: 0, 3: 0}


def test_other_systems_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd14")
    assert arm_features() == frozenset()
    assert efficiency_classes() == {}
