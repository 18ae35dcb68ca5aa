"""Searching in a chat, and in all of them."""

import asyncio

from rich.style import Style as RichStyle
from textual.pilot import Pilot
from textual.widgets import Collapsible, Input, Static

from localllm.answer.tool_calls import ToolCall
from localllm.chats import Message, Role, SessionStore
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, loaded, until
from tests.tui.conftest import MakeApp
from tui.screens.chat import ChatScreen
from tui.screens.sessions import SessionsScreen
from tui.widgets.frame import CURRENT, MATCH
from tui.widgets.markdown import AnswerMarkdown
from tui.widgets.transcript import WINDOW

ANSWER = """\
The **harbour** is old.

- one Harbour
- two

```python
harbour = 1
```

| harbour | b |
|---------|---|
| c       | d |
"""


def styles(chat: ChatScreen, style: str) -> list[str]:
    """The texts on the screen with this style."""
    found = []
    for part in chat.transcript.walk_children():
        if isinstance(part, Static):
            content = part.visual
            spans = getattr(content, "spans", [])
            found += [content.plain[span.start : span.end] for span in spans if span.style == style]  # type: ignore[attr-defined]
        elif isinstance(part, AnswerMarkdown):
            looks = ("reverse",) if style == CURRENT else ("reverse", "underline")
            found += [text for text, look in drawn(part) if look.bold and any(getattr(look, name) for name in looks)]
    return found


def drawn(answer: AnswerMarkdown) -> list[tuple[str, RichStyle]]:
    """An answer's texts and how each is drawn."""
    lines = [answer.render_line(y) for y in range(answer.size.height)]
    return [(part.text, part.style or RichStyle.null()) for line in lines for part in line]


def colours(chat: ChatScreen, word: str) -> set[str]:
    """How a word of an answer is drawn."""
    return {str(look) for answer in chat.query(AnswerMarkdown) for text, look in drawn(answer) if word in text}


def count(chat: ChatScreen) -> str:
    return str(chat.find.count.content)


async def search(pilot: Pilot[None], chat: ChatScreen, text: str) -> None:
    await pilot.press("ctrl+f", *text)
    await until(pilot, lambda: chat.find.query_one(Input).value == text)
    await until(pilot, lambda: all(worker.is_finished for worker in chat.find.workers if worker.group == "find"))


