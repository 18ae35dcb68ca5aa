"""The page in a real Chromium: what people do with it, what it survives, and what a hostile answer may not do."""

import base64
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.chats import Message, Role, SessionStore
from tests.fakes.scripted_model import call, write_scripted_model
from tests.localllm.server.chats.test_rendered_answers import HOSTILE
from tests.localllm.server.conftest import SLOWLY
from tests.systems import own_places
from tests.waiting import PATIENCE_S

MODEL = "stories260K-Q8_0"
AXE = os.environ.get("TEST_AXE", "")
WAIT_MS = 1000 * PATIENCE_S
ANSWER = """A list:

1. one
2. two

| name | value |
|------|-------|
| a    | $x^2$ |

```python
def add(a, b):
    return a + b
```

\\[ \\frac{a}{b} \\]

A [link](https://example.org).
"""


class Page:
    """One tab, which fails its test if the page has an error or asks another host for anything."""

    def __init__(self, context: Any, url: str) -> None:
        self.tab = context.new_page()
        self.tab.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("console", self._note)
        self.tab.on("request", lambda request: self._asked(request.url, url))
        self.tab.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))
        self.tab.goto(url)

    def _note(self, line: Any) -> None:
        expected = ("net::ERR", "status of 4", "Failed to load resource")
        if line.type == "error" and not any(words in line.text for words in expected):
            self.faults.append(line.text)

    def _asked(self, asked: str, url: str) -> None:
        if not asked.startswith((url.rstrip("/").split("#")[0], "blob:")):
            self.faults.append(f"asked for {asked}")

    def send(self, text: str) -> None:
        self.tab.fill("#prompt", text)
        self.tab.click("#send")

    def answered(self, count: int = 1) -> None:
        """Wait until there are so many answers and none is being written."""
        self.tab.wait_for_function(
            "count => document.querySelectorAll('.assistant .actions').length === count"
            " && document.getElementById('stop').hidden",
            arg=count,
        )

    def text(self, place: int = -1) -> str:
        return str(self.tab.locator(".message .body").nth(place).inner_text())


OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def slow(browser: Any, start_server: Any, data: Path) -> Iterator[Any]:
    with start_server(begins=SLOWLY, LOCALLLM_MAX_TOKENS="30", **own_places(data)) as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Opens a tab of a new visitor, or with `beside` of the same one."""
    pages: list[Page] = []
    with contextlib.ExitStack() as stack:

        def opened(server: Any, at: str = "/", beside: Page | None = None, **options: Any) -> Page:
            if beside is None:
                context = browser.new_context(**{"viewport": {"width": 1024, "height": 768}, **options})
                stack.callback(context.close)
            else:
                context = beside.tab.context
            pages.append(Page(context, server.url + at))
            return pages[-1]

        yield opened
        for page in pages:
            assert page.faults == []


def stored_chat(data: Path, *texts: str) -> int:
    """A chat as the terminal chat stores it: prompts and answers in turn."""
    store = SessionStore(data / "localllm" / "sessions.db")
    with contextlib.closing(store):
        chat, parent = store.create(MODEL, {}), None
        for place, text in enumerate(texts):
            role, end = (Role.ASSISTANT, "stop") if place % 2 else (Role.USER, None)
            parent = store.add(Message(0, chat, parent, role, text, finish_reason=end)).id
        return chat


def test_a_first_chat_from_prompt_to_figures(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.tab.wait_for_selector(f"#model:has-text('{MODEL}'), #model:has-text('builtin')")
    page.tab.keyboard.type("Once upon a time")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_function("() => /Writing · .* tok\\/s/.test(document.getElementById('status').textContent)")
    page.answered()
    figures = page.tab.locator(".assistant .actions span").last.inner_text()
    assert "tok/s" in figures and "prompt tokens" in figures and page.text()
    assert page.tab.title().startswith("Once upon a time")
    assert page.tab.locator("#chats .shown").count() == 1


def test_a_reload_during_an_answer_resumes_it(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.send("Tom had a red ball")
    page.tab.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 10")
    begun = page.text()
    page.tab.reload()
    page.tab.wait_for_selector("#stop:visible")
    page.answered()
    assert page.text().startswith(begun[:10]) and len(page.text()) > len(begun)


def test_two_tabs_show_the_same_and_stop_works_in_both(slow: Any, open_page: OpenPage) -> None:
    first = open_page(slow)
    first.send("Lily liked to sing")
    first.tab.wait_for_selector("#stop:visible")
    second = open_page(slow, "/" + first.tab.evaluate("location.hash"), beside=first)
    second.tab.wait_for_selector("#stop:visible")
    second.tab.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 5")
    second.tab.keyboard.press("Escape")
    for page in (first, second):
        page.answered()
    assert first.text() == second.text()
    first.tab.click("button:text-is('Regenerate')")
    for page in (first, second):
        page.tab.wait_for_selector(".actions span:text-is('2 of 2')")
        page.answered()
    assert first.text() == second.text()


def test_a_killed_server_is_shown_and_found_again(
    browser: Any, start_server: Any, open_page: OpenPage, data: Path
) -> None:
    variables = own_places(data)
    with start_server(begins=SLOWLY, **variables) as server:
        page = open_page(server)
        page.send("Once there was a king")
        page.tab.wait_for_function("() => document.querySelector('.assistant .body')?.textContent.length > 10")
        server.process.kill()
        page.tab.wait_for_selector("#offline:has-text('cannot be reached')")
        page.tab.fill("#prompt", "not sent yet")
    with start_server("--port", str(server.port), **variables):
        page.tab.wait_for_selector("#offline", state="hidden")
        page.tab.wait_for_selector("button:text-is('Continue')")
        assert page.text() and page.tab.input_value("#prompt") == "not sent yet"


def test_chats_of_the_terminal_are_read_searched_edited_and_branched(
    slow: Any, open_page: OpenPage, data: Path
) -> None:
    chat = stored_chat(data, "What is a quokka?", ANSWER)
    page = open_page(slow)
    page.tab.fill("#search", "quokka")
    page.tab.click("#chats .open:has-text('quokka')")
    page.tab.wait_for_selector(".assistant .code")
    assert page.tab.evaluate("location.hash") == f"#{chat}"
    assert page.tab.locator(".body math").count() == 2 and page.tab.locator(".body .t-k").count() == 2
    page.tab.click("button:text-is('Edit')")
    page.tab.fill("#prompt", "What is a wombat?")
    page.tab.click("#send")
    page.tab.wait_for_selector(".user .body:text-is('What is a wombat?')")
    page.answered()
    page.tab.locator(".user button[aria-label='Previous version']").click()
    page.tab.wait_for_selector(".assistant .code")
    page.tab.click("button:text-is('Branch')")
    page.tab.wait_for_selector("#title:has-text('(fork)')")
    page.tab.click("#chats .shown .more")
    page.tab.fill("#chat-title", "Marsupials")
    page.tab.fill("#chat-tags", "zoo")
    page.tab.click("dialog[open] button:text-is('Save')")
    page.tab.wait_for_selector("#chats .shown:has-text('Marsupials')")
    page.tab.click("#chats .shown .more")
    page.tab.click("dialog[open] button:text-is('Delete')")
    page.tab.wait_for_selector("#toast:has-text('is deleted')")
    page.tab.click("#toast button")
    page.tab.fill("#search", "#zoo")
    page.tab.wait_for_selector("#chats .open:has-text('Marsupials')")


def test_code_is_copied(slow: Any, open_page: OpenPage, data: Path) -> None:
    chat = stored_chat(data, "Code?", ANSWER)
    page = open_page(slow, f"/#{chat}", permissions=["clipboard-read", "clipboard-write"])
    page.tab.click("button[aria-label='Copy the code']")
    page.tab.wait_for_selector("#toast:has-text('The code is copied')")
    assert page.tab.evaluate("navigator.clipboard.readText()") == "def add(a, b):\n    return a + b\n"


def test_settings_and_files_go_with_the_prompt(slow: Any, open_page: OpenPage, tmp_path: Path) -> None:
    file = tmp_path / "note.txt"
    file.write_text("The note.", encoding="utf-8")
    page = open_page(slow)
    page.tab.click("#settings")
    page.tab.click("#presets button:text-is('greedy')")
    page.tab.fill("#p-max_tokens", "abc")
    page.tab.click("#settings-form button:text-is('Save')")
    page.tab.set_input_files("#picker", file)
    page.tab.wait_for_selector("#files:has-text('note.txt')")
    page.send("Read this")
    page.tab.wait_for_selector("#toast:has-text('max_tokens must be a whole number')")
    page.tab.click("#settings")
    page.tab.fill("#p-max_tokens", "5")
    page.tab.click("#settings-form button:text-is('Save')")
    page.tab.click("#send")
    page.answered()
    assert page.tab.locator(".user .chip").inner_text() == "note.txt"
    page.tab.click("#settings")
    page.tab.wait_for_selector("#settings-dialog[open]")
    assert page.tab.input_value("#p-max_tokens") == "5" and page.tab.input_value("#p-temperature") == "0.0"
    page.tab.click("#settings-close")


def test_the_model_dialog_lists_and_changes_models(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.tab.wait_for_function("() => document.getElementById('model').title")
    page.tab.keyboard.press("Alt+m")
    page.tab.wait_for_selector(
        "#models li:has-text('stories260K'):has-text(' memory')"
    )  # needed, or taken if it is loaded
    page.tab.wait_for_selector("#suggestions li:has-text('qwen3:0.6b'):has-text('to download'):has-text('needs')")
    page.tab.wait_for_selector("#free:has-text('of memory is free')")
    page.tab.click("#models button[aria-label='Use: tinystories656K-Q8_0']")
    page.tab.wait_for_selector("#model:has-text('tinystories656K')")
    page.tab.click("#model")
    page.tab.fill("#pull-name", "http://127.0.0.1:1/x")
    page.tab.click("#pull button")
    page.tab.wait_for_function("() => document.getElementById('pull-text').textContent.length > 5")
    page.tab.keyboard.press("Escape")


def test_hostile_answers_do_nothing(slow: Any, open_page: OpenPage, data: Path) -> None:
    chat = stored_chat(data, "\n\n".join(HOSTILE), "\n\n".join(HOSTILE), *HOSTILE[:20])
    page = open_page(slow, f"/#{chat}")
    page.tab.wait_for_selector(".assistant .body p")
    page.tab.wait_for_timeout(300)
    found = page.tab.evaluate(
        "() => [...document.querySelectorAll('#log script, #log img, #log iframe, #log svg, #log object, #log [style],"
        " #log [onclick], #log [onerror], #log [onload], #log [onmouseover], #log [href^=javascript]')]"
        ".map(e => e.outerHTML)"
    )
    assert found == []
    hrefs = page.tab.evaluate("() => [...document.querySelectorAll('#log a')].map(a => a.protocol)")
    assert set(hrefs) <= {"http:", "https:", "mailto:"}


def test_the_key_is_asked_for_and_kept_for_this_visit_only(
    browser: Any, start_server: Any, open_page: OpenPage, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.write_text("sesame\n", encoding="utf-8")
    with start_server("--api-key-file", str(file), LOCALLLM_MAX_TOKENS="5") as server:
        page = open_page(server)
        addresses: list[str] = []
        page.tab.on("request", lambda request: addresses.append(request.url))
        page.tab.fill("#key", "wrong")
        page.tab.click("#key-form button")
        page.tab.wait_for_selector("#key-text:has-text('does not know this key')")
        page.tab.fill("#key", "sesame")
        page.tab.click("#key-form button")
        page.send("Hello")
        page.answered()
        assert page.tab.evaluate("[sessionStorage.key, localStorage.getItem('key')]")[1] is None
        page.tab.reload()
        page.answered()
        assert not page.tab.locator("#key-dialog").is_visible()
        assert not any("sesame" in address for address in addresses)


@pytest.mark.parametrize(("width", "height"), [(390, 844), (768, 1024), (1024, 768), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_has_no_serious_fault_of_accessibility(
    slow: Any, open_page: OpenPage, data: Path, width: int, height: int, scheme: str
) -> None:
    if not AXE:
        pytest.skip("TEST_AXE does not name axe-core's script (make test-page does)")
    chat = stored_chat(data, "Show me everything", ANSWER)
    page = open_page(
        slow, f"/#{chat}", viewport={"width": width, "height": height}, color_scheme=scheme, bypass_csp=True
    )
    page.tab.wait_for_selector(".assistant .code")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tab.evaluate(Path(AXE).read_text(encoding="utf-8"))
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: page.tab.click("#settings"),
        lambda: (page.tab.click("#settings-close"), page.tab.click("#model")),
    ]
    for step in steps:
        step()
        page.tab.wait_for_timeout(200)
        result = page.tab.evaluate("axe.run()")
        serious = [one for one in result["violations"] if one["impact"] in ("serious", "critical")]
        assert serious == [], json.dumps(serious, indent=1)[:3000]


def test_the_first_paint_is_light(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.tab.wait_for_function("() => document.getElementById('model').title")
    sizes = page.tab.evaluate(
        "() => performance.getEntries().filter(e => !e.name.includes('/api/')).map(e => e.transferSize).filter(Boolean)"
    )
    assert len(sizes) >= 3 and sum(sizes) < 600_000


def test_a_picture_is_attached_where_the_model_sees_none(slow: Any, open_page: OpenPage, tmp_path: Path) -> None:
    file = tmp_path / "dot.png"
    file.write_bytes(
        base64.b64decode(
            "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
        )
    )
    page = open_page(slow)
    page.tab.set_input_files("#picker", file)
    page.send("What is this?")
    page.tab.wait_for_selector("#toast:has-text('reads text only')")
    assert page.tab.input_value("#prompt") == "What is this?" and page.tab.locator("#files li").count() == 1


def test_the_keyboard_is_enough(slow: Any, open_page: OpenPage, data: Path) -> None:
    stored_chat(data, "Reachable by keys", "Yes.")
    page = open_page(slow)
    page.tab.wait_for_selector("#chats .open:has-text('Reachable by keys')")
    page.tab.keyboard.press("Alt+s")
    page.tab.keyboard.type("Reachable")
    page.tab.wait_for_function("() => document.querySelectorAll('#chats .open').length === 1")
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector(".user .body:has-text('Reachable by keys')")
    page.tab.focus("#prompt")
    page.tab.keyboard.press("ArrowUp")
    page.tab.wait_for_selector("#editing:visible")
    page.tab.keyboard.press("Escape")
    page.tab.wait_for_selector("#editing", state="hidden")
    assert httpx.get(slow.url + "/health", timeout=PATIENCE_S).status_code == 200


NOTE = "eggs\nflour\n"
EDITOR = {
    "plain": "There are no tools here.",
    "0": call("edit_file", path="list.txt", old_text="flour", new_text="sugar <b>and</b> salt"),
    "1": "The list was looked after.",
}


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kitchen")


@pytest.fixture(scope="module")
def tooled(browser: Any, start_server: Any, tmp_path_factory: pytest.TempPathFactory, kitchen: Path) -> Iterator[Any]:
    model = write_scripted_model(tmp_path_factory.mktemp("scripted") / "editor.gguf", EDITOR)
    with start_server("--model", str(model), "--page-tools", str(kitchen), models=()) as running:
        yield running


def test_a_tool_is_shown_allowed_and_undone(tooled: Any, open_page: OpenPage, kitchen: Path) -> None:
    file = kitchen / "list.txt"
    file.write_text(NOTE, encoding="utf-8")
    page = open_page(tooled)
    page.tab.click("#tools:has-text('Tools: off')")
    page.tab.wait_for_selector("#tools[aria-pressed='true']:has-text('Tools: on')")
    page.send("Mind the list")
    page.tab.wait_for_selector("#asking:visible #question:has-text('Make this change?')")
    assert page.tab.locator("#preview .t-gi").all_inner_texts()[0].strip() == "+sugar <b>and</b> salt"
    assert page.tab.locator("#preview .t-gd").all_inner_texts()[0].strip() == "-flour"
    page.tab.keyboard.press("Enter")  # meant for the prompt: it approves nothing
    page.tab.reload()  # the question is still there
    page.tab.wait_for_selector("#choices button:text-is('Always allow in this folder: edit_file *.txt')")
    assert file.read_text(encoding="utf-8") == NOTE
    page.tab.click("#choices button:text-is('Allow once')")
    page.tab.wait_for_selector(".assistant .body:has-text('The list was looked after.')")
    assert page.tab.locator("#asking").is_hidden() and "sugar" in file.read_text(encoding="utf-8")
    page.tab.click("button[aria-label='Undo the last change of a file']")
    page.tab.wait_for_selector("dialog[open]:has-text('The change is undone')")
    assert file.read_text(encoding="utf-8") == NOTE
    page.tab.click("dialog[open] button:text-is('Close')")


def test_a_tool_is_refused_with_a_reason_and_stopped(tooled: Any, open_page: OpenPage, kitchen: Path) -> None:
    file = kitchen / "list.txt"
    file.write_text(NOTE, encoding="utf-8")
    page = open_page(tooled, viewport={"width": 390, "height": 844})
    page.tab.click("#tools")
    page.send("Mind the list")
    page.tab.wait_for_selector("#asking:visible")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tab.fill("#reason", "Flour is needed.")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector(".tool summary:has-text('The user says: Flour is needed.')")
    page.answered(2)
    page.tab.click(".assistant button:text-is('Regenerate') >> nth=0")
    page.tab.wait_for_selector("#asking:visible")
    page.tab.click("#stop")
    page.tab.wait_for_selector(".tool summary:has-text('The user stopped before this call.')")
    assert file.read_text(encoding="utf-8") == NOTE and page.tab.locator("#asking").is_hidden()


def test_a_server_without_tools_shows_no_switch(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.tab.wait_for_selector("#model:has-text('stories'), #model:has-text('builtin')")
    page.tab.wait_for_timeout(200)
    assert page.tab.locator("#tools").is_hidden()


def test_a_persona_and_a_prompt_are_saved_and_used(slow: Any, open_page: OpenPage) -> None:
    page = open_page(slow)
    page.tab.wait_for_selector("#prompts:visible")
    page.tab.fill("#prompt", "Explain this to a child: ")
    page.tab.click("#prompts")
    page.tab.fill("dialog[open] input", "child")
    page.tab.click("dialog[open] button:text-is('Save the prompt below')")
    page.tab.wait_for_selector("#toast:has-text('The prompt is saved')")
    page.tab.fill("#prompt", "")
    page.tab.click("#prompts")
    page.tab.click("dialog[open] button:text-is('child')")
    assert page.tab.input_value("#prompt") == "Explain this to a child:"
    page.tab.click("#settings")
    page.tab.fill("#p-system", "You are a poet.")
    page.tab.fill("#persona-name", "poet")
    page.tab.click("#persona-save")
    page.tab.wait_for_selector("#toast:has-text('The persona poet is saved')")
    page.tab.click("#settings-close")
    page.tab.click("#settings")
    page.tab.wait_for_function("() => document.getElementById('p-system').value === ''")
    page.tab.click("#personas button:text-is('poet')")
    page.tab.wait_for_function("() => document.getElementById('p-system').value === 'You are a poet.'")
    page.tab.click("#settings-close")


def test_a_chat_is_exported_and_imported(slow: Any, open_page: OpenPage, data: Path, tmp_path: Path) -> None:
    chat = stored_chat(data, "To be kept", ANSWER)
    page = open_page(slow, f"/#{chat}")
    page.tab.wait_for_selector(".assistant .code")
    for form, ending in (("Markdown", ".md"), ("JSON", ".json")):
        page.tab.click("#chats .shown .more")
        with page.tab.expect_download() as download:
            page.tab.click(f"dialog[open] button:text-is('Export as {form}')")
        path = tmp_path / f"chat{ending}"
        download.value.save_as(path)
        assert download.value.suggested_filename == f"to-be-kept{ending}"
        page.tab.keyboard.press("Escape")
    assert "def add(a, b):" in (tmp_path / "chat.md").read_text(encoding="utf-8")
    exported = json.loads((tmp_path / "chat.json").read_text(encoding="utf-8"))
    exported["messages"][0]["content"] = "Once kept elsewhere"
    exported["title"] = "From elsewhere"
    (tmp_path / "chat.json").write_text(json.dumps(exported), encoding="utf-8")
    page.tab.set_input_files("#import-file", tmp_path / "chat.json")
    page.tab.wait_for_selector("dialog[open]:has-text('1 new chat')")
    page.tab.click("dialog[open] button:text-is('Import')")
    page.tab.wait_for_selector("#title:has-text('From elsewhere')")
    page.tab.wait_for_selector(".user .body:has-text('Once kept elsewhere')")


def test_the_answer_shows_what_the_model_saw_of_a_picture(slow: Any, open_page: OpenPage, data: Path) -> None:
    store = SessionStore(data / "localllm" / "sessions.db")
    with contextlib.closing(store):
        chat = store.create(MODEL, {})
        asked = store.add(Message(0, chat, None, Role.USER, "What is this?")).id
        stats = {"pictures": ["4,000 x 3,000, seen as 896 x 896, 256 tokens"], "unseen": ["other<b>.png"]}
        store.add(Message(0, chat, asked, Role.ASSISTANT, "A cat.", finish_reason="stop", stats=stats))
    page = open_page(slow, f"/#{chat}")
    page.tab.wait_for_selector(".assistant .quiet:text-is('Picture: 4,000 x 3,000, seen as 896 x 896, 256 tokens')")
    page.tab.wait_for_selector(".assistant .quiet:text-is('Not shown to the model: other<b>.png')")
