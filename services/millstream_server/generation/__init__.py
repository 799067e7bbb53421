"""A text request in plain types: prompt, sampling, output, validation."""
