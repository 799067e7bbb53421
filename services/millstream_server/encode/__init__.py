"""Encode service: turns images and videos into what a model reads in place of their tokens."""
