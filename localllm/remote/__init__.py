"""Servers that speak OpenAI's protocol (vLLM, SGLang, llama.cpp, Ollama and others), as a source of answers.

connection is one HTTP request that any thread may end; server asks for answers and reads them as they come.
"""
