"""The commands that `millstream up` prints for another terminal."""

from __future__ import annotations

import base64
import os
import shlex
import sys
from pathlib import Path

from millstream_server.cli.flags import DEFAULT_ADDRESS
from millstream_server.cli.suite.further import FurtherModel, Task
from millstream_server.cli.suite.plan import SuitePlan, demo_picture
from millstream_server.cli.suite.running import DEFAULT_LOG_DIR

_BUF_FLAGS = "--http2-prior-knowledge --reflect-protocol grpc-v1 --protocol grpc"
_SERVICES = "millstream.v1"
_START = '{"slot":1,"token_ids":[7,41,12],"sampling":{"temperature":0,"max_new_tokens":8}}'
_RED_CIRCLE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////cKCi5uRl6AAAAaElEQVR42mNgoC/g/w"
    "Bl/P8PoZn//z8AZrD///8AzJD///8HmGH///8fMKP+//9/UE1QbTAGI4jRADEGYhCcwQ5iPMDP4AcxPlDOIMYuTBfC"
    "HY/pL4SX4YEADxZ4QMGDDh6YiOClFwAAeDafr46s090AAAAASUVORK5CYII="
)
"""A PNG of 64 x 64 pixels: a red circle on white."""


def examples(plan: SuitePlan) -> list[str]:
    """Return commands to paste into another terminal."""
    address = plan.processor.client_address
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    millstream = _tool("millstream")
    if plan.options.encode:
        once = f'--image {_picture()} --once "What is in this picture?"'
        content = f'{{"image":{{"data":"{_RED_CIRCLE}"}}}},{{"text":"What is in this picture?"}}'
    else:
        once, content = '--once "What is Millstream?"', '{"text":"What is Millstream?"}'
    named = f'"model":"{plan.options.model_name}",' if plan.options.further else ""
    chat = f'{{{named}"messages":[{{"role":"CHAT_ROLE_USER","content":[{content}]}}]}}'
    several = any(further.task is Task.TEXT_DIFFUSION for further in plan.options.further)
    to = f"{where} --model {plan.options.model_name}" if several else where
    lines = [
        f"{millstream} chat {once}{to}",
        f"{millstream} chat{to}",
        *(_further(further, millstream, where) for further in plan.options.further),
        _curl(address, "ProcessorService/Chat", chat),
    ]
    if (encode := plan.first("encode")) is not None:
        size = len(base64.b64decode(_RED_CIRCLE))
        item = (
            f'{{"slot":1,"modality":"MODALITY_IMAGE","total_bytes":{size},"data":"{_RED_CIRCLE}"}}'
        )
        lines.append(_curl(encode.address, "EncodeService/Encode", item))
        lines.append(_grpcurl(encode.address, "EncodeService/Encode", item))
    decode = plan.first("decode")
    if decode is not None and plan.options.topology == "aggregated":  # else it needs a ticket
        lines.append(_curl(decode.address, "DecodeService/Decode", _START))
    return lines


def operating(plan: SuitePlan) -> list[str]:
    """Return commands that watch and operate the suite."""
    millstream, log_dir = _tool("millstream"), plan.options.log_dir
    at = "" if log_dir == DEFAULT_LOG_DIR else f" --log-dir {shlex.quote(str(log_dir))}"
    return [
        f"{millstream} top{at}",
        f"{millstream} admin status --all{at}",
    ]


def _further(model: FurtherModel, millstream: str, where: str) -> str:
    """Return the command that tries a further model."""
    match model.task:
        case Task.IMAGE:
            words = '"a red circle on a white background" -o circle.png'
            return f"{millstream} image {words}{where}"
        case Task.TEXT_DIFFUSION:
            return f'{millstream} chat --once "What is prefill?"{where} --model {model.name}'
        case Task.EMBEDDING:
            return f'{millstream} embed --compare "a cat" "a kitten" "a database"{where}'
        case _:
            documents = '"Mix flour and water, then bake." "A GPU has many cores."'
            return f'{millstream} rerank "How do I bake bread?" {documents}{where}'


def _curl(address: str, method: str, start: str) -> str:
    data = f'{{"start":{start}}}'
    return f"{_tool('buf')} curl {_BUF_FLAGS} -d '{data}' http://{address}/{_SERVICES}.{method}"


def _grpcurl(address: str, method: str, start: str) -> str:
    return f"grpcurl -plaintext -d '{{\"start\":{start}}}' {address} {_SERVICES}.{method}"


def _picture() -> str:
    """Return the path of a picture that the demo model knows, as short as it can be typed."""
    picture = demo_picture()
    return shlex.quote(_typed(picture)) if picture is not None else "PICTURE.png"


def _tool(name: str) -> str:
    """Return a command as it can be typed in a new terminal in this directory."""
    tool = Path(sys.executable).parent / name
    return name if "VIRTUAL_ENV" in os.environ or not tool.exists() else _typed(tool)


def _typed(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
