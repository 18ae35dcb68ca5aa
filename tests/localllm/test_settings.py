from pathlib import Path

import pytest

from localllm.errors import SettingsError
from localllm.settings import Settings, config_path, load_settings


def settings_file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_without_any_source(tmp_path: Path) -> None:
    assert load_settings({}, {}, tmp_path / "absent.toml") == Settings()


def test_flags_come_before_environment_before_file(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "top_k = 1\nthreads = 1\nseed = 1\ntemperature = 0\n")
    settings = load_settings({"top_k": 3, "ctx": None}, {"LOCALLLM_TOP_K": "2", "LOCALLLM_THREADS": "2"}, file)
    assert (settings.top_k, settings.threads, settings.seed, settings.temperature) == (3, 2, 1, 0.0)
    assert isinstance(settings.temperature, float)


def test_other_programs_and_declared_variables_are_left_alone(tmp_path: Path) -> None:
    environment = {"PATH": "/bin", "LOCALLLM_TEST_DATA": "x", "OLLAMA_HOST": "y", "LOCALLLM_BACKEND": "llama"}
    assert load_settings({}, environment, tmp_path / "absent.toml") == Settings(backend="llama")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature = 1.0", ["temprature", "Did you mean temperature?", "config.toml"]),
        ("zzzzzz = 1", ["zzzzzz", "There are: backend, gpu_layers"]),
        ("[run]\ntop_k = 1", ["'run'"]),
        ("top_k = true", ["top_k should be an integer and is True"]),
        ("top_k = 1.5", ["top_k should be an integer and is 1.5"]),
        ("temperature = '1'", ["temperature should be a number and is '1'"]),
        ("backend = 'cuda'", ["backend should be 'auto' or 'native' or 'llama' and is 'cuda'"]),
        ("split_mode = 'column'", ["split_mode should be 'none' or 'layer' or 'row' and is 'column'"]),
        ("top_k = [1]", ["top_k should be an integer and is [1]"]),
        ("top_k = ", ["not valid TOML"]),
        ("top_k = 1\ntop_k = 2", ["not valid TOML"]),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, {}, settings_file(tmp_path, text))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("LOCALLLM_THREDS", "4", ["LOCALLLM_THREDS", "Did you mean threads?"]),
        ("LOCALLLM_THREADS", "four", ["LOCALLLM_THREADS", "an integer", "'four'"]),
        ("LOCALLLM_TOP_P", "", ["LOCALLLM_TOP_P", "a number"]),
        ("LOCALLLM_BACKEND", "gpu", ["LOCALLLM_BACKEND", "'native'"]),
    ],
)
def test_a_wrong_variable_is_refused_in_words(tmp_path: Path, variable: str, value: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, {variable: value}, tmp_path / "absent.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("flags", [{"ctx": 0}, {"threads": -1}, {"max_tokens": -1}])
def test_numbers_below_the_least_are_refused(tmp_path: Path, flags: dict[str, object]) -> None:
    (name,) = flags
    with pytest.raises(SettingsError, match=f"{name} is -?[01]; the least is [01]"):
        load_settings(flags, {}, tmp_path / "absent.toml")


def test_a_port_above_the_most_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"port is 99999; the most is 65535\."):
        load_settings({"port": 99999}, {}, tmp_path / "absent.toml")


def test_a_file_that_is_no_file_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({}, {}, tmp_path)
    (tmp_path / "latin").write_bytes(b"seed = 1 # \xe4")
    with pytest.raises(SettingsError, match="not valid TOML"):
        load_settings({}, {}, tmp_path / "latin")


def test_the_file_lies_in_the_users_configuration_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("APPDATA", str(tmp_path))
    assert config_path().name == "config.toml"
    assert config_path().parent.name == "localllm"
