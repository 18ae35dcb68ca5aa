"""Files, pictures and long pasted texts attached to a message."""

import asyncio
import base64
import json
import shutil
from pathlib import Path

import pytest
from textual.events import Paste
from textual.geometry import Region
from textual.pilot import Pilot
from textual.widgets import Static

from localllm.answer.request import AnswerRequest
from localllm.chats import SessionStore
from localllm.chats.exporting import as_markdown
from localllm.chats.importing import exported
from localllm.chats.parameters import Parameters
from localllm.errors import RequestError
from localllm.files import with_slashes
from localllm.settings import Settings
from localllm.text import human_bytes
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.oracle import llama_oracle
from tests.pdf_files import BLANK, DRAWING, pdf_of
from tests.picture_files import png
from tests.projector_files import write_projector
from tests.tui.chatting import answered, ask, chat_of, loaded, say, until
from tests.tui.conftest import DrawAs, MakeApp
from tui.attachments import find_attachments, mention_of
from tui.engine_backend import EngineBackend
from tui.terminal import Abilities
from tui.widgets.messages import AnswerView, without
from tui.widgets.pictures import HalfBlocks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "fox.png").write_bytes(png(1))
    (tmp_path / "a note.txt").write_text("three short words", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_picture_is_drawn_where_the_terminal_can_and_a_damaged_one_is_not(
    make_app: MakeApp, folder: Path, draw_as: DrawAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    widgets = pytest.importorskip("textual_image.widget")
    renderables = pytest.importorskip("textual_image.renderable")
    monkeypatch.setattr(renderables, "Image", renderables.SixelImage)
    monkeypatch.setattr(widgets, "Image", widgets.SixelImage)
    draw_as(Abilities(draws=True))

    async def flow() -> None:
        async with make_app(FakeBackend([said("A fox."), ended()])).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "What is @fox.png?")
            await until(pilot, lambda: [one for one in chat.query(".message .picture") if one.size.width])
            (sixels,) = chat.query_one(".message .picture").children
            await until(pilot, lambda: sixels.size.height)
            lines = sixels.render_lines(Region(0, 0, *sixels.size))
            assert any("\x1bP" in segment.text for line in lines for segment in line)

    asyncio.run(flow())


def test_a_draft_shows_its_pictures_before_it_is_sent(make_app: MakeApp, folder: Path, draw_as: DrawAs) -> None:
    draw_as(Abilities())
    for number in range(6):
        (folder / f"{number}.png").write_bytes(png(number))
    backend = FakeBackend([said("A fox."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test(size=(120, 30)) as pilot:
            chat = await loaded(pilot)

            def captions() -> list[str]:
                return [str(one.content) for one in chat.previews.query(".preview Static").results(Static)]

            assert not chat.previews.display
            chat.prompt.insert("What is @fox.png")
            seen = "fox.png · 256 tokens\n40 x 30, seen as 32 x 24"
            await until(pilot, lambda: captions() == [seen])
            await until(pilot, lambda: [one for one in chat.previews.query(HalfBlocks) if one.size.width])
            chat.set_parameters(chat.conversation.parameters.with_text("image_max_tokens", "70", Parameters()))
            await until(pilot, lambda: captions() == [seen.replace("256", "70")])
            chat.prompt.insert("".join(f" @{number}.png" for number in range(6)))
            await until(pilot, lambda: len(captions()) == 4)
            assert str(chat.previews.query_one(".more", Static).content) == "and 3 more"
            chat.prompt.text = "What is @fox.png?"
            await until(pilot, lambda: len(captions()) == 1)
            await pilot.press("enter")
            await answered(pilot)
            await until(pilot, lambda: not chat.previews.display)
            assert backend.requests[0].messages[0]["content"][0]["data"] == png(1)

    asyncio.run(flow())


def test_a_draft_shows_its_pictures_where_tokens_are_not_counted(
    make_app: MakeApp, folder: Path, draw_as: DrawAs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a server of another machine. A low screen has no room for them."""
    draw_as(Abilities())
    backend = FakeBackend()
    monkeypatch.setattr(backend, "count_tokens", lambda _text: None)

    async def flow() -> None:
        async with make_app(backend).run_test(size=(80, 24)) as pilot:
            chat = await loaded(pilot)
            chat.prompt.insert("What is @fox.png")
            await until(pilot, lambda: [one for one in chat.previews.query(HalfBlocks) if one.size.width])
            await pilot.resize_terminal(80, 15)
            await until(pilot, lambda: not chat.previews.display)
            assert chat.prompt.size.height

    asyncio.run(flow())


async def paste(pilot: Pilot[None], text: str) -> str:
    """Paste into the prompt and return the prompt's text."""
    prompt = chat_of(pilot).prompt
    before = prompt.text
    pilot.app.post_message(Paste(text))
    await until(pilot, lambda: prompt.text != before)
    return prompt.text


async def resend(pilot: Pilot[None], backend: FakeBackend) -> None:
    """Send the prompt as the first message, and wait for the answer."""
    await pilot.press("enter")
    await until(pilot, lambda: len(backend.requests) == 2)
    await answered(pilot)


def test_a_picture_goes_with_its_token_count_and_is_kept(make_app: MakeApp, store: SessionStore, folder: Path) -> None:
    backend = FakeBackend([said("A fox."), ended()], [said("Still a fox."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "What is @fox.png?")
            shown = str(chat.query_one(".attachment", Static).content)
            assert shown == f"▣ fox.png · {human_bytes(len(png(1)))} · 256 tokens"
            (folder / "fox.png").unlink()
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            await resend(pilot, backend)

    asyncio.run(flow())
    for request in backend.requests:
        parts = [{"type": "image", "data": png(1)}, {"type": "text", "text": "What is @fox.png?"}]
        assert request.messages == [{"role": "user", "content": parts}]
    (session,) = store.sessions()
    messages = store.path(session.id)
    assert messages[0].pictures() == (png(1),)
    assert "*Picture: fox.png*" in as_markdown("t", messages)
    text = exported(store.summary(session.id), messages, messages[-1].id)
    assert base64.b64decode(json.loads(text)["messages"][0]["attachments"][0]["picture"]) == png(1)


def test_a_text_only_model_refuses_images_and_the_prompt_stays(make_app: MakeApp, folder: Path) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend(sees=False)).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "What is @fox.png?")
            await until(pilot, lambda: chat.query(".failure"))
            assert "fox.png cannot be attached. tiny reads text only." in str(chat.query_one(".failure").render())
            assert chat.prompt.text == "What is @fox.png?"
            assert not chat.conversation.messages

    asyncio.run(flow())


def test_a_chat_with_a_picture_continues_with_a_text_only_model(
    make_app: MakeApp, folder: Path, store: SessionStore
) -> None:
    backend = FakeBackend(*[[said("A fox."), ended()]] * 3)

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, "What is @fox.png?")
            backend.sees = False
            await chat.load_model("blind")
            await until(pilot, lambda: backend.loaded == ["tiny", "blind"] and not chat.loader.busy)
            assert chat.notice.content == "blind reads text only: it answers without this chat's pictures."
            await ask(pilot, "Are you sure?")
            first, last = (view for view in chat.transcript.views if isinstance(view, AnswerView))
            assert "without" not in str(first.query_one(".figures", Static).content)
            assert str(last.query_one(".figures", Static).content).startswith(
                "Answered without fox.png: this model reads text only.\n"
            )
            backend.sees = True
            await chat.load_model("tiny")
            await until(pilot, lambda: backend.loaded[2:] == ["tiny"] and not chat.loader.busy)
            await ask(pilot, "And now?")

    asyncio.run(flow())
    blind = backend.requests[1]
    assert [message["content"] for message in blind.messages] == [
        "Picture fox.png: it cannot be shown to you.\n\nWhat is @fox.png?",
        "A fox.",
        "Are you sure?",
    ]
    assert backend.requests[2].messages[0]["content"][0] == {"type": "image", "data": png(1)}
    (session,) = store.sessions()
    assert [message.stats.get("unseen") for message in store.path(session.id)[1::2]] == [[], ["fox.png"], []]


def test_many_pictures_are_counted_where_an_answer_went_without_them() -> None:
    assert without(["a.png", "b.png"]) == "a.png, b.png"
    assert without(["a.png", "b.png", "c.png", "d.png"]) == "4 pictures"


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("photo.webp", b"RIFF\xff\xff\xff\xffWEBP", "photo.webp cannot be attached. The image is"),
        ("broken.png", b"\x89PNG\r\n\x1a\n", "is damaged|unknown format"),
        ("song.mp3", b"ID3\x03\xff\xff", "song.mp3 cannot be attached. The file is a sound, but no WAV"),
        ("cut.wav", b"RIFF\0\0\0\0WAVEfmt ", "cut.wav cannot be attached. The sound is damaged"),
        ("all.zip", b"PK\x03\x04\xff", "Only text, PDF, DOCX, pictures and WAV"),
        ("broken.pdf", b"%PDF-1.7\n%%EOF", "broken.pdf: cannot be read as PDF: "),
        ("named.docx", b"just text", "named.docx: cannot be read as DOCX: "),
        ("blank.pdf", pdf_of([[]]), "blank.pdf: has no text"),
        ("long.txt", b"x" * (2 * 2**20 + 1), "more than 2 MiB of text"),
    ],
)
def test_what_cannot_be_attached(name: str, content: bytes, why: str, folder: Path) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(RequestError, match=why):
        find_attachments(f"See @{name}.", len, len)


def test_documents_are_attached_with_their_text_and_weighed_before(make_app: MakeApp, folder: Path) -> None:
    docx = pytest.importorskip("docx")
    pytest.importorskip("pypdf")
    letter = docx.Document()
    letter.add_paragraph("the pier is closed")
    letter.save(str(folder / "a letter.docx"))
    (folder / "Tide.PDF").write_bytes(pdf_of([["high water 4:20"], ["low water 10:31"]]))
    backend = FakeBackend([said("Yes."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            chat.prompt.insert('Sum up @Tide.PDF and @"a letter.docx"')
            await until(pilot, lambda: "with Tide.PDF, a letter.docx" in str(chat.prompt.border_subtitle))
            await pilot.press("enter")
            await answered(pilot)
            sent = backend.requests[0].messages[-1]["content"]
            assert sent.index("high water 4:20\n\nlow water 10:31") < sent.index("the pier is closed")
            assert all(file.tokens for file in chat.conversation.messages[0].attachments)

    asyncio.run(flow())


def test_pages_without_text_are_attached_as_pictures(make_app: MakeApp, folder: Path, store: SessionStore) -> None:
    pytest.importorskip("pypdf")
    pytest.importorskip("pypdfium2")
    (folder / "scan.pdf").write_bytes(pdf_of([DRAWING, BLANK, DRAWING]))
    (folder / "tide.pdf").write_bytes(pdf_of([["high water 4:20"], DRAWING]))
    backend = FakeBackend([said("Yes."), ended()], [said("Again."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            chat.prompt.insert("Compare @scan.pdf and @tide.pdf")
            await until(pilot, lambda: "with scan.pdf, tide.pdf" in str(chat.prompt.border_subtitle))
            assert int(str(chat.prompt.border_subtitle).split()[0]) > 3 * 256
            await pilot.press("enter")
            await answered(pilot)
            lines = [str(line.content) for line in chat.query(".attachment").results(Static)]
            assert lines[0].startswith("▤ tide.pdf · ") and lines[1:] == [
                "▣ scan.pdf · 2 pages as pictures · 512 tokens", "▣ tide.pdf · 1 page as pictures · 256 tokens",
            ]  # fmt: skip
            (folder / "scan.pdf").unlink()
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            await resend(pilot, backend)

    asyncio.run(flow())
    for request in backend.requests:
        *images, text = request.messages[0]["content"]
        assert [image["data"][:3] for image in images] == [b"\xff\xd8\xff"] * 3
        assert "File tide.pdf:\n```\nhigh water 4:20\n\n[page 2: a picture]\n```" in text["text"]
    (session,) = store.sessions()
    names = [file.label for file in store.path(session.id)[0].attachments]
    assert names == ["scan.pdf, page 1", "scan.pdf, page 3", "tide.pdf", "tide.pdf, page 2"]
    assert "*Picture: scan.pdf, page 3*" in as_markdown("t", store.path(session.id))


def test_pages_and_models_that_read_text_only(make_app: MakeApp, folder: Path) -> None:
    pytest.importorskip("pypdf")
    pytest.importorskip("pypdfium2")
    (folder / "scan.pdf").write_bytes(pdf_of([DRAWING]))
    (folder / "tide.pdf").write_bytes(pdf_of([["high water 4:20"], DRAWING]))
    backend = FakeBackend([said("At 4:20."), ended()], sees=False)

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "Read @scan.pdf")
            await until(pilot, lambda: chat.query(".failure"))
            told = str(chat.query_one(".failure").render())
            assert "scan.pdf has no text, only pictures of pages. tiny reads text only." in told
            chat.prompt.text = ""
            await ask(pilot, "Read @tide.pdf")
            (view,) = (view for view in chat.transcript.views if isinstance(view, AnswerView))
            figures = str(view.query_one(".figures", Static).content)
            assert figures.startswith("Answered without tide.pdf, page 2: this model reads text only.\n")

    asyncio.run(flow())
    sent = backend.requests[0].messages[0]["content"]
    assert "high water 4:20" in sent and "Picture tide.pdf, page 2: it cannot be shown to you." in sent


def test_an_edited_message_keeps_what_it_still_names(make_app: MakeApp, folder: Path) -> None:
    backend = FakeBackend([said("One."), ended()], [said("Two."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            await ask(pilot, '@fox.png and @"a note.txt"')
            (folder / "new.txt").write_text("new", encoding="utf-8")
            await pilot.press("ctrl+up", "ctrl+up", "ctrl+e")
            chat.prompt.text = '@"a note.txt" and @new.txt'
            await resend(pilot, backend)

    asyncio.run(flow())
    (message,) = backend.requests[1].messages
    assert "File a note.txt:\n```\nthree short words" in message["content"]
    assert "File new.txt:\n```\nnew" in message["content"]


def test_a_path_that_is_pasted_becomes_a_mention(make_app: MakeApp, folder: Path) -> None:
    plain, spaced = folder / "fox.png", folder / "a note.txt"
    assert mention_of(f"'{spaced}' ") == f'@"{spaced}"'
    assert mention_of(str(spaced).replace(" ", "\\ ")) == f'@"{spaced}"'
    assert mention_of(plain.as_uri()) == f"@{with_slashes(str(plain))}"
    for url in (spaced.as_uri(), f"file://localhost{spaced.as_uri()[7:]}"):
        assert mention_of(url) == f'@"{with_slashes(str(spaced))}"'
    assert "%20" in spaced.as_uri()
    (folder / "a%20b.txt").write_text("as it is")
    assert mention_of(f"{folder}/a%20b.txt") == f"@{folder}/a%20b.txt"  # a path, not a URL
    assert mention_of("fox.png") is None  # a word that is also a file's name stays a word
    assert mention_of(str(folder)) is None

    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            await loaded(pilot)
            await pilot.press(*"see")
            assert await paste(pilot, str(plain)) == f"see @{plain} "

    asyncio.run(flow())


def test_a_long_text_that_is_pasted_becomes_an_attachment(make_app: MakeApp) -> None:
    backend = FakeBackend([said("One."), ended()])
    text = "\n".join(f"line {number}" for number in range(40))

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            assert await paste(pilot, "a short one") == "a short one"
            pasted = await paste(pilot, text.replace("\n", "\r"))
            name = pasted.split("@")[1].strip()
            assert pasted == f"a short one @{name} "
            await ask(pilot, "")
            assert name.startswith("pasted-40-lines-")
            assert "▤ pasted 40 lines · 80 tokens" in str(chat.query_one(".attachment", Static).content)

    asyncio.run(flow())
    assert f"```\n{text}\n```" in backend.requests[0].messages[0]["content"]


def test_a_picture_is_encoded_while_the_question_is_typed(make_app: MakeApp, folder: Path) -> None:
    backend = FakeBackend([said("A fox."), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            prompt = chat.prompt
            prompt.insert("What is @fox.png and @broken.png?")
            await until(pilot, lambda: "with fox.png" in str(prompt.border_subtitle))
            assert backend.seen == [png(1)] and backend.requests == []
            assert str(prompt.border_subtitle).startswith("261 tokens")
            prompt.insert(" Tell me.")
            await until(pilot, lambda: "263 tokens" in str(prompt.border_subtitle))
            assert backend.seen == [png(1)]
            draft, prompt.text = prompt.text, ""
            await say(pilot, "/set image_max_tokens 70")
            await until(pilot, lambda: chat.conversation.parameters.image_max_tokens == 70)
            prompt.insert(draft)
            await until(pilot, lambda: "77 tokens with fox.png" in str(prompt.border_subtitle))
            backend.sees = False
            prompt.insert(" Please.")
            chat.set_parameters(chat.conversation.parameters)
            await until(pilot, lambda: prompt.border_subtitle is None)

    (folder / "broken.png").write_bytes(b"no picture, and \xff no text")
    asyncio.run(flow())


@llama_oracle.needs_llama
def test_a_real_model_sees_the_picture(data_dir: Path, tmp_path: Path) -> None:
    model = shutil.copyfile(data_dir / "models" / "gguf" / "stories260K-F32.gguf", tmp_path / "model.gguf")
    write_projector(tmp_path / "mmproj-model.gguf")
    backend = EngineBackend(lambda _: Settings(disk_cache=False))
    try:
        backend.load(str(model), lambda what, share: None)
        assert backend.info is not None and backend.info.sees
        view = backend.see_picture(png(1))
        prompts = []
        for pictures in ((), (png(1),)):
            parts = [*({"type": "image", "data": data} for data in pictures), {"type": "text", "text": "Once upon"}]
            messages = [{"role": "user", "content": parts}]
            request = AnswerRequest(messages=messages, continues_text=True, sampling={"temperature": 0}, max_tokens=4)
            last = list(backend.submit(request))[-1]
            assert last.error is None
            prompts.append(last.counts.prompt)
    finally:
        backend.close()
    assert view is not None and view.tokens > 0
    assert prompts[1] >= prompts[0] + view.tokens


def test_our_own_engine_tells_that_it_reads_text_only(data_dir: Path) -> None:
    backend = EngineBackend(lambda _: Settings(backend="native", disk_cache=False))
    assert backend.see_picture(png(1)) is None  # unknown before a model is loaded
    try:
        backend.load(str(data_dir / "models" / "gguf" / "stories260K-F32.gguf"), lambda what, share: None)
        assert backend.info is not None and not backend.info.sees
        with pytest.raises(RequestError, match="reads text only"):
            backend.see_picture(png(1))
    finally:
        backend.close()
