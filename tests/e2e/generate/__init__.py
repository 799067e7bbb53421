"""A package, so that pytest ends its engines with its last test and not with the session."""
