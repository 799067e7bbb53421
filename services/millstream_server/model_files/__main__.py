"""`python -m millstream_server.model_files`: fetch a model's files, or wait for them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from millstream_server.model_files.fetch import Options, fetch, remove_siblings, wait_for
from millstream_server.model_files.hub import Hub
from millstream_server.model_files.s3 import S3
from millstream_server.model_files.source import FetchError, HubUri, ModelUri, Source, parse_uri
from millstream_server.runtime.telemetry import log

_EPILOG = """\
exit codes: 0 the files are there; 1 failed, a further attempt goes on from here; 2 somebody has to
change something first (URI, token, directory, disk); 143 stopped by SIGTERM.

environment: HF_TOKEN, HF_ENDPOINT; AWS_ENDPOINT_URL and what else boto3 reads; HTTPS_PROXY.
"""


def main(argv: list[str] | None = None) -> int:
    """Run one of the two commands; return the exit code."""
    args = _parser().parse_args(argv)
    log.configure("info", args.log_format)
    try:
        if args.command == "wait":
            wait_for(args.directory, timeout_s=args.timeout_s, period_s=args.period_s)
        else:
            _fetch(args)
    except FetchError as error:
        log.get_log(__name__).error("the model's files aren't there", reason=error)
        return error.exit_code
    return 0


def _fetch(args: argparse.Namespace) -> None:
    uri = parse_uri(args.uri)
    options = Options(
        weights=not args.without_weights,
        all_files=args.all_files,
        parallel=args.parallel,
        retries=args.retries,
        period_s=args.period_s,
    )
    fetch(str(uri), lambda: _source(uri), args.directory, options)
    if args.prune:
        remove_siblings(args.directory)


def _source(uri: ModelUri) -> Source:
    return Hub(uri) if isinstance(uri, HubUri) else S3(uri)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m millstream_server.model_files",
        description="Bring a model's files into a directory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("fetch", help="download; goes on where an earlier attempt stopped")
    one.add_argument("uri", metavar="URI", help="hf://org/name[@revision] or s3://bucket/path")
    one.add_argument(
        "--without-weights",
        action="store_true",
        help="configuration and tokenizer only, which is all that a Processor reads",
    )
    one.add_argument(
        "--all-files",
        action="store_true",
        help="also the copies of the weights for other programs (*.bin, *.pth, onnx, …)",
    )
    one.add_argument(
        "--prune",
        action="store_true",
        help="then remove the directories beside DIR that this program filled",
    )
    one.add_argument("--parallel", type=_count, default=8, help="files at once (default: 8)")
    one.add_argument("--retries", type=int, default=4, help="further attempts (default: 4)")
    other = commands.add_parser("wait", help="wait until another process has filled a directory")
    other.add_argument(
        "--timeout-s",
        type=float,
        default=3600.0,
        help="longest time in which nothing further arrives (default: 3600)",
    )
    for command in (one, other):
        command.add_argument("directory", metavar="DIR", type=Path)
        command.add_argument(
            "--period-s", type=float, default=5.0, help="between lines of progress (default: 5)"
        )
        command.add_argument("--log-format", choices=("text", "json"), default="text")
    return parser


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _stopped(number: int, _: object) -> NoReturn:
    # As the first process of a container it would otherwise ignore SIGTERM.
    os.write(2, b"stopped by a signal; a further attempt goes on from here\n")
    os._exit(128 + number)


if __name__ == "__main__":
    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, _stopped)
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for downloads that can't be stopped
