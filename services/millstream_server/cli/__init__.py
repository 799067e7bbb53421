"""The `millstream` command: start a suite, chat with it, list models, check a machine."""
