"""`millstream admin`: operates running servers on their admin ports."""
