"""EmbeddingService at the Processor: texts are tokenized here, and forwarded to their workers."""
