"""Decodes images and videos in child processes, which can be limited and killed."""
