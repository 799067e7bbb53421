"""gRPC over HTTP/2 on asyncio: sockets and messages are ours, all protocol state is h2's."""
