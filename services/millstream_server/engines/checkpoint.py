"""Checks a checkpoint against the model that runs, without loading it.

Engines find out too late: a file that is cut off or a tensor of another shape ends SGLang's
scheduler, a tensor that is missing or has another name leaves the old one in place, without an
error; vLLM takes the old weights away before it looks at the new ones.

All functions raise InvalidWeightsError: files are missing, not complete or of another format, or
config.json, names, shapes or types are not the model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.model_files.weights import BadSafetensorsError, StoredTensor, read_header
from millstream_server.runtime.errors import InvalidWeightsError

_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
_SHOWN = 3
_CHUNK_BYTES = 8 << 20
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types that engines convert into each other as they copy."""
_NOT_LOADED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Ends of names of constants that some checkpoints have and engines compute."""
_TIED = "lm_head.weight"
_IGNORED_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "architectures"}
)
"""Keys of config.json that don't change what the weights are."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory says about its weights."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    config: Mapping[str, Any]
    files: Sequence[Path]

    @property
    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding, which may be stored once or twice."""
        text = self.config.get("text_config")
        inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
        return bool(self.config.get("tie_word_embeddings", inner))

    def needed(self) -> dict[str, StoredTensor]:
        """Return the tensors that every checkpoint of this model has."""
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.endswith(_NOT_LOADED) and not (self.tied and name.endswith(_TIED))
        }


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a directory's safetensors files, and its config.json."""
    if not path.is_dir():
        raise InvalidWeightsError(f"There is no directory {path}.")
    config = read_json(path / "config.json")
    files = _files(path)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(file):
            if tensor.name in tensors:
                raise InvalidWeightsError(f"{path} has the tensor {tensor.name!r} twice.")
            tensors[tensor.name] = tensor
    _check_index(path, tensors)
    return Checkpoint(path, tensors, config, files)


def _header(file: Path) -> Sequence[StoredTensor]:
    try:
        tensors = read_header(file)
    except BadSafetensorsError as error:
        raise InvalidWeightsError(f"{error}.") from error
    # The library that engines use refuses gaps, and bytes after the last tensor.
    at = tensors[0].offset if tensors else 0
    for tensor in tensors:
        if tensor.offset != at:
            raise InvalidWeightsError(f"{file} has a gap or an overlap before {tensor.name!r}.")
        at += tensor.nbytes
    if tensors and at != (size := file.stat().st_size):
        raise InvalidWeightsError(
            f"{file} isn't as long as its header says: {at:,} bytes, not {size:,}."
        )
    return tensors


