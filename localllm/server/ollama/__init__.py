"""Ollama's protocol: what its routes take and give."""
