"""Starting a server: refused addresses and models, and the listener."""

import socket
from pathlib import Path

import pytest

from gguf_io.errors import ModelFileError
from localllm.errors import RequestError
from localllm.library.errors import ModelNotFoundError
from localllm.server.catalog import Catalog
from localllm.server.options import ServerOptions
from localllm.server.serve import listen
from localllm.settings import Settings


def test_a_port_in_use_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(RequestError, match=rf"port {port}: [^.()]+\. Stop the program that uses"):
            listen(ServerOptions(Settings(port=port)))


def test_a_foreign_address_is_reported_with_a_remedy() -> None:
    with pytest.raises(RequestError, match=r"192\.0\.2\.1 port 0: .*\. Set --host to an address of this machine"):
        listen(ServerOptions(Settings(host="192.0.2.1", port=0)))


def test_chunks_are_sent_without_waiting_for_acknowledgements() -> None:
    with listen(ServerOptions(Settings(port=0))) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_model_that_was_named_must_be_one(tmp_path: Path) -> None:
    settings = Settings(model_store=str(tmp_path / "store"))
    with pytest.raises(ModelFileError, match=r"absent\.gguf: cannot be opened: .*[Ff]ile"):
        Catalog([str(tmp_path / "absent.gguf")], settings)
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"damaged\.gguf: ends after 4 bytes"):
        Catalog([str(damaged)], settings)
    with pytest.raises(ModelNotFoundError, match="no model 'nobodys'"):
        Catalog(["nobodys"], settings)
    assert Catalog(["builtin"], settings).entries()[0].name == "builtin"
