"""Connections that neither send nor take anything are cut off."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.server.limits import HEADER_SECONDS, STALLED_SECONDS


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with limits on the time to send a request's headers and to take what is written."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._headers_due: asyncio.TimerHandle | None = self._abort_after(HEADER_SECONDS)
        self._writing_due: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._headers_arrived()
        self._caught_up()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take a part of a request; its headers are due some time after their first byte."""
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._headers_arrived()
        elif self._headers_due is None:
            self._headers_due = self._abort_after(HEADER_SECONDS)

    def pause_writing(self) -> None:
        """The reader is slow."""
        super().pause_writing()
        self._writing_due = self._abort_after(STALLED_SECONDS)

    def resume_writing(self) -> None:
        """The reader has caught up."""
        super().resume_writing()
        self._caught_up()

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        transport: Any = self.transport
        return self.loop.call_later(seconds, transport.abort)

    def _headers_arrived(self) -> None:
        if self._headers_due:
            self._headers_due.cancel()
            self._headers_due = None

    def _caught_up(self) -> None:
        if self._writing_due:
            self._writing_due.cancel()
            self._writing_due = None
