"""`localllm gpu install`, from a local index into a throwaway environment, never into the one that runs the tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest

from gpu_offload import builds, found_gpus
from gpu_offload.builds import BUILDS, VERSION, FoundGpu, build_for, compile_command
from localllm import doctor, gpu_install, gpu_trial
from localllm.cli.main import main
from localllm.doctor import State
from localllm.errors import RequestError
from localllm.library.web import new_client
from tests.localllm.library.model_server import Answer
from tests.localllm.throwaway import OLD, Environment, Index, installed_files, wheel
from tests.oracle import llama_oracle

CPU = BUILDS[-1]
H100 = FoundGpu("NVIDIA H100", "CUDA", (9, 0), 580)


@pytest.fixture
def index() -> Iterator[Index]:
    with Index().running() as server:
        assert isinstance(server, Index)
        yield server


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """With an old llama-cpp-python that pip installed. Tests leave it as it was."""
    made = Environment(tmp_path_factory.mktemp("environment") / "venv")
    name, data = wheel(OLD, "0.3.35")
    (path := made.site.parent / name).write_bytes(data)
    made.pip_install(path)
    path.unlink()
    return made


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """One sentence on stderr and exit status 2."""
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr, done.stderr


@llama_oracle.needs_llama
@pytest.mark.slow
def test_a_wheel_that_computes_what_the_cpu_engine_does_replaces_the_old_one(tmp_path: Path, index: Index) -> None:
    here = distribution("llama-cpp-python").files
    index.offer(*wheel(installed_files()))
    made = Environment(tmp_path / "venv")
    name, data = wheel(OLD, "0.3.35")
    (tmp_path / name).write_bytes(data)
    made.pip_install(tmp_path / name)
    done = made.install("--build", "cpu", "--gpu-index", index.url)
    assert done.returncode == 0, done.stderr
    assert "Installed the build cpu" in done.stdout and "On the processor, 25 tokens" in done.stdout
    assert (made.site / f"llama_cpp_python-{VERSION}.dist-info").is_dir()
    assert (
        not (made.site / "llama_cpp_python-0.3.35.dist-info").exists()
        and not (made.site / "llama_cpp/gone.py").exists()
    )
    assert not [*made.site.glob(".localllm-*")] and distribution("llama-cpp-python").files == here


BROKEN = {
    "crashes": (b"import os\nos.abort()\n", "ended with signal 6 when it was tried"),
    "raises": (b"raise RuntimeError('no driver')\n", "does not run here: its library does not load: no driver"),
    "lacks its library": (b"import ctypes\nctypes.CDLL('libcudart.so.99')\n", "libcudart.so.99"),
    "is no binding": (b"", "failed (AttributeError: "),
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("kind", BROKEN)
def test_a_wheel_that_does_not_run_changes_nothing(environment: Environment, index: Index, kind: str) -> None:
    code, words = BROKEN[kind]
    index.offer(*wheel({"llama_cpp/__init__.py": b"", "llama_cpp/llama_cpp.py": code, "llama_cpp/new.py": b""}))
    before = environment.state()
    done = environment.install("--build", "cpu", "--gpu-index", index.url)
    refused(done, words)
    assert "unchanged" in done.stderr and environment.state() == before


@pytest.mark.parametrize("stated", ["index", "flag"])
def test_a_wheel_with_another_hash_is_not_even_unpacked(environment: Environment, index: Index, stated: str) -> None:
    wrong = "0123456789abcdef" * 4
    index.offer(*wheel({"llama_cpp/__init__.py": b""}), sha256=wrong if stated == "index" else None)
    flags = ["--sha256", wrong] if stated == "flag" else []
    before = environment.state()
    refused(environment.install("--build", "vulkan", "--gpu-index", index.url, *flags), f"not {wrong}: it is damaged")
    assert environment.state() == before


def test_a_disk_that_is_full_while_the_wheel_arrives_is_one_sentence(environment: Environment, index: Index) -> None:
    index.offer(*wheel({"llama_cpp/__init__.py": b""}))
    before = environment.state()
    refused(
        environment.install("--build", "cpu", "--gpu-index", index.url, TEST_FULL="download"), "is full. Nothing was"
    )
    assert environment.state() == before


def test_a_disk_without_room_for_the_unpacked_wheel_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, data = wheel({"llama_cpp/big": bytes(1 << 20)})
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2 << 20})())
    with pytest.raises(RequestError, match=r"0\.0 GiB free, and installing llama_cpp_python.* Nothing was changed"):
        gpu_install.check_space(tmp_path / name, tmp_path)


@pytest.mark.parametrize("old", [True, False])
def test_what_pip_leaves_half_done_is_put_back(tmp_path: Path, index: Index, old: bool) -> None:
    """The disk is full in the middle of pip's own installation: files it has written go, those it removed come back."""
    made = Environment(tmp_path / "venv")
    if old:
        name, data = wheel(OLD, "0.3.35")
        (tmp_path / name).write_bytes(data)
        made.pip_install(tmp_path / name)
    # Newer versions of pip copy nothing for an empty file, so the last one is not empty.
    index.offer(*wheel({"llama_cpp/__init__.py": b"NEW\n", "llama_cpp/a/new.py": b"", "llama_cpp/z/last.py": b"1\n"}))
    before = made.state()
    # The trial is the child's; this wheel cannot pass it.
    code = (
        "from localllm import gpu_install\n"
        "gpu_install.trial = lambda *_: 'fine'\n"
        "from localllm.__main__ import main\nmain()\n"
    )
    done = subprocess.run(
        [str(made.python), "-B", "-c", code, "gpu", "install", "--build", "cpu", "--gpu-index", index.url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TEST_FULL": "install"},
    )
    refused(done, "No space left on device. Nothing was changed.")
    assert made.state() == before


def test_without_a_network_it_is_one_sentence(environment: Environment) -> None:
    before = environment.state()
    done = environment.install("--build", "cpu", "--gpu-index", "http://127.0.0.1:9")
    refused(done, "127.0.0.1 cannot be reached")
    assert "Nothing was changed" in done.stderr and environment.state() == before


def test_a_connection_that_breaks_off_is_one_sentence(environment: Environment, index: Index) -> None:
    def cut(path: str, answer: Answer) -> None:
        if path.endswith(".whl"):
            answer.cut_after = 10

    index.offer(*wheel({"llama_cpp/__init__.py": b""}))
    index.faults.append(cut)
    refused(environment.install("--build", "cpu", "--gpu-index", index.url), "Nothing was changed")


@pytest.mark.parametrize("installer", ["conda", "uv", ""])
def test_what_pip_did_not_install_is_left_alone(tmp_path: Path, index: Index, installer: str) -> None:
    made = Environment(tmp_path / "venv")
    name, data = wheel(OLD, "0.3.35")
    (tmp_path / name).write_bytes(data)
    made.pip_install(tmp_path / name)
    (made.site / "llama_cpp_python-0.3.35.dist-info" / "INSTALLER").write_text(f"{installer}\n", encoding="utf-8")
    index.offer(*wheel({"llama_cpp/__init__.py": b""}))
    before = made.state()
    refused(
        made.install("--build", "cpu", "--gpu-index", index.url), f"was installed by {installer or 'something other'}"
    )
    assert made.state() == before and index.requests == []


def test_missing_pip_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_install, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match="has no pip"):
        gpu_install.own_folder()


