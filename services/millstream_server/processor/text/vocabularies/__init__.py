"""Vocabularies in other files than tokenizer.json, made into what the tokenizers library runs."""
