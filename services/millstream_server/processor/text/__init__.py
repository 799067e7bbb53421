"""Text in and out of a model: chat template, tokenizer, detokenizer, stop strings."""
