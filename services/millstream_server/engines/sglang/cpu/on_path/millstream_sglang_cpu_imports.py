# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""Import hook: stubs for what SGLang imports at module level and a CPU machine lacks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn


class _Kernel:
    """A Triton kernel that can be defined and never launched."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.fn = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> NoReturn:
        raise NotImplementedError(
            f"SGLang launched the Triton kernel {self.__name__}, which has no CPU path; "
            "the CPU stand-in has no kernels. Turn the feature off or use a GPU."
        )

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        self[None]


def _jit(function: Callable[..., object] | None = None, **_options: object) -> object:
    return _Kernel if function is None else _Kernel(function)


def _decorate_nothing(*_args: object, **_options: object) -> Callable[[object], object]:
    return lambda decorated: decorated


class _AnyAttribute(type):
    """Stub classes have every attribute: SGLang wraps some methods of Triton's classes."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class _Stub(ModuleType):
    """A module that has every attribute: a class if capitalised, otherwise another stub.

    Enough for type annotations, constants and default arguments; it computes nothing.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "3.0.0"  # a number, because SGLang parses it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full == "triton.runtime.driver.active":
            # The real Triton's message without a GPU; SGLang then uses the CPU.
            raise RuntimeError("0 active drivers")
        value = _AnyAttribute(name, (), {"__init__": _ignore}) if name[0].isupper() else _Stub(full)
        setattr(self, name, value)
        return value

    def __call__(self, *_args: object, **_kwargs: object) -> _Stub:
        return self

    def __getitem__(self, _key: object) -> _Stub:
        return self

    def __or__(self, _other: object) -> _Stub:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False


def _ignore(_self: object, *_args: object, **_kwargs: object) -> None:
    """Take any constructor arguments."""


class _TritonLoader(Loader):
    """Loads a stub of `triton`, which over a hundred modules of SGLang import for GPU kernels.

    The real one is 1 GB and useless without a GPU. If it is installed, it is used.
    """

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton":
            vars(module).update(
                jit=_jit,
                autotune=_decorate_nothing,
                heuristics=_decorate_nothing,
                # The only two plain functions that run at import or on the host.
                cdiv=lambda a, b: -(-a // b),
                next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 0 else 1,
            )


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._stub_triton = PathFinder.find_spec("triton") is None

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        del path, target
        if fullname == "torchvision":
            # Only now: this runs at the start of every process, and it imports torch.
            importlib.import_module(
                "millstream_server.engines.torch_on_cpu"
            ).declare_torchvision_operators()
        if self._stub_triton and fullname.partition(".")[0] == "triton":
            return ModuleSpec(fullname, _TritonLoader(), is_package=True)
        return None


def install() -> None:
    """Put the hook in front of the other importers, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
