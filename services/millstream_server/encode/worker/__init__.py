"""Encoding of images and videos on a worker's host: items in slots of a stream, leased results."""
