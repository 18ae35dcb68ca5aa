"""Devices as ggml reports them, and the messages if llama.cpp is not installed."""

import logging
import os
import shutil
import subprocess
import sys
from ctypes import c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gguf_io.system import shell_line
from gpu_offload import devices as devices_module
from gpu_offload import library
from gpu_offload.builds import compile_command
from gpu_offload.devices import DeviceKind, devices, gpus
from gpu_offload.errors import LlamaCppMemoryError, LlamaCppMissingError
from localllm.errors import LocalLLMError
from tests.oracle import llama_oracle

ERROR = 4  # GGML_LOG_LEVEL_ERROR


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
    """It takes a third of a second at every start, even if only the CPU computes."""
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


def test_an_integrated_gpu_counts_once_where_two_backends_see_it(monkeypatch):
    seen = [
        devices_module.Device(name, "the same", backend, DeviceKind.INTEGRATED_GPU, 8, 4)
        for name, backend in (("SYCL0", "SYCL"), ("Vulkan0", "Vulkan"))
    ]
    monkeypatch.setattr(devices_module, "devices", lambda: seen)
    assert gpus() == seen[:1]


@llama_oracle.needs_llama
def test_a_device_has_llama_cpps_own_handle():
    found = devices()[0]
    assert devices_module.device_handle(found) == library.ggml("ggml_backend_dev_get", c_void_p, c_size_t)(0)


def clear() -> None:
    for cached in (library.llama, library.ggml, library.shared_library):
        cached.cache_clear()


@pytest.fixture
def without_llama_cpp(monkeypatch):
    """An interpreter without llama_cpp."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    clear()
    yield
    clear()


@pytest.fixture
def pip_on_path(monkeypatch):
    """The first pip on the path is this Python's."""
    beside = str(Path(sys.executable).with_name("pip"))
    monkeypatch.setattr("shutil.which", lambda _: beside)


def test_without_the_extra_the_error_says_how_to_install_it(without_llama_cpp, pip_on_path):
    with pytest.raises(LlamaCppMissingError) as caught:
        devices()
    assert isinstance(caught.value, LocalLLMError)
    assert "`localllm gpu install`" in str(caught.value)
    assert "pip install --prefer-binary --extra-index-url" in str(caught.value) and "/cpu '" in str(caught.value)


def test_what_is_installed_for_another_device_is_compiled_anew(pip_on_path):
    """If a requirement is already satisfied, pip would do nothing; its cache may hold a wheel for another device."""
    command = compile_command("RPC", version="0.3.40")
    assert command.startswith(shell_line(["pip", "install", "--no-cache-dir"], {"CMAKE_ARGS": "-DGGML_RPC=on"}))
    assert "--force-reinstall --no-deps" in command
    assert "llama-cpp-python==0.3.40" in command


def test_a_binding_that_is_too_old_is_refused(monkeypatch):
    llama_cpp = pytest.importorskip("llama_cpp.llama_cpp")
    monkeypatch.setattr(llama_cpp, "llama_context_params", object)
    library.llama.cache_clear()
    with pytest.raises(LlamaCppMissingError, match=r"too old, 0\.3\.36 is needed"):
        library.llama()


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (3, "n_ctx_seq (4096) > n_ctx_train (128) -- possible training context overflow"),
        (3, "resolve_fused_ops: Flash Attention not supported, set to disabled"),
        (3, "resolve_fused_ops: fused Gated Delta Net (chunked) not supported, set to disabled"),
        (4, "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected"),
        (4, "ggml_cuda_init: failed to initialize ROCm: no ROCm-capable device is detected"),
        (3, "ggml_vulkan: No devices found."),
        (3, "load: control-looking token:    212 '</s>' was not control-type; this is probably a bug in the model."),
        (3, "llama_kv_cache_iswa: using full-size SWA cache (ref: https://github.com/ggml-org/llama.cpp/pull/13194)"),
    ],
)
def test_messages_meaningless_to_users_are_not_warnings(caplog, kind, line):
    log = library._Log()
    with caplog.at_level(logging.DEBUG):
        log.take(kind, f"{line}\n".encode(), None)
        log.take(3, b"something else\n", None)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.WARNING]
    assert log.complaints == ["something else"]


@llama_oracle.needs_llama
@pytest.mark.parametrize(
    ("line", "is_memory"),
    [
        ("alloc_tensor_range: failed to allocate CUDA0 buffer of size 9", True),
        ("llama_model_load: error loading model: unable to allocate CUDA0 buffer", True),
        ("ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory", True),
        ("llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", True),
        ("llama_model_load: error loading model: unknown model architecture: 'lambo'", False),
    ],
)
def test_a_full_device_is_distinguished_from_other_failures(line, is_memory):
    library.route_log()
    library.LOG_CALLBACK(ERROR, f"{line}\n".encode(), None)
    found = library.failure("it cannot load")
    assert isinstance(found, LlamaCppMemoryError) is is_memory
    assert line in str(found)


def wrong_library(folder: Path, start: str) -> Path:
    """A folder with libraries whose loading runs this C statement."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = folder / "wrong.c"
    source.write_text(
        f"#include <signal.h>\n#include <unistd.h>\n__attribute__((constructor)) void f(void) {{ {start} }}"
    )
    for name in ("ggml-base", "ggml", "ggml-cpu", "llama"):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / f"lib{name}.so", source], check=True)
    return folder


ASK = """
import sys
from localllm.placement.backends import automatic_choice, llama_is_here
from localllm.doctor import check_gpu
from localllm.settings import Settings
print(automatic_choice(Settings(), lambda: ""))
print(check_gpu().found)
print(llama_is_here())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="compiles a library for Linux")
@pytest.mark.parametrize("signal_name", ["SIGILL", "SIGSEGV"])
def test_a_library_for_another_processor_is_not_loaded(tmp_path: Path, signal_name: str) -> None:
    """Neither the native engine nor doctor ends with it; it counts as missing, with the reason."""
    pytest.importorskip("llama_cpp")
    folder = wrong_library(tmp_path, f"raise({signal_name});")
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder), "LOCALLLM_KERNEL_CACHE": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, env=environment, check=False)
    reason = f"its library crashes on this processor: {signal_name}"
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            f"native: llama.cpp is not available: {reason}",
            f"none; llama.cpp is not available ({reason}); the CPU engine is used",
            "False",
        ],
    ), done.stderr


def test_a_library_that_ran_is_not_tried_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, bytes] = {}
    codes = [0, -4, -4]
    monkeypatch.setattr("cpu_kernels.kernel_cache.read_measured", kept.get)
    monkeypatch.setattr("cpu_kernels.kernel_cache.write_measured", kept.__setitem__)
    monkeypatch.setattr(library, "run_within", lambda *_, **__: SimpleNamespace(returncode=codes.pop(0)))
    fault = library._fault.__wrapped__
    (tmp_path / "libggml.so").write_bytes(b"one")
    assert fault(tmp_path) == "" and len(codes) == 2
    assert fault(tmp_path) == "" and len(codes) == 2
    (tmp_path / "libggml.so").write_bytes(b"another")
    assert "SIGILL" in fault(tmp_path) and len(codes) == 1
    assert "SIGILL" in fault(tmp_path) and codes == []  # a crash is not stored: a new driver may mend it