def test_a_library_named_by_a_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/elsewhere")
    with pytest.raises(RequestError, match="LLAMA_CPP_LIB_PATH"):
        gpu_install.own_folder()


@pytest.mark.parametrize(
    ("capability", "driver", "name"),
    [
        ((12, 0), 590, "cu130"),
        ((9, 0), 580, "cu130"),
        ((7, 5), 580, "cu130"),
        ((7, 0), 580, "cu124"),
        ((9, 0), 550, "cu124"),
        ((6, 1), 470, "cu118"),
        ((9, 0), 470, None),
        ((5, 2), 580, None),
        ((8, 6), 390, None),
    ],
)
def test_the_build_follows_capability_and_driver(capability: tuple[int, int], driver: int, name: str | None) -> None:
    chosen = build_for([FoundGpu("G", "CUDA", capability, driver)])
    assert (chosen and chosen.name) == name


def test_one_build_must_fit_all_gpus_of_a_kind() -> None:
    old, new = FoundGpu("P100", "CUDA", (6, 0), 580), FoundGpu("H100", "CUDA", (9, 0), 580)
    chosen = build_for([new, old])
    assert chosen is not None and chosen.name == "cu124"
    assert "-DCMAKE_CUDA_ARCHITECTURES=60;90" in compile_command("CUDA", [new, old])
    for kind in ("Vulkan", "Metal"):
        chosen = build_for([FoundGpu("G", kind)])
        assert chosen is not None and chosen.name == kind.lower()
    assert build_for([]) is None


