"""The stream between a Processor and a worker: many requests up, columnar step frames down."""
