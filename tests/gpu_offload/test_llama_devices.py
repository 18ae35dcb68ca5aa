"""Devices as ggml reports them, and what a user reads when llama.cpp is not there."""

import logging
import subprocess
import sys

import psutil
import pytest

from gpu_offload import devices as devices_module
from gpu_offload import library
from gpu_offload.devices import DeviceKind, devices, gpus
from gpu_offload.errors import LlamaCppMissingError, install_command
from localllm.errors import LocalLLMError
from tests.oracle import llama_oracle


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_the_processor_is_a_device_with_the_machines_memory():
    processor = next(device for device in devices() if device.kind is DeviceKind.CPU)
    assert processor.backend == "CPU"
    assert processor.description
    assert processor.total_bytes == pytest.approx(psutil.virtual_memory().total, rel=0.01)
    assert 0 < processor.free_bytes <= processor.total_bytes


@pytest.mark.oracle
@llama_oracle.needs_llama
def test_gpus_exist_only_where_the_build_offloads():
    if gpus():
        assert llama_oracle.api().llama_supports_gpu_offload()
        assert all(gpu.total_bytes > 0 for gpu in gpus())


@llama_oracle.needs_llama
def test_devices_are_found_without_importing_the_package():
    """Which costs a third of a second at every start, also where the processor alone computes."""
    script = "import sys; from gpu_offload.devices import devices; print(len(devices()), 'llama_cpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(devices())), "False"]
    assert done.stderr == ""


def test_integrated_gpus_count_only_alone(monkeypatch):
    def device(name: str, kind: DeviceKind) -> devices_module.Device:
        return devices_module.Device(name, name, "Vulkan", kind, 8, 4)

    processor = device("cpu", DeviceKind.CPU)
    shared, own = device("shared", DeviceKind.INTEGRATED_GPU), device("own", DeviceKind.GPU)
    for found, expected in [([processor], []), ([processor, shared], [shared]), ([shared, own, processor], [own])]:
        monkeypatch.setattr(devices_module, "devices", lambda found=found: found)
        assert gpus() == expected


def clear() -> None:
    for cached in (library.llama, library.ggml, devices_module._registry, devices_module._base):
        cached.cache_clear()


@pytest.fixture
def without_llama_cpp(monkeypatch):
    """An interpreter in which llama_cpp is not installed."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    clear()
    yield
    clear()


@pytest.mark.parametrize(
    ("platform", "words"),
    [
        (
            "linux",
            [
                "extra-index-url",
                "/cu124",
                'CMAKE_ARGS="-DGGML_CUDA=on"',
                'CMAKE_ARGS="-DGGML_VULKAN=on"',
                'CMAKE_ARGS="-DGGML_HIP=on"',
            ],
        ),
        (
            "win32",
            [
                "/cu124",
                '$env:CMAKE_ARGS="-DGGML_CUDA=on"; pip install',
                '$env:CMAKE_ARGS="-DGGML_VULKAN=on"; pip install',
            ],
        ),
        ("darwin", ["pip install", "/cpu"]),
    ],
)
def test_without_the_extra_the_error_says_how_to_install_it(without_llama_cpp, monkeypatch, platform, words):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(LlamaCppMissingError) as caught:
        devices()
    assert isinstance(caught.value, LocalLLMError)
    assert all(word in str(caught.value) for word in words)


def test_apple_silicon_is_told_of_metal(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert install_command("metal") in str(LlamaCppMissingError("no reason"))


def test_a_cache_beyond_the_trained_context_is_no_warning(caplog):
    log = library._Log()
    with caplog.at_level(logging.DEBUG):
        log.take(3, b"n_ctx_seq (4096) > n_ctx_train (128) -- possible training context overflow\n", None)
        log.take(3, b"something else\n", None)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.WARNING]
    assert log.complaints == ["something else"]
