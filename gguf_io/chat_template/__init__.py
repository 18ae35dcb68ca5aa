"""Chat templates: a model's own Jinja program, run in a process of its own with bounds on time, memory and output."""

from gguf_io.chat_template.template import ChatTemplate, load_chat_template

__all__ = ["ChatTemplate", "load_chat_template"]
