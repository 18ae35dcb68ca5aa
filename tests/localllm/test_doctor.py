import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_io.system import disk_bytes
from gpu_offload.errors import LlamaCppMissingError
from localllm import doctor
from localllm.doctor import State
from localllm.settings import setting_sources
from localllm.stored import size_of
from tests.systems import use_own_places


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_own_places(tmp_path, monkeypatch)
    for variable in ("OLLAMA_MODELS", "HF_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    from localllm.cli.main import main

    def call(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["localllm", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def test_each_setting_has_a_source(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("top_k = 5\nthreads = 2\n")
    found = setting_sources({"LOCALLLM_THREADS": "3"}, file)
    assert found["top_k"] == (5, str(file))
    assert found["threads"] == (3, "LOCALLLM_THREADS")
    assert found["ctx"] == (None, "default")


def test_config_shows_values_and_sources(
    home: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_TOP_K", "7")
    monkeypatch.setenv("LOCALLLM_API_KEY", "very-secret-key")
    assert command("config", "--json") == 0
    out = capsys.readouterr().out
    assert "very-secret" not in out
    found = json.loads(out)
    assert found["top_k"] == {"value": 7, "source": "LOCALLLM_TOP_K"}
    assert found["seed"] == {"value": None, "source": "default"}
    assert command("config") == 0
    out, err = capsys.readouterr()
    assert "very-secret" not in out
    assert ["top_k", "7", "LOCALLLM_TOP_K"] in [line.split() for line in out.splitlines()]
    assert "config.toml" in err


def test_doctor_looks_at_everything_and_makes_nothing(
    home: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OLLAMA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    before = set(home.rglob("*"))
    assert command("doctor", "--json") == 0
    found = {check["what"]: check for check in json.loads(capsys.readouterr().out)}
    assert {
        "Python",
        "processor",
        "memory",
        "GPU",
        "models",
        "kernels",
        "KV cache",
        "settings",
        "disk",
        "network",
    } <= set(found)
    assert found["network"]["state"] == "advice"
    assert found["models found"]["found"] == "none"
    made = {path for path in set(home.rglob("*")) - before if "kernels" not in path.parts and path.name != "localllm"}
    assert made == set()


def test_wrong_settings_do_not_stop_what_finds_them(
    home: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OLLAMA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (home / "localllm").mkdir(parents=True)
    (home / "localllm/config.toml").write_text("temprature = 1\ntop_k = 5\n")
    assert command("doctor", "--json") == 2
    found = {check["what"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["settings"]["state"] == "bad" and "Did you mean temperature?" in found["settings"]["found"]
    assert found["models"]["state"] == "good"
    assert command("config", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["top_k"]["value"] == 5
    assert "Did you mean temperature?" in err
    assert command("list") == 2  # every other command refuses them


def test_without_a_gpu_it_says_only_how_the_processors_llama_cpp_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "found_gpus", list)
    monkeypatch.setattr(doctor, "gpus", list)
    assert doctor.check_gpu() == doctor.Check("GPU", State.GOOD, "none")

    def missing() -> list[object]:
        raise LlamaCppMissingError("the test says so")

    monkeypatch.setattr(doctor, "gpus", missing)
    absent = doctor.check_gpu()
    assert absent.state is State.GOOD and "(the test says so)" in absent.found
    assert "'llama-cpp-python>=0.3.36'" in absent.advice and "\n" not in absent.advice


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    found = doctor.check_folder("models", tmp_path / "a" / "b", "Name another.", State.BAD)
    assert found.state is State.BAD and found.advice == "Name another."


def test_a_file_in_place_of_a_folder_is_bad(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    found = doctor.check_folder("models", tmp_path / "a" / "b", "Name another.", State.BAD)
    assert found.state is State.BAD and found.advice == "Name another."


def test_a_folder_below_one_that_cannot_be_searched_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, stat = tmp_path / "locked", os.stat

    def refused(path: Any, **options: Any) -> os.stat_result:
        if locked in Path(path).parents:
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    locked.mkdir()
    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor.check_folder("models", locked / "a", "Name another.", State.BAD).state is State.BAD
    assert doctor.check_unfinished(locked / "partial").state is State.GOOD


def test_a_file_that_vanishes_meanwhile_has_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def gone(path: Any, *, follow_symlinks: bool = True, **options: Any) -> os.stat_result:
        if not follow_symlinks and Path(path).name == "gone":
            raise FileNotFoundError(2, "No such file or directory")
        return stat(path, follow_symlinks=follow_symlinks, **options)

    for name in ("gone", "there"):
        (tmp_path / name).write_bytes(b"#" * 5000)
    monkeypatch.setattr(os, "stat", gone)
    monkeypatch.setattr(os, "lstat", lambda path: gone(path, follow_symlinks=False))
    assert size_of(tmp_path) == disk_bytes((tmp_path / "there").stat())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell what a file takes")
def test_sizes_count_what_is_on_the_disk(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    (tmp_path / "full").write_bytes(bytes(range(256)) * 4096)
    assert 1 << 20 <= size_of(tmp_path) < 2 << 20
    assert doctor.check_unfinished(tmp_path).state is State.ADVICE


def test_problems_that_only_cost_time_are_not_failures(
    home: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "OLLAMA_HOST", "127.0.0.1:9")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (home / "file").write_text("")
    use_own_places(home / "file", monkeypatch)
    monkeypatch.setenv("LOCALLLM_MODEL_STORE", str(home / "models"))
    monkeypatch.setenv("LOCALLLM_KERNEL_CACHE", str(home / "kernels"))
    assert command("doctor", "--json") == 0
    found = {check["what"]: check for check in json.loads(capsys.readouterr().out)}
    assert found["KV cache"]["state"] == found["chats"]["state"] == "advice"
    assert found["models"]["state"] == found["settings"]["state"] == "good"
    assert found["compiled kernels"]["found"] == "none" and "once" in found["compiled kernels"]["advice"]


def test_a_missing_model_folder_is_reported(tmp_path: Path) -> None:
    assert doctor.check_model_folder(tmp_path).state is State.GOOD
    assert doctor.check_model_folder(tmp_path / "usb").state is State.ADVICE
