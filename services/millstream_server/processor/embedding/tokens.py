"""Batches of texts to token ids, in pieces that let chats in between."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from millstream_server.processor.text.tokenizer import SECONDS_PER_CHAR
from millstream_server.runtime.errors import FieldViolation, InvalidRequestError
from millstream_server.runtime.work.pool import stop_if_gone

if TYPE_CHECKING:
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.runtime.work.pool import WorkPool

_SMALL_CHARS = 1024
"""Up to so many a thread would not be worth it."""
_PIECE_CHARS = 64 << 10
"""Tokenized at once: some 30 ms. A longer text is a piece of its own."""
MAX_PAIR_CHARS = 64 << 20
"""Of all pairs together: the query is tokenized with each document."""
_MAX_VIOLATIONS = 8

Ids = Sequence[int]


class BatchTokenizer:
    """Tokenizes batches within a limit of tokens."""

    def __init__(self, threads: WorkPool, max_tokens: int) -> None:
        self._threads = threads
        self._max_tokens = max_tokens

    async def inputs(
        self, text: TextModel, inputs: Sequence[str | Ids], most_each: int, prompt: str = ""
    ) -> list[Ids]:
        """Tokenize the texts among ``inputs``, with special tokens; ids stay as they are.

        ``prompt`` is put in front of each text.

        A text that surely has more tokens than ``most_each`` is refused before; others may have
        more, too.

        Raises:
            InvalidRequestError: a text is empty, or there are too many tokens.
        """
        empty = [f"inputs[{i}].text" for i, part in enumerate(inputs) if part == ""]
        if empty:
            raise InvalidRequestError.of_all(
                [FieldViolation(field, "must not be empty") for field in empty[:_MAX_VIOLATIONS]]
            )

        def encode(index: int, part: str | Ids) -> Ids:
            if not isinstance(part, str):
                return array("I", part)
            part = prompt + part
            _check_length(text, part, most_each, f"inputs[{index}].text")
            return array("I", text.encode(part, add_special_tokens=True))

        sizes = [len(part) + (len(prompt) if isinstance(part, str) else 0) for part in inputs]
        works = [partial(encode, index, part) for index, part in enumerate(inputs)]
        return await self._encode(works, sizes, "inputs")

    async def pairs(
        self,
        text: TextModel,
        query: str,
        documents: Sequence[str],
        most_each: int,
        join: Callable[[str, str], Ids],
    ) -> list[Ids]:
        """Tokenize a query with each document by ``join``.

        Texts that surely have more tokens than ``most_each`` are refused before, as in `inputs`.

        Raises:
            InvalidRequestError: they are too long together.
        """
        sizes = [len(query) + len(document) for document in documents]
        if sum(sizes) > MAX_PAIR_CHARS:
            raise InvalidRequestError.of(
                "documents",
                f"have {sum(sizes)} characters with the query before each; {MAX_PAIR_CHARS} are "
                "allowed: send them in several requests",
            )

        def encode(index: int, document: str) -> Ids:
            if not index:
                _check_length(text, query, most_each, "query")
            _check_length(text, document, most_each, f"documents[{index}]")
            return array("I", join(query, document))

        works = [partial(encode, index, document) for index, document in enumerate(documents)]
        return await self._encode(works, sizes, "documents")

    async def _encode(
        self, works: Sequence[Callable[[], Ids]], sizes: Sequence[int], field: str
    ) -> list[Ids]:
        """Run ``works``, whose texts have these lengths, until there are too many tokens."""
        tokens = 0

        def run(start: int, stop: int) -> list[Ids]:
            nonlocal tokens
            found = []
            for work in works[start:stop]:
                stop_if_gone()
                found.append(work())
            tokens += sum(map(len, found))
            if tokens > self._max_tokens:
                raise InvalidRequestError.of(
                    field,
                    f"have more than {self._max_tokens} tokens together; send them in several "
                    "batches",
                )
            return found

        if sum(sizes) <= _SMALL_CHARS:
            return run(0, len(works))
        pieces = [
            (partial(run, start, stop), sum(sizes[start:stop]) * SECONDS_PER_CHAR)
            for start, stop in _pieces(sizes)
        ]
        return [ids for piece in await self._threads.in_turns(pieces) for ids in piece]


def _check_length(text: TextModel, part: str, most: int, field: str) -> None:
    """Refuse a text that surely has more tokens.

    Raises:
        InvalidRequestError: it has.
    """
    if len(part) > most and text.floor.exceeds(part, most):
        raise InvalidRequestError.of(
            field, f"has more than {most} tokens; this model takes at most {most}"
        )


def _pieces(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield slices whose texts have about `_PIECE_CHARS` together."""
    start = chars = 0
    for index, size in enumerate(sizes):
        if chars and chars + size > _PIECE_CHARS:
            yield start, index
            start, chars = index, 0
        chars += size
    yield start, len(sizes)
