"""The server's settings: durations, and Ollama's variables, which ours override."""

import pytest

from localllm.errors import SettingsError
from localllm.server.options import FOREVER, parse_duration, server_options, with_ollama_variables
from localllm.settings import Settings, load_settings


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0), (300, 300.0), (1.5, 1.5), (-1, FOREVER), ("0", 0.0), ("300", 300.0), ("-1", FOREVER), ("5m", 300.0),
        ("1h30m", 5400.0), ("1.5h", 5400.0), ("250ms", 0.25), (".5s", 0.5), ("-5m", FOREVER), ("1µs", 1e-6),
        (" 2s ", 2.0), ("24h", 86400.0), ("0s", 0.0), ("5", 5.0),
    ],
)  # fmt: skip
def test_durations(value: str | float, seconds: float) -> None:
    assert parse_duration(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "soon", "m5", "5 m", "5d", "1h-5m", "--1", "1e3s", "५m"])
def test_invalid_durations_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("variable", "value", "setting", "expected"),
    [
        ("OLLAMA_HOST", "0.0.0.0", "host", "0.0.0.0"),
        ("OLLAMA_HOST", "0.0.0.0", "port", 11434),
        ("OLLAMA_HOST", ":8080", "port", 8080),
        ("OLLAMA_HOST", "box.lan:80", "host", "box.lan"),
        ("OLLAMA_HOST", "http://127.0.0.1:1234", "port", 1234),
        ("OLLAMA_HOST", "[::1]:99", "host", "::1"),
        ("OLLAMA_HOST", "[::1]", "host", "::1"),
        ("OLLAMA_HOST", "::1", "host", "::1"),
        ("OLLAMA_HOST", "::1", "port", 11434),
        ("OLLAMA_HOST", "1.2.3.4:", "port", 11434),
        ("OLLAMA_HOST", ":8080", "host", "127.0.0.1"),
        ("OLLAMA_HOST", ' "1.2.3.4" ', "host", "1.2.3.4"),
        ("OLLAMA_HOST", "http://box.lan", "port", 80),
        ("OLLAMA_HOST", "https://box.lan", "port", 443),
        ("OLLAMA_HOST", "http://box.lan:81/path/", "host", "box.lan"),
        ("OLLAMA_HOST", "http://box.lan:81/path/", "port", 81),
        ("OLLAMA_HOST", "box.lan/", "host", "box.lan"),
        ("OLLAMA_KEEP_ALIVE", "-1", "keep_alive", "-1"),
        ("OLLAMA_NUM_PARALLEL", "3", "parallel", 3),
        ("OLLAMA_NUM_PARALLEL", "0", "parallel", Settings().parallel),
        ("OLLAMA_MAX_LOADED_MODELS", "2", "max_models", 2),
        ("OLLAMA_MAX_LOADED_MODELS", "0", "max_models", Settings().max_models),
        ("OLLAMA_MAX_QUEUE", "7", "max_queue", 7),
        ("OLLAMA_ORIGINS", "https://a,https://b", "origins", "https://a,https://b"),
        ("OLLAMA_CONTEXT_LENGTH", "8192", "ctx", 8192),
        ("OLLAMA_CONTEXT_LENGTH", "0", "ctx", None),
    ],
)
def test_ollamas_variables(variable: str, value: str, setting: str, expected: object) -> None:
    assert getattr(load_settings({}, with_ollama_variables({variable: value})), setting) == expected


def test_ours_come_first() -> None:
    environment = {
        "OLLAMA_HOST": "1.2.3.4:5",
        "LOCALLLM_PORT": "6",
        "OLLAMA_KEEP_ALIVE": "1m",
        "LOCALLLM_KEEP_ALIVE": "2m",
    }
    settings = load_settings({}, with_ollama_variables(environment))
    assert (settings.host, settings.port, settings.keep_alive) == ("1.2.3.4", 6, "2m")


@pytest.mark.parametrize(
    "environment",
    [
        {"OLLAMA_HOST": "a:b"},
        {"OLLAMA_HOST": "[::1"},
        {"OLLAMA_HOST": "ftp://box.lan"},
        {"OLLAMA_NUM_PARALLEL": "many"},
        {"OLLAMA_KV_CACHE_TYPE": "q3_9"},
    ],
)
def test_variables_that_make_no_sense_are_errors(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError):
        load_settings({}, with_ollama_variables(environment))


def test_keys_are_not_shown() -> None:
    options = server_options(Settings(api_key="sesame"))
    assert options.api_key == "sesame" and "sesame" not in repr(options)
    with pytest.raises(SettingsError, match="keep_alive"):
        server_options(Settings(keep_alive="soon"))
