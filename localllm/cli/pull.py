"""localllm pull and push."""

from typing import Annotated

import typer

from localllm.front.pulling import with_progress
from localllm.front.terminal import note
from localllm.settings import load_settings


def pull(
    name: Annotated[str, typer.Argument(help="qwen3:0.6b, hf.co/user/repo:Q4_K_M, or a URL.", show_default=False)],
) -> None:
    """Download a model. From Ollama's registry, Hugging Face or any URL.

    An interrupted pull is resumed. Every file is verified against its SHA-256.
    """
    from localllm.library.pull import pull as pull_model

    settings = load_settings({})
    model = with_progress(name, lambda progress: pull_model(name, settings, progress))
    note(f'{model.name} is here. Try: localllm run {model.name} "Hello"')


def push(
    name: Annotated[
        str, typer.Argument(help="A model in localllm's store, such as host/user/name.", show_default=False)
    ],
    insecure: Annotated[bool, typer.Option("--insecure", help="Without TLS, also to another machine.")] = False,
) -> None:
    """Upload a stored model to a registry.

    The registry speaks Ollama's protocol, and its host begins the model's name. `localllm cp` gives a model such a
    name. An interrupted push does not send again what has arrived whole.
    """
    from localllm.library.lookup import stored_name
    from localllm.library.push import push as push_model

    model, settings = stored_name(name), load_settings({})
    with_progress(name, lambda progress: push_model(model, settings, progress, insecure), "push")
    note(f"{model} is at {model.host}.")
