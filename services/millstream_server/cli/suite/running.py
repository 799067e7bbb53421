"""The file by which other commands find the suite that `millstream up` runs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the commands that read the file need no more than it
    from millstream_server.cli.suite.plan import SuitePlan

DEFAULT_LOG_DIR = Path(".millstream/logs")
"""Of `up`."""
_FILE = "suite.json"


class NoSuiteError(Exception):
    """No suite runs there; the text has advice."""


@dataclass(frozen=True, slots=True)
class RunningService:
    """A service of a running suite."""

    name: str
    role: str
    """Its module's name, such as "decode"."""
    model: str
    """Empty for the Processor."""
    address: str
    admin: str
    """Its admin address."""


@dataclass(frozen=True, slots=True)
class RunningSuite:
    """What `up` runs, workers first and the Processor last."""

    services: tuple[RunningService, ...]

    @property
    def workers(self) -> tuple[RunningService, ...]:
        """All but the Processor."""
        return tuple(service for service in self.services if service.role != "processor")


@contextlib.contextmanager
def announced(plan: SuitePlan) -> Iterator[None]:
    """Keep the file in the suite's log directory as long as the suite runs."""
    options, services = plan.options, []
    for service in plan.services:
        model = service.further.name if service.further else options.model_name
        services.append(
            RunningService(
                name=service.name,
                role=service.role,
                model="" if service is plan.processor else model,
                address=service.client_address,
                admin=service.admin_address,
            )
        )
    options.log_dir.mkdir(parents=True, exist_ok=True)
    file = options.log_dir / _FILE
    whole = file.with_suffix(".new")
    content = {"pid": os.getpid(), "services": [asdict(service) for service in services]}
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole.replace(file)  # so that no reader sees half of it
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def find_suite(log_dir: Path) -> RunningSuite:
    """Return the suite whose `up` writes its logs to ``log_dir``.

    Raises:
        NoSuiteError: there is none.
    """
    none = (
        f"no suite of `millstream up` has its logs in {log_dir}: run this command in the directory "
        "where `up` was started, or give --log-dir"
    )
    try:
        content = json.loads((log_dir / _FILE).read_text(encoding="utf-8"))
        pid = int(content["pid"])
        services = tuple(RunningService(**service) for service in content["services"])
    except FileNotFoundError:
        raise NoSuiteError(none) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NoSuiteError(f"{log_dir / _FILE} can't be read: {error}") from error
    if not _runs(pid):  # it was killed, and its services with it
        raise NoSuiteError(none)
    return RunningSuite(services)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
