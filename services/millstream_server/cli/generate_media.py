"""`millstream image` and `millstream video`: make files from words, with a progress bar."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from millstream.v1 import diffusion_pb2
from millstream_client import Client, GeneratedMedia, MediaFileError, MediaStream
from millstream_server.cli.client import call_processor

_FORMATS = {".png": diffusion_pb2.IMAGE_FORMAT_PNG, ".webp": diffusion_pb2.IMAGE_FORMAT_WEBP}
_KNOBS = (
    "negative_prompt",
    "n",
    "width",
    "height",
    "steps",
    "guidance_scale",
    "seed",
    "scheduler",
    "preview_every_steps",
)


def size(text: str) -> tuple[int, int]:
    """Read WIDTHxHEIGHT, for argparse."""
    match = re.fullmatch(r"(\d{1,6})x(\d{1,6})", text)
    if match is None:
        message = f"{text!r} is not a size such as 512x512"
        raise argparse.ArgumentTypeError(message)
    return int(match[1]), int(match[2])


def run_image(args: argparse.Namespace) -> int:
    """Make images; return the exit code."""
    if args.output is not None and args.output.suffix.lower() not in _FORMATS:
        print("error: -o must end in .png or .webp", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args, lambda client, _: _image(client, args)))


def run_video(args: argparse.Namespace) -> int:
    """Make videos; return the exit code."""
    if args.output is not None and args.output.suffix.lower() != ".mp4":
        print("error: -o must end in .mp4", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args, lambda client, _: _video(client, args)))


async def _image(client: Client, args: argparse.Namespace) -> int:
    suffix = args.output.suffix.lower() if args.output else ".png"
    try:
        stream = client.generate_image(
            args.prompt,
            image=args.input,
            strength=args.strength,
            format=_FORMATS[suffix],
            model=args.model,
            **_knobs(args),
        )
    except MediaFileError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return await _save(stream, args)


async def _video(client: Client, args: argparse.Namespace) -> int:
    return await _save(
        client.generate_video(
            args.prompt, frames=args.frames, fps=args.fps, model=args.model, **_knobs(args)
        ),
        args,
    )


def _knobs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options whose flags were given."""
    given = {name: getattr(args, name, None) for name in _KNOBS}
    if args.size is not None:
        given["width"], given["height"] = args.size
    if args.preview is not None and given["preview_every_steps"] is None:
        given["preview_every_steps"] = 1
    return {name: value for name, value in given.items() if value is not None}


async def _save(stream: MediaStream, args: argparse.Namespace) -> int:
    async with stream:
        with _Bar(args.n or 1) as bar:
            async for progress in stream:
                bar.show(progress)
                if progress.preview and args.preview is not None:
                    args.preview.write_bytes(progress.preview)
        media = await stream.result()
    try:
        for file, path in zip(media.files, _paths(media, args.output), strict=True):
            print(f"{file.save(path)} (seed {file.seed})")
    except OSError as error:
        print(f"error: can't write {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if args.show_usage:
        print(_usage(media), file=sys.stderr)
    return 0


def _paths(media: GeneratedMedia, output: Path | None) -> list[Path]:
    """Return where to write the files: several are numbered."""
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


class _Bar:
    """The progress bar, on stderr; nothing where stderr is no terminal."""

    def __init__(self, outputs: int) -> None:
        self._outputs = outputs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:g}/{task.total:g} steps"),
            TimeElapsedColumn(),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._shown = self._progress.console.is_terminal
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self._shown:
            self._progress.start()
            self._task = self._progress.add_task("sending", total=1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._progress.stop()

    def show(self, progress: diffusion_pb2.DiffusionProgress) -> None:
        """Show where the request is."""
        if self._task is None:
            return
        if progress.queue_position:
            text = f"waiting: {progress.queue_position} before this one"
        elif self._outputs > 1:
            text = f"{progress.output + 1} of {self._outputs}"
        else:
            text = "denoising"
        self._progress.update(
            self._task,
            description=text,
            completed=progress.step,
            total=progress.steps or 1,
        )
