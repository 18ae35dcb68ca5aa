"""The REST endpoint: Ollama's protocol, OpenAI's and Anthropic's messages, on one engine."""
