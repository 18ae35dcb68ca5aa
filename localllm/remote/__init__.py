"""Models on remote servers: `openai` for OpenAI's protocol, `ollama` for Ollama's.

`connection`: HTTP requests that any thread may cancel. `stream`: running answers. `fields`: OpenAI request bodies.
"""
