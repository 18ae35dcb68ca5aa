"""Load tests of servers that speak Ollama's or OpenAI's protocol."""
