"""Folders of documents that answer questions: an index of their text, excerpts of it, checked quotations."""
