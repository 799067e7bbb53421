"""What the workers' prefix caches hold, as a Processor knows it from their KV events."""
