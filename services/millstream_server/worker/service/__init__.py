"""WorkerService: what this worker is, its load, its cached blocks, how far its model is loaded."""

SERVICE = "millstream.v1.WorkerService"
LONG_STREAMS = frozenset(
    f"{SERVICE}/{method}"
    for method in ("WatchLoad", "WatchWorkerInfo", "WatchKvEvents", "WatchLoadProgress")
)
"""Methods whose streams last as long as a connection, or a start; they get no spans."""
