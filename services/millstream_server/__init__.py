"""Millstream: disaggregated serving of large language models as gRPC microservices."""
