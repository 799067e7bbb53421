"""Lets the model call a clock and a calculator: tools.py 127.0.0.1:50051 "What is 17 times 23?"."""

import operator
import sys
import time

from millstream_client import SyncClient, TextPiece

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def clock() -> str:
    """Tell the time."""
    return time.strftime("%H:%M")


def calculate(expression: str) -> str:
    """Work out an expression, such as 6 * 7."""
    left, sign, right = expression.split()
    return f"{SIGNS[sign](float(left), float(right)):.12g}"


address, question = sys.argv[1:]
with SyncClient(address) as client:
    for event in client.chat(question, tools=[clock, calculate]).run_tools():
        if isinstance(event, TextPiece):
            print(event.text, end="", flush=True)
print()
