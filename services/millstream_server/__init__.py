"""Millstream: disaggregated serving of large language models as gRPC microservices."""

import os

# gRPC's core writes a line of its own for every TLS handshake that fails, past our log and its
# bounds. It reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
