"""What operators can do with a running engine: a Protocol per ability, and plain types."""
