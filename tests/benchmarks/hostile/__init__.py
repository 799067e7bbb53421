"""Hostile and greedy callers beside a sound client, on the simulated suite."""
