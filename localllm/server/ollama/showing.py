"""/api/show: what a model is, and the recipe that would make it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.library.behaviour import Behaviour
from localllm.library.entry import ModelDefaults
from localllm.server.catalog import CatalogEntry, facts_of
from localllm.server.file_details import details_of
from localllm.server.model_details import capabilities_of, model_info, projector_for, tensors_of
from localllm.server.ollama.options import read_options, stop_strings
from localllm.server.ollama.schema import ShowBody
from localllm.settings import Settings


def shown(entry: CatalogEntry, settings: Settings, body: ShowBody) -> dict[str, Any]:
    """The answer. Raises ModelFileError and its kin, LibraryError for a damaged manifest."""
    behaviour = replace(entry.behaviour, system=body.system or entry.behaviour.system)
    defaults = entry.model.defaults() if entry.model else ModelDefaults()
    parameters = _parameters(behaviour, body.options or {})
    projector = projector_for(entry, settings)
    license_text = "\n".join(defaults.licenses)
    said: dict[str, Any] = {
        "license": license_text,
        "system": behaviour.system,
        "messages": list(behaviour.messages),
        "projector_info": model_info(projector, False) if projector else None,
    }
    return {
        "modelfile": _modelfile(entry.name, behaviour, defaults, parameters),
        "parameters": "\n".join(parameters),
        "template": behaviour.template or facts_of(entry.path).summary.chat_template or "{{ .Prompt }}",
        **{name: value for name, value in said.items() if value},
        "details": details_of(entry.path),
        "model_info": model_info(entry.path, bool(body.verbose)),
        "tensors": tensors_of(entry.path) if body.verbose else [],
        "capabilities": capabilities_of(entry, projector),
        "modified_at": entry.modified_at,
    }


def _modelfile(name: str, behaviour: Behaviour, defaults: ModelDefaults, parameters: Sequence[str]) -> str:
    """What `create` would take to make the same model once more."""
    lines = [f"FROM {name}"]
    if defaults.template:
        lines.append(f'TEMPLATE """{defaults.template}"""')
    lines += [f"PARAMETER {line}" for line in parameters]
    lines += [f"ADAPTER {Path(path).name}" for path in defaults.adapters]
    if behaviour.system:
        lines.append(f'SYSTEM """{behaviour.system}"""')
    lines += [f'MESSAGE {message["role"]} """{message["content"]}"""' for message in behaviour.messages]
    lines += [f'LICENSE """{text}"""' for text in defaults.licenses]
    return "".join(f"{line}\n" for line in lines)


def _parameters(behaviour: Behaviour, options: Mapping[str, Any]) -> list[str]:
    """What a manifest sets, and options over it, a line each, as Modelfiles have it. Raises ApiError 400."""
    read_options(options)
    values = behaviour.parameters
    values |= {name: value for name, value in options.items() if name != "stop"}
    stops = stop_strings(options["stop"]) if "stop" in options else behaviour.stop
    lines = [f"{name} {value}" for name, value in sorted(values.items())]
    return [*lines, *(f"stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops)]
