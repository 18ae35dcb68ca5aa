"""Image encoders: from a projector file (mmproj) and a picture's pixels to rows of embeddings for a language model."""
