"""What a prefix cache holds: block hashes, and the events that tell of changes."""
