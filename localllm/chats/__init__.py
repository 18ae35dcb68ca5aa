"""Stored conversations: an SQLite file, written as the conversation proceeds."""

from localllm.chats.records import PASTED, Attachment, Message, Role, SessionSummary
from localllm.chats.store import SessionStore

__all__ = ["PASTED", "Attachment", "Message", "Role", "SessionStore", "SessionSummary"]
