"""How a model of embeddings pools its rows, from the files that sentence-transformers puts beside a checkpoint."""

from typing import Any

from localllm.importing.checkpoint import Checkpoint
from localllm.importing.errors import CheckpointError
from localllm.text import shortened

_FILE = "1_Pooling/config.json"
# Values of pooling_type, by the names that are true in the file, or that its newer form states.
_WAYS = {"mean": 1, "cls": 2, "lasttoken": 3}


def pooling_keys(checkpoint: Checkpoint) -> dict[str, Any]:
    """The key that says how rows are pooled, none where no file does. Raises CheckpointError for another way."""
    stated = checkpoint.optional_json(_FILE)
    if stated is None:
        return {}
    names = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
    ways = [name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token") for name in names]
    if isinstance(mode := stated.get("pooling_mode"), str):
        ways = [mode]
    if len(ways) != 1 or ways[0] not in _WAYS:
        raise CheckpointError(
            f"{checkpoint.folder / _FILE}: pools by {shortened(' and '.join(ways) or 'nothing')}; one of "
            f"{', '.join(_WAYS)} can be imported."
        )
    return {"pooling_type": _WAYS[ways[0]]}
