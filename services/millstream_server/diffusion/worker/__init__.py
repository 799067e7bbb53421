"""Making images and videos on a worker's host: a queue for the device, files, storage."""
