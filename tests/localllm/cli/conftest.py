"""Server fixtures for commands that talk to a running server."""

from tests.localllm.server.conftest import model_files, start_server

__all__ = ["model_files", "start_server"]
