"""Lets PyPI's torchvision, which is built for CUDA, be imported beside the CPU build of PyTorch.

`install.py` puts it into an environment where that import fails; a `.pth` file runs it at the
start of every process, so it imports nothing before torchvision is asked for.
"""

import sys


class _Finder:
    """Finds nothing; it declares torchvision's operators in time."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        del path, target
        if name == "torchvision":
            from millstream_server.engines import torch_on_cpu  # noqa: PLC0415 - see above

            torch_on_cpu.declare_torchvision_operators()


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
