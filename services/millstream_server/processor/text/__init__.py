"""A model's text handling: chat template, tokenizer, detokenizer, stop strings."""
