"""Whether there is a GPU; and what an engine of PyTorch needs in its process without one."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

NO_GPU = (
    "look for the driver on the node (nvidia-smi), the runtime class of the pod and its resource, "
    "such as nvidia.com/gpu; or say --device cpu"
)
_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))

DEFAULTS = {
    # Development and CI use local models; nothing should wait for a model hub.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # On a busy machine threads that spin at a barrier, waiting for a thread that isn't scheduled,
    # make a step of a tiny model take 200 ms.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Of the environment, where it doesn't say otherwise; read when PyTorch is imported."""


def gpu_present() -> bool:
    """Return whether this machine has a GPU device, without importing PyTorch."""
    return any(device.exists() for device in _GPU_DEVICES)


def resolved(device: str) -> str:
    """Return "cpu" or "cuda"; "auto" is the GPU where there is one."""
    return ("cuda" if gpu_present() else "cpu") if device == "auto" else device


def torch_device(device: str, torch: Any) -> str:
    """Return "cpu" or "cuda"; "auto" is the GPU where PyTorch can use one.

    Raises:
        RuntimeError: there is one, and PyTorch's CUDA build can't use it.
    """
    if device != "auto" or torch.cuda.is_available():
        return "cuda" if device == "auto" else device
    if gpu_present() and torch.version.cuda:
        message = f"--device auto: PyTorch can't use the GPU here: {NO_GPU}."
        raise RuntimeError(message)
    return "cpu"


def torch_build() -> tuple[str, str] | None:
    """Read the version of the installed PyTorch and its CUDA version (empty: none), not import it.

    Returns None if there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    version = re.search(r"^__version__\s*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"](.+?)['\"]", text, re.MULTILINE)
    return version[1] if version else "?", cuda[1] if cuda else ""


def torch_dtype(dtype: str, device: str, torch: Any) -> Any:
    """Return a type of PyTorch; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return getattr(torch, dtype)


def prepare() -> None:
    """Prepare for an engine that imports PyTorch next; no effect on a machine with a GPU."""
    if gpu_present():
        return
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    declare_torchvision_operators()


@functools.cache
def declare_torchvision_operators() -> object:
    """Make torchvision importable, which image processors import: its PyPI wheel is for CUDA.

    With a CPU build of PyTorch its compiled part doesn't load, and the fake-kernel registration in
    its `__init__` then fails because two operators are missing. With their schemas declared the
    Python part works; calling one of the operators still raises. A part that loads brings them.

    Returns what must be kept while they are used; the cache does.
    """
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    spec = PathFinder.find_spec("torchvision")
    if torch.version.cuda is None and spec and spec.origin:
        try:
            torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
        except OSError:
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


class _WhenTorchvisionIsImported(MetaPathFinder):
    """Finds nothing; it declares torchvision's operators in time."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            declare_torchvision_operators()  # only now: it imports torch
        return None


def declare_when_torchvision_is_imported() -> None:
    """Do that once torchvision is imported here; for processes that may never import it."""
    sys.meta_path.insert(0, _WhenTorchvisionIsImported())


_PROGRESS_DELAY_US = 1000


def calm_nixl() -> None:
    """Add a pause to NIXL's progress thread: else each idle engine that has one keeps a core busy.

    A millisecond between polls has no measurable effect on a hand-off over loopback.

    Raises:
        RuntimeError: NIXL has changed.
    """
    bindings: Any = importlib.import_module("nixl._api").nixlBind
    if not hasattr(bindings.nixlAgentConfig, "pthrDelay"):
        message = "On a CPU NIXL's pthrDelay is set, which this NIXL does not have."
        raise RuntimeError(message)

    class PatientAgentConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, _PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = PatientAgentConfig


def run_shadowed_sitecustomize(folder: Path) -> None:
    """Run the `sitecustomize` that the one in ``folder`` shadows, if there is one."""
    rest = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def put_on_path(folder: Path) -> None:
    """Put ``folder`` in front of PYTHONPATH, for processes started from now on; once."""
    inherited = os.environ.get("PYTHONPATH", "")
    if str(folder) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), inherited)))
