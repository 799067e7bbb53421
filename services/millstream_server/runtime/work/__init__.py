"""Work on what callers send, off the event loop: one pool of threads, fair between callers."""
