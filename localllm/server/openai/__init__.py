"""OpenAI's protocol: chat completions, completions, embeddings, responses, models."""
