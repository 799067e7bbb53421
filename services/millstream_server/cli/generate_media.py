"""`millstream image` and `millstream video`: make files from words, with a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from millstream.v1 import diffusion_pb2
from millstream_client import Client, GeneratedMedia, MediaFileError, MediaStream
from millstream_client.diffusion_requests import DiffusionKnobs
from millstream_server.cli.client import call_processor
from millstream_server.cli.flags import Commands, add_target, command, fail, flag, whole_number

_IMAGES = {".png": diffusion_pb2.IMAGE_FORMAT_PNG, ".webp": diffusion_pb2.IMAGE_FORMAT_WEBP}
_VIDEOS = (".mp4",)
_NOTES = "The same seed and settings give the same file. Ctrl-C stops the work within one step."
_IMAGE = f"""\
Make an image from words, or from an image and words.

{_NOTES}

examples:
  millstream image "a red circle on a white background" -o circle.png
  millstream image "a blue square" --seed 7 --steps 20 -n 4 -o square.webp
  millstream image "a green square" --input circle.png --strength 0.8 -o changed.png
"""
_VIDEO = f"""\
Make a video from words.

{_NOTES}

examples:
  millstream video "a ball that rolls" --frames 17 --fps 8 -o ball.mp4
"""


def add_image(commands: Commands) -> None:
    """Add the command that makes images."""
    parser = command(commands, "image", _run, _IMAGE)
    parser.set_defaults(suffixes=_IMAGES)
    _add_diffusion(parser, "PNG or WebP, by its suffix; default: image-SEED.png")
    group = parser.add_argument_group("image to image", "for models that can")
    flag(group, "--input FILE", "image to start from")
    flag(group, "--strength X", "how far to go away from it, above 0 to 1")


def add_video(commands: Commands) -> None:
    """Add the command that makes videos."""
    parser = command(commands, "video", _run, _VIDEO)
    parser.set_defaults(suffixes=_VIDEOS)
    _add_diffusion(parser, "MP4; default: video-SEED.mp4")
    flag(parser, "--frames N", "frames of the video")
    flag(parser, "--fps N", "frames per second in the file")


def _add_diffusion(parser: argparse.ArgumentParser, output: str) -> None:
    flag(parser, "prompt PROMPT", "what to show")
    flag(parser, "-o --output FILE", output)
    add_target(parser)
    group = parser.add_argument_group("settings", "left out: the model's own defaults")
    flag(group, "--negative-prompt --negative TEXT", "what not to show")
    flag(group, "-n N", "how many; numbered files are written")
    flag(group, "--size WxH", "in pixels", type=_size)
    flag(group, "--steps N", "denoising steps")
    flag(group, "--guidance X", "how strongly the prompt guides", dest="guidance_scale")
    flag(group, "--seed N", "random number seed", type=whole_number((1 << 63) - 1))
    flag(group, "--scheduler NAME", "one that the model offers")
    flag(group, "--preview FILE", "write a small WebP preview here while it runs")
    flag(group, "--preview-every-steps N", "every so many steps (default: 1)")


def _size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if match is None:
        message = f"{text!r} is not a size such as 512x512"
        raise argparse.ArgumentTypeError(message)
    return int(match[1]), int(match[2])


def _run(args: argparse.Namespace) -> int:
    if args.output is not None and args.output.suffix.lower() not in args.suffixes:
        return fail(f"-o must end in {' or '.join(args.suffixes)}")
    return call_processor(args, lambda client, _: _make(client, args))


async def _make(client: Client, args: argparse.Namespace) -> int:
    if args.suffixes is _VIDEOS:
        video = client.generate_video(args.prompt, frames=args.frames, fps=args.fps, **_knobs(args))
        return await _save(video, args)
    suffix = args.output.suffix.lower() if args.output else ".png"
    try:
        image = client.generate_image(
            args.prompt,
            image=args.input,
            strength=args.strength,
            format=_IMAGES[suffix],
            **_knobs(args),
        )
    except MediaFileError as error:
        return fail(error.message)
    return await _save(image, args)


def _knobs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options whose flags were given."""
    names = DiffusionKnobs.__annotations__
    given = {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }
    given["model"] = args.model
    if args.size is not None:
        given["width"], given["height"] = args.size
    if args.preview is not None:
        given.setdefault("preview_every_steps", 1)
    return given


async def _save(stream: MediaStream, args: argparse.Namespace) -> int:
    async with stream:
        with _progress_bar(args.n or 1) as show:
            async for progress in stream:
                show(progress)
                if progress.preview and args.preview is not None:
                    args.preview.write_bytes(progress.preview)
        media = await stream.result()
    try:
        for file, path in zip(media.files, _paths(media, args.output), strict=True):
            print(f"{file.save(path)} (seed {file.seed})")
    except OSError as error:
        return fail(f"can't write {error.filename}: {error.strerror}")
    if args.show_usage:
        print(_usage(media), file=sys.stderr)
    return 0


def _paths(media: GeneratedMedia, output: Path | None) -> list[Path]:
    kind = "video" if media.settings.frames else "image"
    suffix = media.files[0].suffix
    base = output or Path(f"{kind}-{media.settings.seed}{suffix}")
    if len(media.files) == 1:
        return [base]
    return [base.with_name(f"{base.stem}-{i}{base.suffix}") for i in range(len(media.files))]


def _usage(media: GeneratedMedia) -> str:
    settings, usage = media.settings, media.usage
    parts = [
        f"{settings.width} x {settings.height} pixels",
        f"{usage.steps} steps",
        f"guidance {settings.guidance_scale:g}",
        f"scheduler {settings.scheduler}",
        f"waited {usage.queued.ToNanoseconds() / 1e9:.2f} s",
        f"ran {usage.running.ToNanoseconds() / 1e9:.2f} s",
    ]
    if settings.frames:
        parts.insert(1, f"{settings.frames} frames at {settings.fps}/s")
    return " · ".join(parts)


@contextlib.contextmanager
def _progress_bar(outputs: int) -> Iterator[Callable[[diffusion_pb2.DiffusionProgress], None]]:
    """Show progress on stderr; nothing where that is no terminal."""
    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total:g} steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("sending", total=1)

    def show(progress: diffusion_pb2.DiffusionProgress) -> None:
        if progress.queue_position:
            text = f"waiting: {progress.queue_position} before this one"
        elif outputs > 1:
            text = f"{progress.output + 1} of {outputs}"
        else:
            text = "denoising"
        bar.update(task, description=text, completed=progress.step, total=progress.steps or 1)

    with bar:
        yield show
