"""What operators can do with a running engine."""
