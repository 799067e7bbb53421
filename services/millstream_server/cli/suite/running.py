"""The files by which other commands find the suite that `millstream up` runs, and its key."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the commands that read the file need no more than it
    from millstream_server.cli.suite.plan import SuitePlan

_FILE = "suite.json"
KEY_FILE = "admin-key"
"""Holds the key of the suite's admin ports; only the user who started the suite can read it."""


class NoSuiteError(ValueError):
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
    admin_key: str = field(default="", repr=False)
    """What its admin ports ask for; every run has its own."""

    @property
    def workers(self) -> tuple[RunningService, ...]:
        """All but the Processor."""
        return tuple(service for service in self.services if service.role != "processor")

    @property
    def processor_address(self) -> str:
        """The Processor's; empty: it isn't known."""
        return next((one.address for one in self.services if one.role == "processor"), "")


@contextlib.contextmanager
def announced(plan: SuitePlan, admin_key: str) -> Iterator[None]:
    """Keep the files in the suite's log directory as long as the suite runs."""
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
    key_file, file = options.log_dir / KEY_FILE, options.log_dir / _FILE
    _write_secret(key_file, admin_key)
    whole = file.with_suffix(".new")
    content = {"pid": os.getpid(), "services": [asdict(service) for service in services]}
    whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    whole.replace(file)  # so that no reader sees half of it
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        key_file.unlink(missing_ok=True)


def _write_secret(file: Path, text: str) -> None:
    """Write a file that never was another user's to read or to make."""
    whole = file.with_suffix(".new")
    whole.unlink(missing_ok=True)
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as secret:
        secret.write(text)
    whole.replace(file)


def find_suite(log_dir: Path) -> RunningSuite:
    """Return the suite whose `up` writes its logs to ``log_dir``.

    Raises:
        NoSuiteError: there is none, or it is another user's.
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
    try:
        key = (log_dir / KEY_FILE).read_text(encoding="utf-8").strip()
    except FileNotFoundError:  # as services of tests have it
        key = ""
    except PermissionError as error:
        raise NoSuiteError(
            f"the suite that has its logs in {log_dir} is another user's: only the user who "
            f"started it may operate it, since only they can read {log_dir / KEY_FILE}"
        ) from error
    return RunningSuite(services, key)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True
