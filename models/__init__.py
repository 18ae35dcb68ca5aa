"""Model architectures: from a GGUF file's metadata to the steps that compute the next token's logits."""
