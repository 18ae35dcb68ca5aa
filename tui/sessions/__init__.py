"""Stored conversations: an SQLite file, written as the conversation proceeds."""

from tui.sessions.records import PASTED, Attachment, Message, Role, SessionSummary
from tui.sessions.store import SessionStore

__all__ = ["PASTED", "Attachment", "Message", "Role", "SessionStore", "SessionSummary"]
