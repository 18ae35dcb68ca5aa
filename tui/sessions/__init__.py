"""Stored conversations: an SQLite file, written as the conversation proceeds."""

from tui.sessions.records import Attachment, Message, Role, SessionSummary
from tui.sessions.store import SessionStore

__all__ = ["Attachment", "Message", "Role", "SessionStore", "SessionSummary"]
