"""Sampling flags, the same for chat and complete, and the options they become."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from millstream.v1 import processor_pb2, sampling_pb2

_UINT32_MAX = 2**32 - 1
_UINT64_MAX = 2**64 - 1


def whole_number(most: int, least: int = 0) -> Callable[[str], int]:
    """Make an argparse type; out-of-range values must fail here, not inside protobuf."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            message = f"{text!r} is not a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; one left out takes the model's own default."""
    group = parser.add_argument_group("sampling", "left out: the model's own defaults")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="nucleus mass, above 0 up to 1")
    group.add_argument(
        "--top-k", type=whole_number(_UINT32_MAX), metavar="K", help="0 switches it off"
    )
    group.add_argument(
        "--min-p", type=float, metavar="P", help="least probability relative to the likeliest"
    )
    group.add_argument(
        "--repetition-penalty", type=float, metavar="R", help="above 0 up to 2; 1 is neutral"
    )
    group.add_argument(
        "--max-new-tokens",
        type=whole_number(_UINT32_MAX),
        metavar="N",
        help="most tokens of an answer",
    )
    group.add_argument(
        "--seed",
        type=whole_number(_UINT64_MAX),
        metavar="N",
        help="same seed, same request: same answer (if the engine can)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer at this text; may be repeated",
    )


def generation_options(args: argparse.Namespace) -> processor_pb2.GenerationOptions:
    """Build the options; a flag that wasn't given stays unset."""
    sampling = sampling_pb2.SamplingParams()
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_new_tokens",
        "seed",
    ):
        value = getattr(args, name)
        if value is not None:
            setattr(sampling, name, value)
    return processor_pb2.GenerationOptions(sampling=sampling, stop=args.stop)
