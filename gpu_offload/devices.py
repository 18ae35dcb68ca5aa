"""The devices that the installed llama.cpp can compute on, as ggml's backends report them."""

from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from enum import StrEnum

from gpu_offload.library import ggml


class DeviceKind(StrEnum):
    """Kinds of devices, as in ggml_backend_dev_type. Integrated GPUs share the machine's memory."""

    CPU = "cpu"
    GPU = "gpu"
    INTEGRATED_GPU = "integrated gpu"
    ACCELERATOR = "accelerator"
    OTHER = "other"


WORKER = "RPC"  # the backend of devices on other machines

_KINDS = (DeviceKind.CPU, DeviceKind.GPU, DeviceKind.INTEGRATED_GPU, DeviceKind.ACCELERATOR)


@dataclass(frozen=True, slots=True)
class Device:
    """One device. backend is ggml's name ("CUDA", "ROCm", "Metal", "Vulkan", "SYCL", "CPU"), "RPC" for a worker on
    another machine, "" for a device that is not in this machine; memory is in bytes.

    free_bytes changes all the time: other programs, such as the desktop, share the memory.
    """

    name: str
    description: str
    backend: str
    kind: DeviceKind
    total_bytes: int
    free_bytes: int

    @property
    def label(self) -> str:
        """The display name."""
        return self.description or self.name


def devices() -> list[Device]:
    """Return every device, in llama.cpp's order. Raises LlamaCppMissingError without the llama extra."""
    get = ggml("ggml_backend_dev_get", c_void_p, c_size_t)
    return [_device(get(index)) for index in range(ggml("ggml_backend_dev_count", c_size_t)())]


def gpus() -> list[Device]:
    """Return the devices that can hold layers, in the order in which main_gpu and tensor_split number them.

    Workers come first; integrated GPUs count only if this machine has no other, as in llama.cpp.
    """
    workers, own, integrated = list[Device](), list[Device](), list[Device]()
    for device in devices():
        if device.kind is DeviceKind.GPU:
            (workers if device.backend == WORKER else own).append(device)
        # If two backends are built in, both see the same integrated GPU.
        elif device.kind is DeviceKind.INTEGRATED_GPU and (not integrated or device.backend == integrated[0].backend):
            integrated.append(device)
    return workers + (own or integrated)


def device_handle(device: Device) -> int:
    """Return ggml's own handle of a device (ggml_backend_dev_t), an address."""
    return int(ggml("ggml_backend_dev_by_name", c_void_p, c_char_p)(device.name.encode()))


def device_name(handle: int) -> str:
    name: bytes = ggml("ggml_backend_dev_name", c_char_p, c_void_p)(handle)
    return name.decode()


def device_kind(handle: int) -> DeviceKind:
    number = ggml("ggml_backend_dev_type", c_int, c_void_p)(handle)
    return _KINDS[number] if number < len(_KINDS) else DeviceKind.OTHER


def _device(handle: int) -> Device:
    free, total, size_p = c_size_t(), c_size_t(), POINTER(c_size_t)
    ggml("ggml_backend_dev_memory", None, c_void_p, size_p, size_p)(handle, free, total)
    registry = ggml("ggml_backend_dev_backend_reg", c_void_p, c_void_p)(handle)
    backend = ggml("ggml_backend_reg_name", c_char_p, c_void_p)(registry).decode()
    description = ggml("ggml_backend_dev_description", c_char_p, c_void_p)(handle).decode().strip()
    return Device(
        name=device_name(handle),
        description=f"worker {description}" if backend == WORKER else description,
        backend="Metal" if backend == "MTL" else backend,
        kind=device_kind(handle),
        total_bytes=total.value,
        free_bytes=free.value,
    )
