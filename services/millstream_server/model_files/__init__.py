"""Brings a model's files into a directory, before a service that reads them starts."""