def test_only_wheels_for_this_system_and_version_count(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        f"llama_cpp_python-{VERSION}-py3-none-win_arm64.whl",
        f"llama_cpp_python-{VERSION}-cp27-none-any.whl",
        "llama_cpp_python-0.3.99-py3-none-any.whl",
        f"llama_cpp_other-{VERSION}-py3-none-any.whl",
        "not a wheel.whl",
    ]
    page = "".join(f'<a href="/{name}">{name}</a>' for name in names)
    index.routes["/llama-cpp-python/"] = page.encode()
    with new_client() as client:
        with pytest.raises(RequestError) as caught:
            gpu_install.find_wheel(client, BUILDS[0], [H100], index.url, None)
        assert "'-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=90'" in str(caught.value)
        assert "install --no-cache-dir --no-binary llama-cpp-python --force-reinstall" in str(caught.value)
        index.routes["/llama-cpp-python/"] += (
            '<a href="http://[x">malformed</a>'
            f'<a href="x/llama_cpp_python-{VERSION}%2Bcu130-py3-none-any.whl">'.encode()
        )
        found = gpu_install.find_wheel(client, BUILDS[0], [H100], index.url, None)
    assert found.url == f"{index.url}/llama-cpp-python/x/llama_cpp_python-{VERSION}%2Bcu130-py3-none-any.whl"
    assert found.sha256 is None