def _files(path: Path) -> list[Path]:
    """Choose the files that an engine would: those of the index, else all."""
    index = path / _INDEX
    if index.is_file():
        names = sorted({str(name) for name in _weight_map(index).values()})
        if wrong := [name for name in names if Path(name).name != name]:
            raise InvalidWeightsError(f"{index} names a file outside its directory: {wrong[0]!r}.")
        files = [path / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise InvalidWeightsError(
                f"{path} lacks {len(missing)} of the {len(files)} files that its index names: "
                f"{_some(missing)}."
            )
        return files
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    others = sorted(file.name for end in ("*.bin", "*.pt", "*.pth") for file in path.glob(end))
    if others:
        raise InvalidWeightsError(
            f"{path} has weights in {_some(others)} only. Such files can run code when they are "
            "read; save them as safetensors."
        )
    raise InvalidWeightsError(f"{path} has no *.safetensors file.")


def _check_index(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    index = path / _INDEX
    if not index.is_file():
        return
    promised = set(_weight_map(index))
    if missing := sorted(promised - tensors.keys()):
        raise InvalidWeightsError(
            f"{path}: the index names {len(missing)} tensors that no file has: {_some(missing)}."
        )


def _weight_map(index: Path) -> Mapping[str, Any]:
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise InvalidWeightsError(f"{index} has no weight_map.")
    return found


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON object."""
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidWeightsError(f"{file} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidWeightsError(f"{file} isn't JSON: {error}.") from error
    if not isinstance(read, dict):
        raise InvalidWeightsError(f"{file} is no JSON object.")
    return read


def check_fits(new: Checkpoint, loaded: Checkpoint) -> None:
    """Check that one checkpoint can take another's place in a running engine."""
    _check_config(new, loaded)
    needed, given = loaded.needed(), new.needed()
    if missing := sorted(needed.keys() - new.tensors.keys()):
        raise InvalidWeightsError(
            f"{new.path} lacks {len(missing)} of the model's {len(needed)} tensors: "
            f"{_some(missing)}."
        )
    if unknown := sorted(given.keys() - loaded.tensors.keys()):
        raise InvalidWeightsError(
            f"{new.path} has {len(unknown)} tensors that the model doesn't: {_some(unknown)}."
        )
    for name, tensor in given.items():
        check_tensor(name, tensor.dtype, tensor.shape, loaded)


def check_tensor(name: str, dtype: str, shape: Sequence[int], loaded: Checkpoint) -> None:
    """Check one tensor; ``dtype`` as safetensors name it."""
    ours = loaded.tensors.get(name)
    if ours is None:
        raise InvalidWeightsError(f"The model has no tensor {name!r}.")
    if tuple(shape) != ours.shape:
        raise InvalidWeightsError(
            f"{name!r} has the shape {list(shape)}; the model's has {list(ours.shape)}."
        )
    if dtype != ours.dtype and not {dtype, ours.dtype} <= _FLOATS:
        raise InvalidWeightsError(f"{name!r} has the type {dtype}; the model's has {ours.dtype}.")


def _check_config(new: Checkpoint, loaded: Checkpoint) -> None:
    if differing := _differing(new.config, loaded.config, ""):
        name, here, there = differing
        raise InvalidWeightsError(
            f"{new.path / 'config.json'} describes another model: {name} is {here!r}, and "
            f"{there!r} of the model that runs."
        )
    for name in ("quantization_config", "compression_config"):
        if (name in new.config) != (name in loaded.config):
            raise InvalidWeightsError(
                f"Only one of {new.path} and the model that runs is quantized ({name})."
            )


def _differing(
    new: Mapping[str, Any], loaded: Mapping[str, Any], prefix: str
) -> tuple[str, Any, Any] | None:
    """Return the first key that both have with different values; others may be defaults."""
    for key in sorted(new.keys() & loaded.keys() - _IGNORED_KEYS):
        here, there = new[key], loaded[key]
        if isinstance(here, dict) and isinstance(there, dict):
            if found := _differing(here, there, f"{prefix}{key}."):
                return found
        elif here is not None and there is not None and here != there:
            return f"{prefix}{key}", here, there
    return None


def read_through(
    checkpoint: Checkpoint, progress: Callable[[int, int], None], stopped: Callable[[], bool]
) -> None:
    """Read all bytes: a disk that fails is noticed now, and the engine then reads from memory."""
    total, done = checkpoint.nbytes, 0
    buffer = bytearray(_CHUNK_BYTES)
    progress(0, total)
    for path in checkpoint.files:
        try:
            with path.open("rb", buffering=0) as file:
                while (count := file.readinto(buffer)) and not stopped():
                    done += count
                    progress(done, total)
        except OSError as error:
            raise InvalidWeightsError(f"{path} can't be read: {error.strerror}.") from error


def adapter_tensors(path: Path) -> Sequence[StoredTensor]:
    """Read the header of a LoRA adapter's file, in its directory."""
    file = path / ADAPTER_FILE
    if not file.is_file():
        raise InvalidWeightsError(
            f"There is no {file}. Other formats can run code when they are read; save the adapter "
            "as safetensors."
        )
    try:
        tensors = read_header(file)
    except BadSafetensorsError as error:
        raise InvalidWeightsError(f"{error}.") from error
    if not tensors:
        raise InvalidWeightsError(f"{file} has no tensors.")
    return tensors


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, …"
