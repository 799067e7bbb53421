"""What `millstream up` starts: its plan, its processes, their progress."""
