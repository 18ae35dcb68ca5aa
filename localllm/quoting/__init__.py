"""Excerpts of documents, and a check of what answers quote from them."""
