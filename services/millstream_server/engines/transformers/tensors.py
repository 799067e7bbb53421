"""Torch's tensors as plain ones."""

from __future__ import annotations

import importlib
from typing import Any

from millstream_server.media.tensor import ElementType, Tensor, TensorSpec


def to_tensor(tensor: Any) -> Tensor:
    """Copy a torch tensor from any device; the copy shares no memory with others."""
    torch: Any = importlib.import_module("torch")
    owned = tensor.detach().to("cpu", copy=True).contiguous()
    spec = TensorSpec(ElementType(str(owned.dtype).removeprefix("torch.")), tuple(owned.shape))
    return Tensor(spec, memoryview(owned.view(torch.uint8).numpy()).cast("B"))
