"""The page's files: who gets them, what they may load, and what they weigh."""

import gzip
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.server import page
from tests.waiting import PATIENCE_S

BROWSER = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}
FOLDER = Path(page.__file__).parent
FILES = ["page.html", "page.css", "page.js", "icon.svg", "app.webmanifest"]


def get(server: Any, path: str, **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, timeout=PATIENCE_S)


def test_browsers_get_the_page_and_ollamas_clients_the_text(server: Any) -> None:
    found = get(server, "/", **BROWSER)
    assert found.headers["content-type"] == "text/html; charset=utf-8" and "<title>localllm</title>" in found.text
    for accept in ("*/*", "application/json", ""):
        assert get(server, "/", Accept=accept).text == "Ollama is running"
    assert (
        httpx.head(server.url + "/", headers=BROWSER, timeout=PATIENCE_S)
        .headers["content-type"]
        .startswith("text/html")
    )


def test_the_page_allows_nothing_from_elsewhere(server: Any) -> None:
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        headers = get(server, path, **BROWSER).headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'" and headers["x-frame-options"] == "DENY"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_page_has_no_inline_script_or_style_and_loads_nothing_foreign() -> None:
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", html)
    for name in FILES:
        text = (FOLDER / name).read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"(?:https?:)?//[\w-]+\.[\w.-]+", text), name


def test_the_page_needs_no_key_but_everything_else_does(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n", encoding="utf-8")
    with start_server("--api-key-file", str(file)) as server:
        assert get(server, "/", **BROWSER).status_code == get(server, "/page/page.js").status_code == 200
        for path in ("/", "/api/tags", "/api/chats", "/api/chats/events", "/page"):
            assert get(server, path).status_code == 401, path
        for path in ("/api/tags", "/docs", "/page/../api/tags"):
            assert get(server, path, **BROWSER).status_code == 401, path
        assert httpx.post(server.url + "/", headers=BROWSER, timeout=PATIENCE_S).status_code == 401
        assert get(server, "/", **BROWSER, Host="evil.example").status_code == 403


def test_only_the_pages_files_are_served(server: Any) -> None:
    for name in ("__init__.py", "..%2f__init__.py", "%2e%2e/security.py", "x", "page.py"):
        assert get(server, f"/page/{name}").status_code == 404


def test_unchanged_files_are_not_sent_again(server: Any) -> None:
    tag = get(server, "/page/page.js").headers["etag"]
    assert get(server, "/page/page.js", **{"If-None-Match": tag}).status_code == 304
    assert get(server, "/page/page.js", **{"If-None-Match": '"other"'}).status_code == 200


def test_the_page_is_small() -> None:
    sizes = [(FOLDER / name).stat().st_size for name in FILES]
    assert sum(sizes) < 100_000 and sum(len(gzip.compress((FOLDER / name).read_bytes())) for name in FILES) < 30_000


@pytest.mark.parametrize("name", FILES)
def test_the_package_contains_the_pages_files(name: str) -> None:
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["localllm.server.page"]
    assert any(Path(name).match(pattern) for pattern in patterns)
