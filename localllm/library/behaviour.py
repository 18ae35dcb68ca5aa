"""A library model's defaults, which anything the user sets overrides: template, system text, settings, stops."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf_io import open_model
from localllm.library.entry import LibraryModel
from localllm.library.errors import LibraryError, warn_once
from localllm.library.modelfile import SUPPORTED
from localllm.settings import lora_text
from localllm.text import shortened

# Names of our settings for the supported parameters of Ollama that have one.
_RENAMED = {"num_ctx": "ctx", "num_predict": "max_tokens", "num_thread": "threads"}
SETTING_OF = {name: _RENAMED.get(name, name) for name in SUPPORTED if name not in ("num_keep", "stop")}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """settings: by field name of Settings; every other source overrides them. template: Jinja; None means the file's.

    keep: how many first tokens stay in a rolling window, as in GenerationRequest; None means the engine's default.
    adapters: as in GenerationRequest.
    """

    template: str | None = None
    system: str | None = None
    settings: dict[str, object] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    keep: int | None = None
    adapters: tuple[tuple[int, float], ...] | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings and keep by Ollama's names; without stops."""
        keep = {} if self.keep is None else {"num_keep": self.keep}
        return {name: self.settings[own] for name, own in SETTING_OF.items() if own in self.settings} | keep


def behaviour_of(model: LibraryModel) -> Behaviour:
    """Read a model's manifest in our terms. What is not supported is logged.

    Raises LibraryError if ignoring that would change the model: for a chat template of no known family when the file
    has none of its own.
    """
    defaults = model.defaults()
    parameters = dict(defaults.parameters)
    stop, keep = parameters.pop("stop", ()), parameters.pop("num_keep", None)
    unused = sorted(parameters.keys() - SETTING_OF)
    if unused:
        warn_once(f"{model.name}: unsupported parameters are ignored: {shortened(', '.join(unused), 200)}")
    if parameters.get("mirostat") == 1:
        warn_once(f"{model.name}: mirostat 1 is not supported; mirostat 2 is used instead")
        parameters["mirostat"] = 2
    settings: dict[str, object] = {SETTING_OF[name]: value for name, value in parameters.items() if name in SETTING_OF}
    if defaults.adapters:
        settings["lora"] = lora_text(defaults.adapters)
    if defaults.projectors:
        settings["mmproj"] = str(defaults.projectors[0])
    # Ollama writes "no limit", "random" and "automatic" as numbers below these; here that is None.
    for name, least in (("max_tokens", 0), ("seed", 0), ("ctx", 1), ("threads", 1)):
        value = settings.get(name)
        if isinstance(value, int) and value < least:
            del settings[name]
    return Behaviour(
        template=_template(model, defaults.template),
        system=defaults.system,
        settings=settings,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        messages=defaults.messages,
        keep=keep if isinstance(keep, int) else None,
    )


def _template(model: LibraryModel, template: str | None) -> str | None:
    if template is None:
        return None
    from localllm.library.go_templates import jinja_of  # most models have a template in their file alone

    own = own_template(model)
    try:
        return jinja_of(template, own)
    except LibraryError as error:
        if own is None:
            raise LibraryError(f"{model.name}: {error}") from error
        warn_once(f"{model.name}: the model file's own chat template is used. {error}")
        return None


def own_template(model: LibraryModel) -> str | None:
    """The chat template in the model's file, cached until the file changes. Raises ModelFileError."""
    try:
        status = model.path.stat()
    except OSError as error:
        raise LibraryError(f"{model.name}: {model.path} cannot be read: {error.strerror}.") from error
    return _own_template(model.path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _own_template(path: Path, _changed: int, _size: int) -> str | None:
    with open_model(path) as file:
        return file.metadata.get_str("tokenizer.chat_template", "") or None
