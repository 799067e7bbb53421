"""`millstream up` over stand-in services.

`python stand_in_up.py LOG_DIR '{"decode-1": ["--flag"]}'`
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from millstream_server.cli.plan import Service, UpOptions, make_plan
from millstream_server.cli.ports import PortClaims
from millstream_server.cli.up import up
from millstream_server.worker.settings import EngineKind

_STAND_IN = Path(__file__).with_name("stand_in_service.py")


def main() -> int:
    log_dir, flags = Path(sys.argv[1]), json.loads(sys.argv[2])
    options = UpOptions(
        model=Path("unused"), model_name="stand-in", engine=EngineKind.SIMULATED, log_dir=log_dir
    )

    def command(service: Service) -> list[str]:
        return [sys.executable, str(_STAND_IN), service.address, *flags.get(service.name, [])]

    with PortClaims() as ports:
        plan = make_plan(options, ports)
        return asyncio.run(up(plan, command))


if __name__ == "__main__":
    sys.exit(main())
