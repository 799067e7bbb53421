"""Draw what a terminal showed as an SVG picture, with rich.

    python demo/terminal.py "a title" < transcript > picture.svg

A transcript is text as it is copied from a terminal; it may have colours.
"""

import io
import re
import sys

from rich.console import Console
from rich.text import Text

TYPED = re.compile(r"^(\$ |(?:\[[^\]]+\] )?> )(.*)$", re.MULTILINE)
"""What the user typed: after the shell's prompt, and after `millstream chat`'s."""
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def draw(transcript: str, title: str, width: int = 96) -> str:
    """Return the SVG; it is the same for the same transcript, and loads nothing."""
    text = Text.from_ansi(transcript.strip("\n"))
    for typed in TYPED.finditer(text.plain):
        text.stylize("green", *typed.span(1))
        text.stylize("bold", *typed.span(2))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text)
    return WEB_FONT.sub("", console.export_svg(title=title, unique_id="terminal"))


if __name__ == "__main__":
    sys.stdout.write(draw(sys.stdin.read(), sys.argv[1]))