def test_the_packages_own_index_needs_a_known_hash(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages state none; one that they would state is not enough."""
    name, data = wheel({"llama_cpp/__init__.py": b""})
    index.offer(name, data)
    for path in [*index.routes]:
        index.routes[f"/cu130{path}"] = index.routes[path]
    monkeypatch.setattr(gpu_install, "INDEXES", index.url)
    with new_client() as client:
        with pytest.raises(
            RequestError, match=r"does not know the SHA-256 of .*/v0\.3\.36-cu130 shows it: .*--sha256 HASH"
        ):
            gpu_install.find_wheel(client, BUILDS[0], [H100], None, None)
        assert gpu_install.find_wheel(client, BUILDS[0], [H100], None, "AB" * 32).sha256 == "ab" * 32
        monkeypatch.setitem(builds.SHA256, ("cu130", name), "cd" * 32)
        assert gpu_install.find_wheel(client, BUILDS[0], [H100], None, None).sha256 == "cd" * 32


def test_pinned_hashes_are_hashes_of_wheels_of_builds() -> None:
    names = {build.name for build in BUILDS}
    for (build, file), sha256 in builds.SHA256.items():
        assert build in names and f"-{VERSION}-" in file and len(bytes.fromhex(sha256)) == 32


def fake_driver(folder: Path, text: str, code: int = 0) -> Path:
    """A folder with an nvidia-smi that prints this."""
    folder.mkdir(exist_ok=True)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n", encoding="utf-8")
    program.chmod(0o755)
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("NVIDIA H100 80GB HBM3, 9.0, 580.65.06", 0, [FoundGpu("NVIDIA H100 80GB HBM3", "CUDA", (9, 0), 580)]),
        (
            "RTX A, with a comma, 8.6, 535.104\nTesla P4, 6.1, 535.104",
            0,
            [FoundGpu("RTX A, with a comma", "CUDA", (8, 6), 535), FoundGpu("Tesla P4", "CUDA", (6, 1), 535)],
        ),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, []),
        ("No devices were found", 0, []),
        ("GPU, [N/A], [N/A]", 0, []),
    ],
)
def test_gpus_of_nvidias_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int, expected: list[FoundGpu]
) -> None:
    monkeypatch.setenv("PATH", f"{fake_driver(tmp_path, text, code)}{os.pathsep}{os.environ['PATH']}")
    assert found_gpus.nvidia() == expected


def test_gpus_of_vulkan_are_asked_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (('["AMD Radeon"]', [FoundGpu("AMD Radeon", "Vulkan")]), ("", []), ("[]", [])):
        monkeypatch.setattr(found_gpus, "_output", lambda _command, said=said: said)
        assert found_gpus.vulkan() == expected
    monkeypatch.undo()
    assert all(gpu.kind == "Vulkan" for gpu in found_gpus.vulkan())


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_doctor_names_the_command_for_an_idle_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", list)
    driver = fake_driver(tmp_path, "NVIDIA H100 80GB HBM3, 9.0, 580.65.06")
    monkeypatch.setenv("PATH", f"{driver}{os.pathsep}{os.environ['PATH']}")
    found = doctor.check_gpu()
    assert found.state is State.ADVICE and found.advice == "Run: localllm gpu install"
    assert "NVIDIA H100 80GB HBM3 (compute capability 9.0, driver 580) lies idle" in found.found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["install"], "No GPU was found"),
        ([], "No GPU was found"),
        (["remove"], "has no action 'remove'"),
        (["install", "--build", "cu999"], "There is no build 'cu999'. Choose from: cu130"),
        (["install", "--build", "cpu", "--gpu-index", "ftp://host"], "'ftp://host' is not an address that begins with"),
        (["install", "--build", "cpu", "--sha256", "12"], "--sha256 must be the 64 hexadecimal digits"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    monkeypatch.setattr("gpu_offload.found_gpus.found_gpus", list)
    monkeypatch.setattr("sys.argv", ["localllm", "gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1 and words in err, err


def test_gpus_and_their_build_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gpu_offload.found_gpus.found_gpus", lambda: [H100])
    monkeypatch.setattr("sys.argv", ["localllm", "gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert not ended.value.code and out.startswith("NVIDIA H100 (compute") and "installs the build cu130" in err


def test_a_gpu_that_no_wheel_supports_is_compiled_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpu_offload.found_gpus.found_gpus", lambda: [FoundGpu("GTX 980", "CUDA", (5, 2), 580)])
    monkeypatch.setattr("sys.argv", ["localllm", "gpu", "install"])
    with pytest.raises(SystemExit):
        main()
    assert "-DCMAKE_CUDA_ARCHITECTURES=52" in capsys.readouterr().err


def test_another_token_counts_unless_it_is_a_near_tie() -> None:
    expected = np.array([[5, 4.9, 0, -5], [5, 0, -1, -5], [1, 2, 3, 4]], np.float32)
    assert gpu_trial.wrong_rows(expected, expected) == 0
    assert gpu_trial.wrong_rows(expected[:, [1, 0, 2, 3]], expected) == 1  # the first row's two are nearly equal
    assert gpu_trial.wrong_rows(expected[:, ::-1], expected) == 3
    unusable = expected.copy()
    unusable[1, 3] = np.nan
    assert gpu_trial.wrong_rows(unusable, expected) == 1
