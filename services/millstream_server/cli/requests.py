"""Commands that send requests, and their flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from millstream_client import Image, Video
from millstream_server.cli import chat, complete, generate_media, vectors
from millstream_server.cli.flags import Commands, add_processor, add_target, command
from millstream_server.cli.sampling import add_sampling_flags, whole_number

_CHAT_NOTES = """\
One chat is one gRPC stream, so the conversation keeps its worker and its KV cache. Ctrl-C stops an
answer and keeps the conversation; Ctrl-D ends the chat. Inside a chat /image FILE attaches a
picture to the next message; /help lists all commands. `--once -` reads the text from stdin:
git diff | millstream chat --system 'Summarise this change.' --once -
"""


def add_requests(commands: Commands) -> None:
    """Add the commands that send requests."""
    _add_chat(commands)
    _add_complete(commands)
    _add_image(commands)
    _add_video(commands)
    _add_embed(commands)
    _add_rerank(commands)


def _add_chat(commands: Commands) -> None:
    parser = command(
        commands,
        "chat",
        chat.run,
        "Chat with a model; answers stream.",
        _CHAT_NOTES,
        "millstream chat",
        'millstream chat --image cat.png --once "What is it?" --temperature 0',
        "millstream chat --address processor.example:50051 --tls-ca-file ca.pem --api-key-file key",
    )
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model")
    parser.add_argument(
        "--once", metavar="TEXT", help="print one answer and exit; - reads the text from stdin"
    )
    _add_media(parser)
    add_sampling_flags(parser)


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "images and videos", "for models that take them; `millstream models` shows which do"
    )
    formats = {Image: "PNG, JPEG, WebP, GIF", Video: "MP4, MOV, WebM, MKV"}
    for kind, names in formats.items():
        group.add_argument(
            f"--{kind.kind}",
            dest="media",
            action="append",
            type=kind,
            default=[],
            metavar="FILE",
            help=f"send this {kind.kind} with the first message: {names}; may be repeated",
        )


def _add_complete(commands: Commands) -> None:
    parser = command(
        commands,
        "complete",
        complete.run,
        "Continue a raw prompt, without the model's chat template.",
        "",
        'millstream complete "Millstream is" --max-new-tokens 40',
        "millstream complete - --temperature 0 --show-usage < prompt.txt",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    add_target(parser)
    add_sampling_flags(parser)


def _add_image(commands: Commands) -> None:
    parser = command(
        commands,
        "image",
        generate_media.run_image,
        "Make an image from words, or from an image and words.",
        "The same seed and settings give the same file. Ctrl-C stops the work within one step.",
        'millstream image "a red circle on a white background" -o circle.png',
        'millstream image "a blue square" --seed 7 --steps 20 -n 4 -o square.webp',
        'millstream image "a green square" --input circle.png --strength 0.8 -o changed.png',
    )
    _add_diffusion(parser, "PNG or WebP, by its suffix; default: image-SEED.png")
    group = parser.add_argument_group("image to image", "for models that can")
    group.add_argument("--input", type=Path, metavar="FILE", help="image to start from")
    group.add_argument(
        "--strength", type=float, metavar="X", help="how far to go away from it, above 0 to 1"
    )


def _add_video(commands: Commands) -> None:
    parser = command(
        commands,
        "video",
        generate_media.run_video,
        "Make a video from words.",
        "The same seed and settings give the same file. Ctrl-C stops the work within one step.",
        'millstream video "a ball that rolls" --frames 17 --fps 8 -o ball.mp4',
    )
    _add_diffusion(parser, "MP4; default: video-SEED.mp4")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of the video")
    parser.add_argument("--fps", type=int, metavar="N", help="frames per second in the file")


def _add_diffusion(parser: argparse.ArgumentParser, output: str) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to show")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"{output}")
    add_target(parser)
    group = parser.add_argument_group("settings", "left out: the model's own defaults")
    group.add_argument("--negative-prompt", "--negative", metavar="TEXT", help="what not to show")
    group.add_argument("-n", type=int, metavar="N", help="how many; numbered files are written")
    group.add_argument("--size", type=generate_media.size, metavar="WxH", help="in pixels")
    group.add_argument("--steps", type=int, metavar="N", help="denoising steps")
    group.add_argument(
        "--guidance",
        dest="guidance_scale",
        type=float,
        metavar="X",
        help="how strongly the prompt guides",
    )
    group.add_argument(
        "--seed", type=whole_number((1 << 63) - 1), metavar="N", help="random number seed"
    )
    group.add_argument("--scheduler", metavar="NAME", help="one that the model offers")
    group.add_argument(
        "--preview", type=Path, metavar="FILE", help="write a small WebP preview here while it runs"
    )
    group.add_argument(
        "--preview-every-steps", type=int, metavar="N", help="every so many steps (default: 1)"
    )


def _add_embed(commands: Commands) -> None:
    parser = command(
        commands,
        "embed",
        vectors.run_embed,
        "Turn texts into vectors; prints a line of JSON for each.",
        "",
        'millstream embed "How do I bake bread?"',
        'millstream embed --compare "a cat" "a kitten" "a database"',
        "millstream embed - --dimensions 64 < lines.txt > vectors.jsonl",
    )
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="a single - reads texts from stdin, one per line"
    )
    add_target(parser)
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="cut the vectors to so many numbers"
    )
    parser.add_argument(
        "--compare", action="store_true", help="print how alike the texts are, instead of vectors"
    )


def _add_rerank(commands: Commands) -> None:
    parser = command(
        commands,
        "rerank",
        vectors.run_rerank,
        "Sort documents by how well they answer a query.",
        "",
        'millstream rerank "How do I bake bread?" "Mix flour and water, then bake." '
        '"A GPU has cores."',
        'millstream rerank "What is prefill?" - --top-n 3 < passages.txt',
    )
    parser.add_argument("query", metavar="QUERY", help="the question")
    parser.add_argument(
        "documents",
        nargs="+",
        metavar="DOCUMENT",
        help="a single - reads documents from stdin, one per line",
    )
    add_processor(parser)
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="model to ask (default: the only one that ranks)",
    )
    parser.add_argument("--top-n", type=int, metavar="N", help="print the best N only")
