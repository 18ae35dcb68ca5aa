"""Ollama's variables as our settings."""

import pytest

from localllm.errors import SettingsError
from localllm.server.options import with_ollama_variables
from localllm.settings import load_settings


def test_the_type_of_keys_and_values() -> None:
    for kind in ("q8_0", "q4_0"):
        settings = load_settings({}, with_ollama_variables({"OLLAMA_KV_CACHE_TYPE": kind}))
        assert (settings.kv_type_k, settings.kv_type_v) == (kind, kind)
    own = {"OLLAMA_KV_CACHE_TYPE": "q8_0", "LOCALLLM_KV_TYPE_V": "f16"}
    settings = load_settings({}, with_ollama_variables(own))
    assert (settings.kv_type_k, settings.kv_type_v) == ("q8_0", "f16")
    assert load_settings({}, with_ollama_variables({"OLLAMA_KV_CACHE_TYPE": ""})).kv_type_k is None
    with pytest.raises(SettingsError, match="OLLAMA_KV_CACHE_TYPE must be f16, q8_0 or q4_0"):
        with_ollama_variables({"OLLAMA_KV_CACHE_TYPE": "q5_0"})
