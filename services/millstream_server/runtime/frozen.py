"""`dataclass` for values that are made for each request: the type checker alone keeps them frozen.

At run time a frozen dataclass sets each field through `object.__setattr__`: making one takes three
times as long, 10 us for all that a short chat needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from collections.abc import Callable

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """Do what `dataclasses.dataclass` does, with the same equality and hash."""
        return dataclasses.dataclass(slots=slots, kw_only=kw_only, unsafe_hash=frozen)


__all__ = ["dataclass"]
