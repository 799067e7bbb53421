"""What operators can do with a running engine: Protocols, one per ability, and their plain types."""
