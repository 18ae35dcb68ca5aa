"""localllm show: describes a model."""

from localllm.front.options import AsJson, Model


def show(model: Model, as_json: AsJson = False) -> None:
    """Describe a model. Metadata, tensors by type, parameters, context, template, memory needed."""
    from localllm.cli.showing import show_model

    show_model(model, as_json)
