"""The HTTP door in a process of its own: its endpoints call Processors by gRPC."""
