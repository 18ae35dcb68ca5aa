"""Ollama's protocol."""
