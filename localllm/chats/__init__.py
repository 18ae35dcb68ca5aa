"""Stored conversations: an SQLite file, written as the conversation proceeds."""

from localllm.chats.records import OUTPUT, PASTED, Attachment, Message, Role, SessionSummary
from localllm.chats.store import SessionStore

__all__ = ["OUTPUT", "PASTED", "Attachment", "Message", "Role", "SessionStore", "SessionSummary"]
