"""A service process for tests of `millstream up`: health, phases in the log, a drain.

`python stand_in_service.py ADDRESS [--flags]`; SIGUSR1 makes it die.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer


def _log(text: str) -> None:
    sys.stderr.write(f"2026-01-01 level=INFO logger=stand_in {text}\n")
    sys.stderr.flush()


def _die() -> None:
    _log("the engine died")
    os._exit(9)


async def _serve(args: argparse.Namespace) -> None:
    health = HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_insecure_port(args.address)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _die)
    _log('phase="loading the model"')
    if args.die_loading:
        _log("the weights are of the wrong shape")
        raise SystemExit(3)
    await asyncio.sleep(args.load_s)
    _log('phase="serving"')
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await stop.wait()
    _log(f"draining with key {os.environ['MILLSTREAM_TICKET_KEY']}")
    await asyncio.sleep(args.slow_drain)
    _log("drained")
    await server.stop(0)


def _spawn(pid_file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    pid_file.write_text(str(child.pid))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--load-s", type=float, default=0.3)
    parser.add_argument("--die-loading", action="store_true")
    parser.add_argument("--slow-drain", type=float, default=0.0)
    parser.add_argument("--spawn", type=Path)
    args = parser.parse_args()
    if args.spawn:
        _spawn(args.spawn)
    asyncio.run(_serve(args))


if __name__ == "__main__":
    main()
