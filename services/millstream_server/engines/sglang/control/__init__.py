"""SGLang's operations as those of `millstream_server.control`."""
