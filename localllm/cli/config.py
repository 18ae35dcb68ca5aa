"""localllm config: the settings in force."""

import json

from localllm.cli.options import AsJson, Debug
from localllm.cli.terminal import answer, note

SECRETS = frozenset({"api_key", "remote_key"})


def config(as_json: AsJson = False, debug: Debug = False) -> None:
    """Show every setting, its value and where it comes from. Flags of other commands come before all of these."""
    from localllm.settings import config_path, setting_sources
    from localllm.text import table

    found = {name: (_public(name, value), where) for name, (value, where) in setting_sources().items()}
    if as_json:
        rows = {name: {"value": value, "source": source} for name, (value, source) in found.items()}
        answer(json.dumps(rows, ensure_ascii=False) + "\n")
        return
    answer(
        table(
            [("SETTING", "VALUE", "SOURCE"), *((name, _shown(value), where) for name, (value, where) in found.items())]
        )
    )
    path = config_path()
    note(f"The file is {path}" if path.is_file() else f"There is no file {path}; make one to keep settings.")


def _public(name: str, value: object) -> object:
    """Secrets are not for screens."""
    return "(set)" if name in SECRETS and value else value


def _shown(value: object) -> str:
    """As it is written in the file; what is not set has no value, or is left to the model or the machine."""
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
