"""gRPC: channels, servers, layers around RPCs, statuses, health, reflection, load reports."""
