"""What every service's `__main__` does around its own app."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

from millstream_server.runtime import log, settings
from millstream_server.runtime.service_settings import ServiceSettings

logger = logging.getLogger(__name__)
S = TypeVar("S", bound=ServiceSettings)


def main(
    settings_cls: type[S],
    app: Callable[[S], Coroutine[Any, Any, int]],
    *,
    prog: str,
    description: str,
) -> NoReturn:
    """Read settings, run the app on its own event loop, exit with its code.

    Exit codes: 0 ended as asked, 1 failed while running, 2 a setting is wrong, 3 ended as asked but
    with requests cut off.
    """
    # What the imports left behind lives as long as the process: not for the collector to walk.
    gc.collect()
    gc.freeze()
    loaded = settings.load(settings_cls, prog=prog, description=description)
    log.configure(loaded.log_level, loaded.log_format)
    try:
        code = uvloop.run(app(loaded))
    except settings.SettingsError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        code = 2
    except OSError as error:
        logger.error("%s", error)  # noqa: TRY400 - the sentence says it all
        code = 1
    raise SystemExit(code)
