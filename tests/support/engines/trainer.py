"""A trainer that broadcasts a checkpoint's tensors: rank 0 of a torch process group.

`python -m tests.support.engines.trainer PORT GROUP FILE NAMES [die]`; with ``die`` it ends before
it sends.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def _main() -> None:
    port, group_name, file, names, *die = sys.argv[1:]
    torch: Any = importlib.import_module("torch")
    tensors = importlib.import_module("safetensors.torch").load_file(file)
    group = importlib.import_module("sglang.srt.utils").init_custom_process_group(
        backend="gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=2,
        rank=0,
        group_name=group_name,
    )
    if die:
        os._exit(3)
    for name in names.split(","):
        torch.distributed.broadcast(tensors[name], src=0, group=group)
    torch.distributed.destroy_process_group(group)


if __name__ == "__main__":
    _main()
