"""The agent's methods of the protocol."""

import functools
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

from acp import PROTOCOL_VERSION, Client, schema
from acp import RequestError as ClientError

from localllm.background import in_thread
from localllm.chats import SessionStore
from localllm.chats.conversation import Conversation
from localllm.chats.parameters import Parameters
from localllm.errors import LocalLLMError, RequestError
from tui.acp.content import Blocks, Servers, servers_of
from tui.acp.models import SessionLoader
from tui.acp.session import MODES, EditorSession
from tui.backend import Backend, LoadedInfo, short_name

_FOLDER = "agent folder "  # the store's key for a session's folder, followed by the session's id
_INVALID, _FAILED, _NOT_FOUND = -32602, -32603, -32002

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def _reported(method: Method) -> Method:
    """Turn errors that a user can cause into the protocol's, with their message."""

    @functools.wraps(method)
    async def called(*given: Any, **named: Any) -> Any:
        try:
            return await method(*given, **named)
        except LocalLLMError as error:
            raise ClientError(_INVALID if isinstance(error, RequestError) else _FAILED, str(error)) from error

    return cast("Method", called)


class LocalAgent:
    """Serves one client. All sessions share the backend's model. The caller closes backend and store after `close`."""

    def __init__(
        self, backend: Backend, store: SessionStore, model: str, parameters: Parameters, remembered_as: str
    ) -> None:
        """model: "" selects the last one used. remembered_as: the store's key for it."""
        self._store, self._remembered_as = store, remembered_as
        self._parameters = replace(parameters, tools=True)
        self._models = SessionLoader(backend, self._use)
        self._sessions: dict[str, EditorSession] = {}
        self._client: Client
        self._of_editor = schema.ClientCapabilities()
        if name := model or store.remembered(remembered_as):
            self._models.begin(name, pull=bool(model))

    def on_connect(self, client: Client) -> None:
        self._client = client

    def close(self) -> None:
        """End what runs; sessions without messages are removed."""
        self._models.close()
        for session in self._sessions.values():
            session.close()
            if not session.conversation.messages and session.conversation.session_id is not None:
                self._store.delete(session.conversation.session_id)
                self._store.forget(f"{_FOLDER}{session.id}")

    @_reported
    async def initialize(
        self, protocol_version: int, client_capabilities: schema.ClientCapabilities | None = None, **_: Any
    ) -> schema.InitializeResponse:
        self._of_editor = client_capabilities or schema.ClientCapabilities()
        return schema.InitializeResponse(
            protocol_version=min(protocol_version, PROTOCOL_VERSION) or PROTOCOL_VERSION,
            agent_info=schema.Implementation(name="localllm", title="localllm", version=version("localllm")),
            agent_capabilities=schema.AgentCapabilities(
                load_session=True,
                prompt_capabilities=schema.PromptCapabilities(image=True, audio=True, embedded_context=True),
                mcp_capabilities=schema.McpCapabilities(http=True),
                session_capabilities=schema.SessionCapabilities(list=schema.SessionListCapabilities()),
            ),
            auth_methods=[],
        )

    @_reported
    async def new_session(
        self,
        cwd: str,
        additional_directories: list[str] | None = None,
        mcp_servers: Servers | None = None,
        **_: Any,
    ) -> schema.NewSessionResponse:
        folder = _folder(cwd, additional_directories)
        conversation = Conversation(self._store, self._models.name, self._parameters)
        conversation.session_id = self._store.create(self._models.name, self._parameters.stored())
        session = self._add(conversation, folder, mcp_servers)
        options = await self._options(session)
        await session.show_commands()
        return schema.NewSessionResponse(session_id=session.id, modes=_modes(session), config_options=options)

    @_reported
    async def load_session(
        self,
        cwd: str,
        session_id: str,
        mcp_servers: Servers | None = None,
        additional_directories: list[str] | None = None,
        **_: Any,
    ) -> schema.LoadSessionResponse:
        folder = _folder(cwd, additional_directories)
        if session_id not in self._stored():
            raise ClientError(_NOT_FOUND, f"There is no chat {session_id[:64]!r}.")
        if old := self._sessions.get(session_id):
            if old.busy:
                raise RequestError("An answer is still running in this session. Cancel it first.")
            old.close()
        conversation = Conversation(self._store, self._models.name, self._parameters)
        conversation.open(int(session_id))
        session = self._add(conversation, folder, mcp_servers)
        options = await self._options(session)
        await session.replay()
        await session.show_commands()
        return schema.LoadSessionResponse(modes=_modes(session), config_options=options)

    @_reported
    async def list_sessions(self, cwd: str | None = None, **_: Any) -> schema.ListSessionsResponse:
        """The chats that were held through this protocol, newest first."""
        folders = self._store.remembered_with(_FOLDER)
        wanted = os.path.realpath(cwd) if cwd else None
        found = [(one, folders.get(f"{_FOLDER}{one.id}")) for one in self._store.sessions()]
        return schema.ListSessionsResponse(
            sessions=[
                schema.SessionInfo(
                    session_id=str(one.id),
                    cwd=folder,
                    title=one.title,
                    updated_at=datetime.fromtimestamp(one.updated, UTC).isoformat(),
                )
                for one, folder in found
                if folder and wanted in (None, folder)
            ]
        )

    @_reported
    async def set_session_mode(self, session_id: str, mode_id: str, **_: Any) -> schema.SetSessionModeResponse:
        self._session(session_id).set_mode(mode_id)
        return schema.SetSessionModeResponse()

    @_reported
    async def set_config_option(
        self, config_id: str, session_id: str, value: str | bool, **_: Any
    ) -> schema.SetSessionConfigOptionResponse:
        session, text = self._session(session_id), str(value)
        match config_id:
            case "mode":
                session.set_mode(text)
            case "thinking":
                session.set_thinking(text)
            case "model":
                if any(each.busy for each in self._sessions.values()):
                    raise RequestError("An answer is still running. Cancel it before another model is loaded.")
                await self._models.begin(text, pull=False)
            case _:
                raise RequestError(f"There is no option {config_id[:64]!r}. Choose one of: mode, model, thinking.")
        return schema.SetSessionConfigOptionResponse(config_options=await self._options(session))

    @_reported
    async def prompt(self, session_id: str, prompt: Blocks, **_: Any) -> schema.PromptResponse:
        return schema.PromptResponse(stop_reason=await self._session(session_id).prompt(prompt))

    async def cancel(self, session_id: str, **_: Any) -> None:
        if session := self._sessions.get(session_id):
            session.cancel()

    def _session(self, session_id: str) -> EditorSession:
        if session_id not in self._sessions:
            raise ClientError(_NOT_FOUND, f"There is no session {session_id[:64]!r} in this run. Load it first.")
        return self._sessions[session_id]

    def _add(self, conversation: Conversation, folder: Path, servers: Servers | None) -> EditorSession:
        session = EditorSession(
            self._client, self._models, conversation, folder, servers_of(servers or ()), self._of_editor
        )
        self._sessions[session.id] = session
        self._store.remember(f"{_FOLDER}{session.id}", str(session.folder.root))
        if info := self._models.backend.info:
            _apply(conversation, self._models.name, info)
        return session

    def _stored(self) -> set[str]:
        return {str(one.id) for one in self._store.sessions(limit=-1)} | self._sessions.keys()

    def _use(self, name: str, info: LoadedInfo) -> None:
        """Remember a model that was loaded, and switch all sessions to it."""
        self._store.remember(self._remembered_as, name)
        for session in self._sessions.values():
            _apply(session.conversation, name, info)

    async def _options(self, session: EditorSession) -> list[schema.SessionConfigOptionSelect | Any]:
        """The session's options with their current values."""
        present = self._models.name
        choices = await in_thread(lambda: self._models.backend.models(present or None))
        names = [one.name for one in choices if one.here]
        if present not in names:
            names.insert(0, present)
        modes = [(mode.id, mode.name, mode.description) for mode in MODES]
        thinking = [("default", "The model's default", None), ("on", "On", None), ("off", "Off", None)]
        models = [(name, short_name(name) or "none chosen", None) for name in names]
        return [
            _select("mode", "Mode", "mode", session.mode, modes),
            _select("model", "Model", "model", present, models),
            _select("thinking", "Thinking", "thought_level", session.thinking, thinking),
        ]


