"""Keys with a bias stay in q8_0 where q4_0 is asked for: in plans, grants, loads, and what the user is told."""

import logging
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gguf_io import open_model
from localllm.advice import advise
from localllm.cli.main import application
from localllm.placement.backends import KEPT_KEYS, kv_types, native_kv_types, open_runner, place
from localllm.settings import Settings
from models.config import read_config
from models.kv_layout import kv_bytes_per_token, stored_types
from tests.models.architecture_models import MODELS
from tests.models.synthetic import write
from tests.oracle import llama_oracle

BIASED = ("qwen2", "phi2", "starcoder2")
PLAIN = ("llama", "qwen3", "gemma3")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write(MODELS[name], folder / f"{name}.gguf") for name in (*BIASED, *PLAIN)}


def settings_of(**values: Any) -> Settings:
    return Settings(**{"backend": "native", "threads": 1, "packed_mib": 0, "kv_mib": 8, **values})


@pytest.mark.parametrize("name", [*BIASED, *PLAIN])
@pytest.mark.parametrize("asked", [None, "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("values", [None, "q4_0"])
def test_only_biased_keys_in_four_bits_are_changed(name: str, asked: Any, values: Any, files: dict[str, Path]) -> None:
    settings = settings_of(kv_type_k=asked, kv_type_v=values)
    changed = name in BIASED and asked == "q4_0"
    keys = "q8_0" if changed else asked
    with open_model(files[name]) as file:
        assert kv_types(file, settings.kv_types) == (keys, values)
        assert native_kv_types(file, settings.kv_types) == (keys or "f16", values or "f16")
        placed = place(file, settings)
        config = read_config(file)
        needs = placed.needs
        assert needs is not None
        types = stored_types(config, (keys or "f16", values or "f16"))
        assert needs.kv_per_token + needs.window_per_token == kv_bytes_per_token(config, types)
        assert (KEPT_KEYS in placed.notes) is changed


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_a_load_uses_and_reports_the_planned_types(
    name: str, files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(kv_type_k="q4_0", kv_type_v="q4_0")
    with caplog.at_level(logging.WARNING), open_model(files[name]) as file:
        runner, placed = open_runner(file, settings)
        try:
            assert placed.needs is not None
            assert runner.info.kv_bytes_per_token == placed.needs.kv_per_token
            # The disk cache's key names the types that are really stored.
            assert runner.info.kv_layout.endswith(":q8_0:q4_0" if name == "qwen2" else ":q4_0:q4_0")
        finally:
            runner.close()
        advice = advise(file, settings)
    assert caplog.text.count(KEPT_KEYS) == (name == "qwen2")
    said = "\n".join(advice.placement.notes)
    assert (KEPT_KEYS in said) is (name == "qwen2")
    assert f"with {'q8_0' if name == 'qwen2' else 'q4_0'} keys and q4_0 values" in said


@pytest.mark.oracle
@llama_oracle.needs_llama
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_llama_cpp_gets_the_same_types(name: str, files: dict[str, Path]) -> None:
    settings = settings_of(backend="llama", kv_mib=None, kv_type_k="q4_0", ctx=512)
    with open_model(files[name]) as file:
        placed = place(file, settings)
        assert placed.options.type_k == ("q8_0" if name == "qwen2" else "q4_0")
        assert (KEPT_KEYS in placed.notes) is (name == "qwen2")


def test_the_command_tells_a_plan_s_types(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_BACKEND", "native")
    told = CliRunner().invoke(application(), ["plan", str(files["qwen2"]), "--kv-type-k", "q4_0"])
    assert told.exit_code == 0, told.output
    assert KEPT_KEYS in " ".join(told.output.split())
