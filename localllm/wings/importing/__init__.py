"""Models in safetensors, as they are published for training: read within bounds, and written as one GGUF file."""
