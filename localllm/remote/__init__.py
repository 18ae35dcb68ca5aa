"""Models that a server elsewhere computes. `openai` speaks OpenAI's protocol, `ollama` Ollama's.

connection is one HTTP request that any thread may end, stream an answer on its way, fields a request in OpenAI's words.
"""
