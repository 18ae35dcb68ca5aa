"""Prints the page's weight and start, and takes the documentation's pictures of it, from the real program and model.

    python -m benchmarks.page_pictures MODEL.gguf [--browser /usr/bin/chromium]

Needs playwright and a Chromium, as `make test-page` installs them. Writes docs/images/page*.png. A server without a
loaded model starts the page; times are from the first request, in a browser that has stored nothing.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent.parent / "docs" / "images"
PROMPT = "Show me a short Python function that returns the nth Fibonacci number, and explain it."
SIZES = {"page.png": (1024, 700), "page-390.png": (390, 780), "page-1920.png": (1920, 1000)}


def main() -> None:
    """Start a server, have the model answer, and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--browser", default="/usr/bin/chromium")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as home, sync_playwright() as driver:
        variables = {**os.environ, "XDG_DATA_HOME": home, "XDG_CONFIG_HOME": home}
        command = [sys.executable, "-m", "localllm", "serve", "--port", "0", "--model", str(given.model)]
        server = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            address = re.search(r"http://\S+", server.stderr.readline())
            assert address is not None, "the server does not start"
            browser = driver.chromium.launch(executable_path=given.browser, args=["--no-sandbox"])
            for kind in ("first visit of a server", "second visitor"):
                sys.stdout.write(f"{kind}: {_start(browser, address[0])}\n")
            _take(browser, address[0], given.model.stem)
            browser.close()
        finally:
            server.terminate()
            server.wait()


# Bytes on the wire until a model can be asked, without and with what the API sends; times in milliseconds.
_FIGURES = """() => {
  const all = performance.getEntries().filter((entry) => entry.transferSize);
  const sum = (entries) => entries.reduce((total, entry) => total + entry.transferSize, 0);
  const files = all.filter((entry) => !entry.name.includes("/api/"));
  const paint = performance.getEntriesByName("first-contentful-paint")[0].startTime;
  return [files.length, sum(files), sum(all), paint, performance.now()];
}"""


def _start(browser: Any, address: str) -> str:
    """What a visitor with an empty cache loads, and how long that takes."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.wait_for_function("() => document.getElementById('model').title && !document.getElementById('prompts').hidden")
    count, files, everything, paint, ready = page.evaluate(_FIGURES)
    context.close()
    return (
        f"{count} files of {files / 1000:.1f} kB, {everything / 1000:.1f} kB with answers of the API; "
        f"first paint after {paint:.0f} ms, ready for a prompt after {ready:.0f} ms"
    )


def _take(browser: Any, address: str, model: str) -> None:
    page = browser.new_page(viewport={"width": 1024, "height": 700}, color_scheme="dark")
    page.set_default_timeout(600_000)
    page.goto(address)
    page.evaluate("name => localStorage.setItem('model', name)", model)
    page.reload()
    page.click("#settings")
    page.click("#presets button:text-is('greedy')")
    page.fill("#p-max_tokens", "300")  # a small model may not find an end
    page.click("#settings-form button:text-is('Save')")
    page.fill("#prompt", PROMPT)
    page.click("#send")
    page.wait_for_selector(".assistant .actions")
    for name, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme="light" if name == "page-1920.png" else "dark")
        page.wait_for_timeout(500)
        page.screenshot(path=IMAGES / name)


if __name__ == "__main__":
    main()
