"""The Processor: serves clients in text; templates, tokenization, admission, routing, stops."""
