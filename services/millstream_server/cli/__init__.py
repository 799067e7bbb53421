"""The `millstream` command: start a suite, talk to it, look at it, check a machine."""
