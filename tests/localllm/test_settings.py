from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from localllm.errors import SettingsError
from localllm.front.options import COMPUTING
from localllm.library.behaviour import SETTING_OF
from localllm.settings import BOUNDS, SECRETS, Settings, config_path, load_settings
from tests.systems import use_own_places


def settings_file(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_beside_the_fields_belongs_to_them() -> None:
    """Every number has a range, every secret is hidden, and flags and models' parameters are settings."""
    numbers = {one.name for one in fields(Settings) if {int, float} & {one.type, *get_args(one.type)}}
    assert BOUNDS.keys() == numbers
    assert {one.name for one in fields(Settings) if not one.repr} == SECRETS
    names = {one.name for one in fields(Settings)}
    assert COMPUTING.keys() - names == set() and set(SETTING_OF.values()) - names == set()


def test_defaults_without_any_source(tmp_path: Path) -> None:
    assert load_settings({}, {}, tmp_path / "absent.toml") == Settings()


def test_flags_come_before_environment_before_file(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "top_k = 1\nthreads = 1\nseed = 1\ntemperature = 0\n")
    settings = load_settings({"top_k": 3, "ctx": None}, {"LOCALLLM_TOP_K": "2", "LOCALLLM_THREADS": "2"}, file)
    assert (settings.top_k, settings.threads, settings.seed, settings.temperature) == (3, 2, 1, 0.0)
    assert isinstance(settings.temperature, float)


def test_other_programs_and_declared_variables_are_left_alone(tmp_path: Path) -> None:
    environment = {"PATH": "/bin", "TEST_DATA": "x", "OLLAMA_HOST": "y", "LOCALLLM_BACKEND": "llama"}
    assert load_settings({}, environment, tmp_path / "absent.toml") == Settings(backend="llama")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature = 1.0", ["temprature", "Did you mean temperature?", "config.toml"]),
        ("zzzzzz = 1", ["zzzzzz", "Choose from: allow_hosts, any_name, api_key"]),
        ("[run]\ntop_k = 1", ["'run'"]),
        ("top_k = true", ["config.toml: top_k must be a whole number (got True)"]),
        ("top_k = 1.5", ["top_k must be a whole number (got 1.5)"]),
        ("temperature = '1'", ["temperature must be a number (got '1')"]),
        ("backend = 'cuda'", ["backend must be auto, native or llama (got 'cuda')"]),
        ("split_mode = 'column'", ["split_mode must be none, layer or row (got 'column')"]),
        ("top_k = [1]", ["top_k must be a whole number (got [1])"]),
        ("top_k = ", ["not valid TOML"]),
        ("top_k = " + "[" * 100_000, ["not valid TOML"]),
        ("temperature = 1" + "0" * 400, ["temperature is out of range"]),
        ('model_folders = "a\\u0000b"', ["model_folders must be text"]),
        ("api_key = 12345", ["api_key must be text."]),
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
        ("LOCALLLM_THREADS", "four", ["LOCALLLM_THREADS must be a whole number (got 'four')"]),
        ("LOCALLLM_TOP_P", "", ["LOCALLLM_TOP_P", "a number"]),
        ("LOCALLLM_TOP_P", "2", ["LOCALLLM_TOP_P must be at most 1 (got 2.0)"]),
        ("LOCALLLM_BACKEND", "gpu", ["LOCALLLM_BACKEND must be auto, native or llama"]),
    ],
)
def test_a_wrong_variable_is_refused_in_words(tmp_path: Path, variable: str, value: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings({}, {variable: value}, tmp_path / "absent.toml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("ctx", 0, "at least 1"),
        ("ctx", 999_999_999, "at most 16777216"),
        ("threads", -1, "at least 1"),
        ("max_tokens", -1, "at least 0"),
        ("port", 99999, "at most 65535"),
        ("min_p", 1.5, "at most 1"),
        ("temperature", float("nan"), "at most 100"),
        ("mirostat", 3, "at most 2"),
        ("repeat_penalty", 0.0, "at least 0.01"),
    ],
)
def test_numbers_out_of_bounds_are_refused(tmp_path: Path, name: str, value: float, limit: str) -> None:
    words = rf"^--{name.replace('_', '-')} must be {limit} \(got {value}\)\.$"
    with pytest.raises(SettingsError, match=words):
        load_settings({name: value}, {}, tmp_path / "absent.toml")
    with pytest.raises(SettingsError, match=f"{name} must be {limit}"):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_what_is_valid_can_be_used_whatever_the_rest(tmp_path: Path) -> None:
    file = settings_file(tmp_path, "top_k = 5\ntemprature = 1\nseed = 'x'\nport = 99999\n")
    errors: list[SettingsError] = []
    settings = load_settings({"threads": 0}, {"LOCALLLM_CTX": "16", "LOCALLLM_NO": "1"}, file, report=errors.append)
    assert (settings.top_k, settings.ctx, settings.seed, settings.port, settings.threads) == (5, 16, None, 11434, None)
    assert len(errors) == 5


def test_a_settings_path_that_is_not_a_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings({}, {}, tmp_path)
    (tmp_path / "latin").write_bytes(b"seed = 1 # \xe4")
    with pytest.raises(SettingsError, match="not UTF-8 text"):
        load_settings({}, {}, tmp_path / "latin")


def test_the_file_is_in_the_users_configuration_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_own_places(tmp_path, monkeypatch)
    assert config_path() == tmp_path / "localllm" / "config.toml"
