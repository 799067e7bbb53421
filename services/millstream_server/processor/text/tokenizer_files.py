"""Reads a model directory's tokenizer and chat templates with transformers, in a process apart.

The library puts together what the files say in several places. To import it takes 33 MB, and it is
needed for this only: so a child process does it, and returns all as JSON.

`python -m millstream_server.processor.text.tokenizer_files DIR PARENT_PID` is that process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millstream_server.processor.text.model_files import UnusableModelError

_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 300.0
"""A large vocabulary takes seconds; a network file system that hangs must end the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a model directory says of its tokenizer."""

    tokenizer: str
    """tokenizer.json, with the special tokens that only other files name."""
    special_tokens: Mapping[str, str]
    """Variables of chat templates: ``bos_token`` and so on."""
    eos_token_id: int | None
    bos_token_id: int | None
    templates: Mapping[str, str]
    """Chat templates by name."""


def read_tokenizer(path: Path) -> TokenizerFiles:
    """Read a directory, in this process if it has the library already.

    Raises:
        UnusableModelError: a file is missing or wrong.
    """
    if not (path / "tokenizer.json").is_file():
        # Checked here because the library would take the path for the name of a model on a hub.
        raise UnusableModelError(f"{path} has no tokenizer.json")
    found = _read(path) if "transformers" in sys.modules else _read_apart(path)
    if "error" in found:
        raise UnusableModelError(f"the tokenizer in {path} cannot be loaded: {found['error']}")
    return TokenizerFiles(**found)


def _read_apart(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(path), str(os.getpid())]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S)  # noqa: S603 - ourselves
    except subprocess.SubprocessError as error:
        return {"error": str(error)}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _read(path: Path) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - see above

    try:
        fast = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the tokenizers binding raises no narrower class
        return {"error": str(error)}
    template = fast.chat_template
    templates = {"default": template} if isinstance(template, str) else dict(template or {})
    found = TokenizerFiles(
        tokenizer=fast.backend_tokenizer.to_str(),
        special_tokens={
            name: str(token)
            for name, token in fast.special_tokens_map.items()
            if not isinstance(token, list)
        },
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.bos_token_id,
        templates=templates,
    )
    return asdict(found)


def _end_with(parent: int) -> None:
    """Let the kernel end this process with its parent, which may stop before the files are read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    sys.stdout.write(json.dumps(_read(Path(sys.argv[1]))))
