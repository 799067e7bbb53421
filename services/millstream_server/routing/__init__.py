"""Which workers get a request: filter → score → pick."""
