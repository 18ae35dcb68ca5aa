"""/save: the current model with this chat's messages and settings as a new model."""

import asyncio
from pathlib import Path

import pytest

from localllm.errors import RequestError
from localllm.library.behaviour import behaviour_of
from localllm.library.lookup import find
from localllm.library.modelfile import Modelfile
from localllm.settings import Settings
from tests.fakes.fake_backend import FakeBackend, ended, said
from tests.tui.chatting import ask, chat_of, loaded, say, until
from tests.tui.conftest import MakeApp
from tui.engine_backend import EngineBackend

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
RECIPE = Modelfile(system="You are terse.", parameters={"temperature": 0.1, "num_predict": 7}, messages=MESSAGES)


def test_what_was_said_and_changed_is_saved(make_app: MakeApp) -> None:
    backend = FakeBackend([said("Yo"), ended()])

    async def flow() -> None:
        async with make_app(backend).run_test() as pilot:
            chat = await loaded(pilot)
            for text in ("/set temperature 0.1", "/set max_tokens 7", "/set system You are terse."):
                await say(pilot, text)
            await until(pilot, lambda: chat.conversation.parameters.system)
            await ask(pilot, "Hi")
            await say(pilot, "/save mine")
            await until(pilot, lambda: backend.saved)

    asyncio.run(flow())
    assert backend.saved == [("mine", RECIPE)]


def test_a_save_needs_a_name(make_app: MakeApp) -> None:
    async def flow() -> None:
        async with make_app(FakeBackend()).run_test() as pilot:
            chat = await loaded(pilot)
            await say(pilot, "/save")
            await until(pilot, lambda: chat_of(pilot).query(".failure"))
            assert "/save NAME" in str(chat.query_one(".failure").render())

    asyncio.run(flow())


def test_a_saved_model_is_there_and_is_not_replaced(data_dir: Path, tmp_path: Path) -> None:
    settings = Settings(backend="native", disk_cache=False, model_store=str(tmp_path / "store"))
    backend = EngineBackend(lambda _: settings)
    with pytest.raises(RequestError, match="No model is loaded"):
        backend.save("mine", RECIPE)
    try:
        backend.load(str(data_dir / "models" / "gguf" / "stories260K-F32.gguf"), lambda what, share: None)
        backend.save("mine", RECIPE)
        with pytest.raises(RequestError, match="Model mine already exists"):
            backend.save("mine", RECIPE)
        assert "mine" in {choice.name.partition(":")[0] for choice in backend.models(None)}
        backend.load("mine", lambda what, share: None, pull=False)
        behaviour = behaviour_of(find("mine", settings))
        assert (behaviour.system, list(behaviour.messages)) == ("You are terse.", RECIPE.messages)
        assert behaviour.settings == {"temperature": 0.1, "max_tokens": 7}
    finally:
        backend.close()
