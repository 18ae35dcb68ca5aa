"""Conversations that are kept: an SQLite file, written as they happen."""

from tui.sessions.records import Attachment, Message, Role, SessionSummary
from tui.sessions.store import SessionStore

__all__ = ["Attachment", "Message", "Role", "SessionStore", "SessionSummary"]
