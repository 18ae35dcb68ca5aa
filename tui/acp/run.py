"""Runs the agent until its client leaves, and frees its resources afterwards."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from acp import Agent
from acp import run_agent as serve

from localllm.chats import SessionStore
from localllm.chats.parameters import Parameters
from localllm.settings import Settings, load_settings, sessions_path
from tui.acp.agent import LocalAgent
from tui.acp.stdio import StandardStreams
from tui.backend import Backend
from tui.backends import open_backend, remembered_as


def run_agent(model: str | None, flags: Mapping[str, object], sessions: Path | None, host: str | None) -> None:
    """Serve until stdin ends or a signal comes. For the arguments, see tui.start.run_chat."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)

    def settings_with(model_settings: Mapping[str, object]) -> Settings:
        return load_settings(flags, model=model_settings)

    settings = settings_with({})
    with contextlib.ExitStack() as stack:
        store = SessionStore(sessions or sessions_path(), must_save=sessions is not None)
        stack.callback(store.close)
        backend = open_backend(settings, settings_with, host)
        stack.callback(backend.close)
        usual, remembered = Parameters.from_settings(settings), remembered_as(settings.remote, host)
        asyncio.run(_serve(backend, store, model or "", usual, remembered))


async def _serve(backend: Backend, store: SessionStore, model: str, usual: Parameters, remembered: str) -> None:
    streams = StandardStreams()
    agent = LocalAgent(backend, store, model, usual, remembered)
    present = asyncio.current_task()
    if sys.platform != "win32" and present is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, present.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):  # a signal
            await serve(_as_agent(agent), streams)
    finally:
        agent.close()


def _as_agent(agent: LocalAgent) -> Agent:
    """The protocol class of the SDK also lists methods that an agent need not have."""
    return agent  # type: ignore[return-value]
