"""The front door: text in, text out. Templates, tokens, routing, detokenization, stops, usage."""
