"""Routes of llama.cpp's server that the other protocols lack."""
