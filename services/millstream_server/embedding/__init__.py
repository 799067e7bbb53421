"""The Embedding service: texts to vectors and scores."""
