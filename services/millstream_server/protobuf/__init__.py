"""Conversion between plain types and the messages between Processor and workers."""
