"""Hostile callers, or such that take too much, beside a normal client, on the simulated suite."""
