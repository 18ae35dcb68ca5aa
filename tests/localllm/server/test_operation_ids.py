"""Our OpenAPI, generated without a server."""

import re
import warnings
from pathlib import Path
from typing import Any, cast

from localllm.server.app import create_app
from localllm.server.operation import page
from localllm.server.options import ServerOptions

DOCS = Path(__file__).resolve().parents[3] / "docs"


def described() -> dict[str, Any]:
    nothing: Any = cast("Any", None)
    return create_app(ServerOptions(), nothing).openapi()


def test_the_page_shows_every_route_and_field_and_needs_no_other_machine() -> None:
    shown, told = page(described()), described()
    for path in told["paths"]:
        assert f" {path}</h3>" in shown
    for name, schema in told["components"]["schemas"].items():
        assert f'<h3 id="{name}">' in shown
        assert all(f"<code>{field}</code>" in shown for field in schema.get("properties", {}))
    assert "http:" not in shown and "https:" not in shown and "<script" not in shown


def test_operation_ids_are_unique_and_every_route_says_what_it_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = described()
    operations = [operation for path in told["paths"].values() for operation in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(ids) == len(set(ids)) and len(ids) > 30
    assert all(operation.get("description") for operation in operations)


def test_every_route_is_documented() -> None:
    pages = "".join((DOCS / name).read_text("utf-8") for name in ("api.md", "page.md"))
    paths = described()["paths"]
    forms = {path: re.sub(r"\\{\w+\\}", r":\\w+", re.escape(path)) for path in paths}
    missing = [path for path, form in forms.items() if not re.search(rf"[ `]{form}[`?]", pages)]
    assert len(paths) > 30 and missing == [], "describe them in docs/api.md or docs/page.md"
