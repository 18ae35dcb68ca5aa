"""Server fixtures for programs that are not started by `localllm launch`."""

from tests.localllm.server.conftest import model_files, start_server

__all__ = ["model_files", "start_server"]
