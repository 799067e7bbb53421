"""Starts processes by forking them from one that has imported what they need."""
