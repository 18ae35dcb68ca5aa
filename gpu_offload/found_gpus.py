"""Finds this machine's GPUs without llama.cpp: by NVIDIA's driver, Apple's Metal or the Vulkan loader.

Drivers are asked in child processes, because a broken one may crash or hang.
"""

import ctypes
import json
import re
import shutil
import subprocess
import sys

from gguf_io.system import run_within
from gpu_offload.builds import FoundGpu, has_metal

_ASK_S = 30
_ASK_VULKAN = """
import sys
sys.path[:] = sys.argv[1:]
from gpu_offload.found_gpus import print_vulkan_devices
print_vulkan_devices()
"""
_NVIDIA = re.compile(r"(?P<name>.+), (?P<major>\d{1,3})\.(?P<minor>\d{1,3}), (?P<driver>\d{1,5})[.\d]*")
_GPUS = {1, 2, 3}  # VkPhysicalDeviceType: integrated, discrete, virtual; 4 is a processor
_SIZE = 4096  # bytes, more than a VkPhysicalDeviceProperties has
_MOST_DEVICES = 64


def found_gpus() -> list[FoundGpu]:
    """The GPUs of this machine, those of NVIDIA's driver if there are any; empty without a GPU or a driver."""
    if has_metal():
        return [FoundGpu("Apple GPU", "Metal")]
    return nvidia() or vulkan()


def nvidia() -> list[FoundGpu]:
    """The GPUs that nvidia-smi lists."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    lines = _output([program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]).splitlines()
    return [
        FoundGpu(row["name"].strip(), "CUDA", (int(row["major"]), int(row["minor"])), int(row["driver"]))
        for row in map(_NVIDIA.fullmatch, map(str.strip, lines))
        if row
    ]


def vulkan() -> list[FoundGpu]:
    """The GPUs that the Vulkan loader lists, asked in a child process, which its drivers may end."""
    try:
        names = json.loads(_output([sys.executable, "-I", "-c", _ASK_VULKAN, *sys.path]))
    except ValueError:  # it crashed
        return []
    return [FoundGpu(str(name), "Vulkan") for name in names]


def _output(command: list[str]) -> str:
    """What a program prints; nothing if it fails."""
    try:
        done = run_within(_ASK_S, command)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def print_vulkan_devices() -> None:
    """Print the names of the GPUs that the Vulkan loader reports, as JSON. For the child process."""
    sys.stdout.write(json.dumps(_vulkan_names()))


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


def _vulkan_names() -> list[str]:
    try:
        vulkan = ctypes.CDLL("vulkan-1.dll" if sys.platform == "win32" else "libvulkan.so.1")
    except OSError:
        return []
    instance = ctypes.c_void_p()
    info = _InstanceInfo(type=1)  # VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO
    if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)):
        return []
    count, devices = ctypes.c_uint32(_MOST_DEVICES), (ctypes.c_void_p * _MOST_DEVICES)()
    if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices) < 0:
        return []
    names = []
    for device in devices[: count.value]:
        properties = ctypes.create_string_buffer(_SIZE)
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(device), properties)
        # VkPhysicalDeviceProperties: five numbers, of which the last is the type, and a name of 256 bytes.
        if int.from_bytes(properties.raw[16:20], sys.byteorder) in _GPUS:
            names.append(properties.raw[20:276].split(b"\0")[0].decode("utf-8", "replace"))
    return names
