"""A Processor's links to its workers, and each ability's calls on them."""
