"""Chromium for the tests of the page; `make test-page` installs playwright and names the browser."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.localllm.server.conftest import model_files, start_server

__all__ = ["model_files", "start_server"]

PROGRAM = os.environ.get("TEST_BROWSER", "")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not PROGRAM:
        pytest.skip("TEST_BROWSER does not name a Chromium (make test-page does)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-page does)")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=PROGRAM, args=["--no-sandbox"])
        yield opened
        opened.close()
