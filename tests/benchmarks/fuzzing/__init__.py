"""Random requests for any gRPC service, and what no answer to them may be."""
