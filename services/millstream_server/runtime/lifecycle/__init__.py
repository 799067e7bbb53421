"""A service process from its settings to its exit: start, admin server, health, drain."""
