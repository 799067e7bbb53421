"""`millstream up` over stand-in services, for the tests of `up`.

`python stand_in.py up LOG_DIR '{"decode-1": ["--flag"]}'` runs it, with an encode worker if
there are flags for one, maybe none. A service of it runs as
`python stand_in.py ADDRESS [--flags]`: health, phases in the log, a drain; SIGUSR1 makes it die.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer


def _log(text: str) -> None:
    sys.stderr.write(f"2026-01-01 10:00:00,000 INFO stand_in: {text}\n")
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
    _log('phase phase="loading the model"')
    if args.die_loading:
        while not args.die_loading.exists():
            await asyncio.sleep(0.05)
        _log("the weights are of the wrong shape")
        raise SystemExit(3)
    await asyncio.sleep(args.load_s)
    _log("phase phase=serving")
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    await stop.wait()
    _log(f"draining with key {os.environ['MILLSTREAM_TICKET_KEY']}")
    _log(f"operated by {os.environ['MILLSTREAM_ADMIN_KEYS']}")
    await asyncio.sleep(args.slow_drain)
    _log("drained")
    await server.stop(0)


def _spawn(pid_file: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    whole = pid_file.with_suffix(".new")
    whole.write_text(str(child.pid))
    whole.rename(pid_file)


def serve() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--load-s", type=float, default=0.3)
    parser.add_argument("--die-loading", type=Path, help="while loading, once this file exists")
    parser.add_argument("--slow-drain", type=float, default=0.0)
    parser.add_argument("--spawn", type=Path)
    args = parser.parse_args()
    if args.spawn:
        _spawn(args.spawn)
    asyncio.run(_serve(args))


def write_vision_config(model: Path) -> None:
    """Write what a plan reads of a model that takes images."""
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": 5,
        "video_token_id": 6,
        "text_config": {"vocab_size": 321},
        "vision_config": {"out_hidden_size": 64, "spatial_merge_size": 2},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text("{}")


def run_up() -> int:
    # Not for the services: theirs is a quick start.
    from millstream_server.cli.suite.plan import (  # noqa: PLC0415
        PlannedService,
        PortClaims,
        UpOptions,
        make_plan,
    )
    from millstream_server.cli.up import up  # noqa: PLC0415

    log_dir, flags = Path(sys.argv[2]), json.loads(sys.argv[3])
    options = UpOptions(
        model=log_dir,
        model_name="stand-in",
        engine="simulated",
        encode=1 if "encode-1" in flags else 0,
        log_dir=log_dir,
    )
    if options.encode:
        write_vision_config(log_dir)

    def command(service: PlannedService) -> list[str]:
        return [sys.executable, __file__, service.address, *flags.get(service.name, [])]

    with PortClaims() as ports:
        plan = make_plan(options, ports)
        return asyncio.run(up(plan, command))


if __name__ == "__main__":
    if sys.argv[1] == "up":
        if os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # Ctrl-C signals this process, as in a shell
        sys.exit(run_up())
    serve()
