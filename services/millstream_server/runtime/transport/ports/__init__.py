"""New connections: sockets, TLS, and what a connection speaks; HTTP/1.1 for probes."""
