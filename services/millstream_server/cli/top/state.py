"""What is known of a worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream.v1 import worker_pb2


class Reach(enum.Enum):
    """Whether there is a connection."""

    CONNECTING = "connecting"
    """Not yet known."""
    REACHED = "reached"
    LOST = "lost"


@dataclass(slots=True)
class WorkerState:
    """A worker as its streams tell it; times are of `time.monotonic`."""

    address: str
    name: str = ""
    """In the table of `millstream up`."""
    reach: Reach = Reach.CONNECTING
    since_s: float = 0.0
    """When `reach` or `listed` changed last."""
    listed: bool = True
    """Whether discovery still names it."""
    serving: bool | None = None
    """Health of the whole server; None: not told yet."""
    conditions: tuple[str, ...] = ()
    """Health conditions, as far as the admin port is known; they count while it isn't serving."""
    draining: bool = False
    """It shuts down."""
    info: worker_pb2.WorkerInfo | None = None
    """The last one, also of a worker that is lost."""
    load: worker_pb2.LoadReport | None = None
    load_s: float = 0.0
    """When the report came."""
    progress: worker_pb2.WatchLoadProgressResponse | None = None
    came_back: str = ""
    """ "back": the same process is reached again; "restarted": another one."""
    problem: str = ""
    """Why it isn't reached, or doesn't say more."""

    @property
    def label(self) -> str:
        """What it is called on the screen."""
        return f"{self.name} {self.address}" if self.name else self.address

    @property
    def loading(self) -> bool:
        """Whether its model is being loaded."""
        return (
            self.progress is not None
            and self.progress.stage != worker_pb2.LOAD_STAGE_READY
            and self.serving is not True
        )

    @property
    def settled(self) -> bool:
        """Whether it has told what it can tell soon."""
        if self.reach is not Reach.REACHED:
            return self.reach is Reach.LOST
        told = self.info is not None and self.load is not None
        return self.loading or bool(self.problem) or self.draining or told
