"""CPU stand-in for the GPU parts of SGLang; has no effect until `activate` is called."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from millstream_server.engines.torch_on_cpu import DEFAULTS, gpu_present

ON_PATH = Path(__file__).resolve().parent / "on_path"

_FORCED = {
    # SGLang's own switch for the CPU platform.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Else the first penalty or top-k request compiles C++ for seconds, and needs a compiler.
    "TORCH_COMPILE_DISABLE": "1",
}


def is_active() -> bool:
    """Return whether `activate` was called in this process or one of its ancestors."""
    return str(ON_PATH) in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def activate() -> None:
    """Let SGLang run on the CPU in this process and in the processes it spawns from now on.

    Call it before SGLang is imported. A second call changes nothing.

    Raises:
        RuntimeError: there is a GPU, or SGLang was imported already.
    """
    if gpu_present():
        raise RuntimeError("This machine has a GPU: the CPU stand-in for SGLang refuses to start.")
    if not is_active():
        if "sglang" in sys.modules:
            raise RuntimeError("sglang was imported before the CPU stand-in was activated.")
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ON_PATH), inherited)))
    os.environ.update(_FORCED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    # Processes started from now on get this through PYTHONPATH and `sitecustomize`.
    if str(ON_PATH) not in sys.path:
        sys.path.insert(0, str(ON_PATH))
    importlib.import_module("millstream_sglang_cpu_imports").install()


def patch_sglang() -> None:
    """Apply the patches that SGLang's plug-in loader would apply, but raise on a failure.

    Raises:
        RuntimeError: SGLang has changed and the stand-in no longer fits.
    """
    importlib.import_module("millstream_sglang_cpu_plugin").register()


def patch_diffusion() -> None:
    """Apply the patches for SGLang's diffusion models, but raise on a failure.

    Raises:
        RuntimeError: SGLang has changed and the stand-in no longer fits.
    """
    importlib.import_module("millstream_sglang_cpu_plugin").register_diffusion()
