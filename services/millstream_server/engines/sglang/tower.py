"""SGLang's vision towers in our process, on pixels that we prepared.

SGLang's encoder loads the model and is given tensors only: no file, URL or payload reaches its own
media code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from millstream_server.encode.encoder import Prepared
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang.requests.media import steps_apart
from millstream_server.engines.torch_on_cpu import resolved, torch_dtype
from millstream_server.engines.transformers.tower import TowerConfig, TowerFacts
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Modality
from millstream_server.runtime.errors import EngineFailedError


class SglangTower:
    """Satisfies `engines.transformers.tower.Tower`; one per process, and no engine beside it.

    Its rows equal those of transformers.
    """

    content = Content.ROWS

    def __init__(self, config: TowerConfig) -> None:
        self._config = config
        self._environment: dict[str, str] | None = None
        self._torch: Any = None
        self._encoder: Any = None
        self._family = ""
        self._item: Callable[..., Any] | None = None
        self._modalities: dict[Modality, Any] = {}

    def load(self, family: Family) -> TowerFacts:
        self._family = family.name
        device = resolved(self._config.device)
        if device == "cpu":
            sglang_cpu.activate()
        self._torch = importlib.import_module("torch")
        dtype = str(torch_dtype(self._config.dtype, device, self._torch)).removeprefix("torch.")
        self._environment = dict(os.environ)
        with _kept_process_state():
            self._load(_arguments(self._config.model_path, device, dtype))
        version = str(importlib.import_module("sglang").__version__)
        kind = f"sglang {version} {dtype}"
        return TowerFacts(engine="sglang", version=version, kind=kind, device=device)

    def _load(self, arguments: dict[str, object]) -> None:
        server_args = importlib.import_module("sglang.srt.server_args")
        if arguments["device"] == "cpu":
            sglang_cpu.patch_sglang()
        logging.getLogger("sglang").setLevel(logging.WARNING)
        server = server_args.ServerArgs(**arguments)
        server.resolve_once()
        importlib.import_module("sglang.srt.runtime_context").publish(server, role="encoder")
        module = importlib.import_module("sglang.srt.disaggregation.encoder.server")
        with tempfile.TemporaryDirectory(prefix="millstream-encoder-") as folder:
            # A group of one process; a file can't be taken by others, as a port can.
            self._encoder = module.MMEncoder(server, dist_init_method=f"file://{folder}/group")
        batch = importlib.import_module("sglang.srt.managers.schedule_batch")
        self._item = batch.MultimodalDataItem
        self._modalities = {
            Modality.IMAGE: batch.Modality.IMAGE,
            Modality.VIDEO: batch.Modality.VIDEO,
        }

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        if self._encoder is None or self._item is None:
            raise EngineFailedError("The vision tower is not loaded.")
        model = self._encoder.model
        device = next(model.parameters()).device
        items = [
            self._item(
                modality=self._modalities[modality],
                feature=prepared.inputs.pixels.to(device),
                model_specific_data={
                    f"{modality.value}_grid_thw": steps_apart(self._family, prepared.inputs.grid)
                },
            )
            for prepared in batch
        ]
        encode = model.get_image_feature if modality is Modality.IMAGE else model.get_video_feature
        with self._torch.inference_mode():
            rows: Sequence[Any] = self._torch.split(encode(items), [p.tokens for p in batch])
        return rows

    def close(self) -> None:
        """Release the model, and what SGLang doesn't: sockets, threads, process groups."""
        encoder, self._encoder = self._encoder, None
        if self._environment is None:
            return
        if encoder is not None:
            encoder.executor.shutdown(wait=False)
            encoder.context.destroy(linger=0)
            encoder.sync_context.destroy(linger=0)
        state = importlib.import_module("sglang.srt.distributed.parallel_state")
        state.destroy_model_parallel()
        state.destroy_distributed_environment()
        # Kept until now: SGLang reads its variables also when it compiles a kernel.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        self._environment = None


@contextlib.contextmanager
def _kept_process_state() -> Iterator[None]:
    """Undo what SGLang does to the process while it loads.

    It replaces the event loop policy and the hook for uncaught exceptions, and adds a log handler
    where there is none.
    """
    policy, hook = asyncio.get_event_loop_policy(), sys.excepthook
    handlers = list(logging.getLogger().handlers)
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)
        sys.excepthook = hook
        logging.getLogger().handlers[:] = handlers


def _arguments(model_path: Path, device: str, dtype: str) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model_path": str(model_path),
        "encoder_only": True,
        "device": device,
        "dtype": dtype,
        # The only one that opens no connection by itself; our results never go through it.
        "encoder_transfer_backend": "zmq_to_tokenizer",
        "log_level": "warning",
    }
    if device == "cpu":
        arguments |= {"mm_attention_backend": "sdpa", "attention_backend": "torch_native"}
    return arguments