def test_matches_are_marked_and_counted_and_typing_types(make_app: MakeApp) -> None:
    backend = FakeBackend([said(ANSWER), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "Where is the harbour?")
            await search(pilot, chat, "HARBOUR")
            await until(pilot, lambda: count(chat) == "5 of 5" and styles(chat, CURRENT) == ["harbour"])
            assert styles(chat, MATCH) == ["harbour", "harbour", "Harbour", "harbour", "harbour"]
            await until(pilot, lambda: any("reverse" in style for style in colours(chat, "harbour")))
            await pilot.press("up")
            await until(pilot, lambda: count(chat) == "4 of 5" and styles(chat, CURRENT) == ["harbour"])
            await pilot.press("up")
            await until(pilot, lambda: count(chat) == "3 of 5" and styles(chat, CURRENT) == ["Harbour"])
            await pilot.press("enter", "ctrl+f", "enter")
            await until(pilot, lambda: count(chat) == "5 of 5")
            await pilot.press("backspace", "x")
            await until(pilot, lambda: count(chat) == "not found" and not styles(chat, MATCH))
            await pilot.press("escape")
            await until(pilot, lambda: not chat.find.display and chat.focused is chat.prompt)
            await pilot.press(*"nN/")
            await until(pilot, lambda: chat.prompt.text == "nN/")

    asyncio.run(flow())


def long_chat(store: SessionStore, turns: int) -> int:
    """A chat with a rare word in its first answer, and in a tool's result in the middle."""
    session = store.create("tiny", {})
    parent: int | None = None
    for turn in range(turns):
        texts = [(Role.USER, f"Question {turn}"), (Role.ASSISTANT, "A needle." if turn == 0 else f"Answer {turn}.")]
        if turn == turns // 2:
            texts.append((Role.TOOL, "line\n" * 40 + "a needle in a fold"))
        for role, text in texts:
            calls = (ToolCall("search_files", {"text": "x"}),) if role is Role.TOOL else ()
            ended = "stop" if role is Role.ASSISTANT else None
            message = Message(0, session, parent, role, text, finish_reason=ended, calls=calls)
            parent = store.add(message).id
    return session


def test_a_distant_match_is_mounted_and_the_chat_continues_at_its_end(make_app: MakeApp, store: SessionStore) -> None:
    long_chat(store, 60)
    backend = FakeBackend([said("Last."), ended()])

    async def flow() -> None:
        app = make_app(backend)
        app.begin_with(True, None)
        async with app.run_test() as pilot:
            chat = await loaded(pilot)
            await search(pilot, chat, "needle")
            await until(pilot, lambda: count(chat) == "2 of 2" and styles(chat, CURRENT) == ["needle"])
            folded = chat.transcript.query(".tool").first().query_one(Collapsible)
            assert not folded.collapsed
            await until(pilot, lambda: seen(chat))
            await pilot.press("up")
            await until(pilot, lambda: count(chat) == "1 of 2" and styles(chat, CURRENT) == ["needle"])
            assert chat.transcript.views[0].message.content == "Question 0"
            assert len(chat.transcript.views) < 60
            chat.transcript.scroll_end(animate=False)  # which mounts what follows
            await until(pilot, lambda: len(chat.transcript.views) > WINDOW)
            await pilot.press("escape")
            await ask(pilot, "One more")
            contents = [view.message.content for view in chat.transcript.views]
            assert contents[-4:] == ["Question 59", "Answer 59.", "One more", "Last."]

    def seen(chat: ChatScreen) -> bool:
        """Whether the highlighted match is on the screen."""
        static = next(static for static in chat.transcript.query(Static) if "needle in a fold" in str(static.visual))
        at = static.region.y + 40
        return chat.transcript.region.y <= at < chat.transcript.region.bottom

    asyncio.run(flow())


def test_tags_filter_the_list_of_chats_and_a_search_ignores_case(make_app: MakeApp, store: SessionStore) -> None:
    backend = FakeBackend([said("Über allen Gipfeln"), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(100, 30)) as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "First")
            chat.prompt.insert("/tag #Work poem")
            await pilot.press("enter")
            await until(pilot, lambda: "#poem  #work" in str(chat.title_bar.label.content))
            await pilot.press("ctrl+n")
            await ask(pilot, "Second")
            await pilot.press("f3")
            await until(pilot, lambda: isinstance(pilot.app.screen, SessionsScreen))
            screen = pilot.app.screen
            assert isinstance(screen, SessionsScreen)
            for typed, titles in (
                ("#work", ["First"]),
                ("#work #none", []),
                ("ÜBER", ["First"]),
                ("", ["Second", "First"]),
            ):
                screen.field.value = typed
                await until(pilot, lambda titles=titles: [each.title for each in screen.sessions] == titles)
            await pilot.press("ctrl+t", *"later -nosuch", "enter")
            await until(pilot, lambda: screen.edited is None)
            await pilot.press("ctrl+t", *"later", "enter")
            await until(pilot, lambda: screen.sessions[0].tags == ("later",))
            assert "#later" in str(screen.entries.get_option_at_index(0).prompt)
            await pilot.press("escape")
            await until(pilot, lambda: "#later" in str(chat.title_bar.label.content))
            chat.prompt.insert("/tag -later")
            await pilot.press("enter")
            await until(pilot, lambda: chat.conversation.tags == ())

    asyncio.run(flow())
    assert store.tags() == [("poem", 1), ("work", 1)]