def _select(
    identity: str, name: str, category: Any, present: str, values: Sequence[tuple[str, str, str | None]]
) -> schema.SessionConfigOptionSelect:
    options = [
        schema.SessionConfigSelectOption(value=value, name=shown, description=say) for value, shown, say in values
    ]
    return schema.SessionConfigOptionSelect(
        id=identity, name=name, category=category, type="select", current_value=present, options=options
    )


def _modes(session: EditorSession) -> schema.SessionModeState:
    return schema.SessionModeState(current_mode_id=session.mode, available_modes=list(MODES))


def _folder(cwd: str, more: list[str] | None) -> Path:
    """The session's folder. Raises RequestError if it is none, or if further ones are wanted."""
    if more:
        raise RequestError("A session has one folder here; additionalDirectories are not supported.")
    if not os.path.isabs(cwd) or not os.path.isdir(cwd):
        raise RequestError(f"{cwd[:200]}: is not the absolute path of a folder.")
    return Path(cwd)


def _apply(conversation: Conversation, name: str, info: LoadedInfo) -> None:
    """Switch a conversation to a model, with its defaults; tools stay as they are."""
    if info.settings is not None:
        conversation.set_defaults(replace(Parameters.from_settings(info.settings), tools=True))
    conversation.set_model(name)
