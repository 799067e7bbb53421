"""SGLang's embedding models and cross-encoders behind `vectors.embedder.Embedder`."""
