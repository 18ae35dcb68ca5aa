"""Models on remote servers: `openai` for OpenAI's protocol, `ollama` for Ollama's.

`connection` has HTTP requests that any thread may cancel, `stream` answers in progress, `fields` OpenAI's request
bodies.
"""
