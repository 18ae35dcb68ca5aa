"""The REST server: the protocols of Ollama, OpenAI, Anthropic and llama.cpp in front of local or remote models."""
