"""What the tool loops of docs/tools.md must do, whatever their language."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from millstream.v1 import processor_pb2
from tests.support.scripted_processor import CALLS, STOP, OutputEvent, called, said, serving

_RUN_LIMIT_S = 60.0


def check_tool_loop(command: Sequence[str | Path], folder: Path | None = None) -> None:
    """Run a program with an address and a question: it runs two calls and prints the answer."""
    asyncio.run(_check(command, folder))


async def _check(command: Sequence[str | Path], folder: Path | None) -> None:
    thought = OutputEvent(reasoning="Two tools.")
    both = [
        *called("clock", "{}"),
        *called("calculate", '{"expression"', ': "17 * 23"}', index=1),
    ]
    last = called("calculate", '{"expression": "391 - 1"}')
    script = (([thought, *both], CALLS), (last, CALLS), (said("It is late: 390."), STOP))
    async with serving(*script) as (processor, address):
        pipe = asyncio.subprocess.PIPE
        program = await asyncio.create_subprocess_exec(
            *command, address, "What?", cwd=folder, stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(_RUN_LIMIT_S):
            out, err = await program.communicate()
        assert program.returncode == 0, err.decode()
        assert out.decode().strip() == "It is late: 390."
        (time, product), difference = processor.results
        assert re.fullmatch(r"\d\d:\d\d", time), time
        assert (str(product), [*map(str, difference)]) == ("391", ["390"])
        first, second, _ = processor.asked
        assert first.start.output == processor_pb2.CHAT_OUTPUT_EVENTS
        assert [tool.name for tool in first.start.tools] == ["clock", "calculate"]
        assert [each.tool_call_id for each in second.tool_results.messages] == ["id0", "id1"]
