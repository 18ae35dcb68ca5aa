"""The devices that the installed llama.cpp can compute on, as its ggml backends report them."""

import ctypes
import functools
from dataclasses import dataclass
from enum import StrEnum

from gpu_offload.library import ggml, log_callback


class DeviceKind(StrEnum):
    """What a device is, after ggml_backend_dev_type. Integrated GPUs share the machine's memory."""

    CPU = "cpu"
    GPU = "gpu"
    INTEGRATED_GPU = "integrated gpu"
    ACCELERATOR = "accelerator"
    OTHER = "other"


# The backend of devices on other machines.
WORKER = "RPC"

_KINDS = (DeviceKind.CPU, DeviceKind.GPU, DeviceKind.INTEGRATED_GPU, DeviceKind.ACCELERATOR)


@dataclass(frozen=True, slots=True)
class Device:
    """One device. backend is ggml's word ("CUDA", "ROCm", "Metal", "Vulkan", "SYCL", "CPU"), or "RPC" for a
    worker on another machine; memory is in bytes.

    free_bytes is a moment's figure: other programs, the desktop among them, share it.
    """

    name: str
    description: str
    backend: str
    kind: DeviceKind
    total_bytes: int
    free_bytes: int


def devices() -> list[Device]:
    """Return every device, in llama.cpp's order. Raises LlamaCppMissingError without the llama extra."""
    registry = _registry()
    count = registry.ggml_backend_dev_count()
    return [_device(registry.ggml_backend_dev_get(index)) for index in range(count)]


def gpus() -> list[Device]:
    """Return the devices worth giving layers to, as main_gpu and tensor_split number them; empty where there is none.

    Those of workers come first; integrated GPUs count only where this machine has no other, as llama.cpp has it.
    """
    found = devices()
    workers = [device for device in found if device.kind is DeviceKind.GPU and device.backend == WORKER]
    own = [device for device in found if device.kind is DeviceKind.GPU and device.backend != WORKER]
    integrated = [device for device in found if device.kind is DeviceKind.INTEGRATED_GPU]
    # Of two backends that were built in, both see the same one.
    return workers + (own or [device for device in integrated if device.backend == integrated[0].backend])


def device_handle(device: Device) -> int:
    """Return ggml's own handle of a device (ggml_backend_dev_t), an address."""
    return int(_registry().ggml_backend_dev_by_name(device.name.encode()))


def _device(handle: int) -> Device:
    base = _base()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    base.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
    number = base.ggml_backend_dev_type(handle)
    backend = base.ggml_backend_reg_name(base.ggml_backend_dev_backend_reg(handle))
    description = base.ggml_backend_dev_description(handle).decode().strip()
    return Device(
        name=base.ggml_backend_dev_name(handle).decode(),
        description=f"worker {description}" if backend == WORKER.encode() else description,
        backend="Metal" if backend == b"MTL" else backend.decode(),
        kind=_KINDS[number] if number < len(_KINDS) else DeviceKind.OTHER,
        total_bytes=total.value,
        free_bytes=free.value,
    )


@functools.cache
def _registry() -> ctypes.CDLL:
    _base()  # what GPUs say while they are looked for goes to the log
    library = ggml("ggml")
    library.ggml_backend_dev_count.restype = ctypes.c_size_t
    library.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    library.ggml_backend_dev_get.restype = ctypes.c_void_p
    library.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    library.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    return library


@functools.cache
def _base() -> ctypes.CDLL:
    library = ggml("ggml-base")
    library.ggml_log_set.argtypes = [type(log_callback()), ctypes.c_void_p]
    library.ggml_log_set.restype = None
    library.ggml_log_set(log_callback(), None)
    for name in ("ggml_backend_dev_name", "ggml_backend_dev_description", "ggml_backend_reg_name"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    library.ggml_backend_dev_type.argtypes = [ctypes.c_void_p]
    library.ggml_backend_dev_type.restype = ctypes.c_int
    library.ggml_backend_dev_backend_reg.argtypes = [ctypes.c_void_p]
    library.ggml_backend_dev_backend_reg.restype = ctypes.c_void_p
    size_p = ctypes.POINTER(ctypes.c_size_t)
    library.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, size_p, size_p]
    library.ggml_backend_dev_memory.restype = None
    return library
