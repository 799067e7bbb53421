"""Chooses the workers for a request: filter → score → pick."""
