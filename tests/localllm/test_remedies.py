"""An error's remedy is a field: who runs localllm sees it, clients of a server do not."""

import re
from pathlib import Path

import pytest

from localllm.errors import ContextOverflowError, LocalLLMError, RequestError
from localllm.server.errors import message_of
from models.errors import UnsupportedModelError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", [LocalLLMError, RequestError, UnsupportedModelError])
def test_the_remedy_is_apart_and_shown_with_the_message(kind: type[LocalLLMError]) -> None:
    error = kind("The model has no eyes. ", remedy="Load it with --mmproj FILE.")
    assert (error.message, error.remedy) == ("The model has no eyes.", "Load it with --mmproj FILE.")
    assert str(error) == "The model has no eyes. Load it with --mmproj FILE."
    assert str(kind("As it is. ")) == "As it is. " and not kind("x").remedy


def test_clients_get_the_message_and_what_they_can_do_themselves() -> None:
    assert (
        message_of(RequestError("/srv/models/x.gguf: no weights. Nothing follows.", remedy="Use --draft."))
        == "x.gguf: no weights. Nothing follows."
    )
    assert (
        message_of(ContextOverflowError(9, 8)) == "The prompt has 9 tokens and the context holds 8. Shorten the prompt."
    )
    malformed = RequestError("The JSON Schema is malformed at #/properties/a/type: 7 is no type.")
    assert message_of(malformed) == str(malformed)  # a pointer is not a path
    assert message_of(ContextOverflowError(9, 8, "raise num_ctx", by_request=True)).endswith("or raise num_ctx.")
    assert "--ctx" in str(ContextOverflowError(9, 8))


def test_errors_that_reach_servers_name_flags_in_remedies_only() -> None:
    """A flag in a message would reach clients, who have no command line."""
    for package in (
        "localllm/engine",
        "localllm/placement",
        "localllm/answer",
        "localllm/library",
        "gguf_io",
        "models",
    ):
        for file in (ROOT / package).rglob("*.py"):
            for call in re.finditer(r"raise \w+Error\(((?:[^()]|\([^()]*\))*)\)", file.read_text(encoding="utf-8")):
                message = call[1].partition("remedy=")[0]
                assert not re.search(r"(?<![\w`-])--[a-z]", message), f"{file}: {message}"
