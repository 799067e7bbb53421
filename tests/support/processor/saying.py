"""Workers of the test's own process that say what the test wants, whatever their engine makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Constraint
from millstream_server.generation.worker.core import GenerationWorker
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import ServingError


@dataclass(frozen=True)
class Breaking:
    """An answer that fails behind its text."""

    text: str
    error: ServingError


class _Saying:
    """A sink in front of a request's own: it replaces the tokens, in order."""

    def __init__(self, sink: Any, ids: Sequence[int], eos: int, error: ServingError | None) -> None:
        self._sink = sink
        self._left = list(ids)
        self._eos = eos
        self._error = error

    def emit(self, token_ids: Sequence[int], logprobs: Any = ()) -> None:
        said, self._left = self._left[: len(token_ids)], self._left[len(token_ids) :]
        self._sink.emit(said)

    def finish(self, finish: Finish) -> None:
        if self._error is not None:
            self._sink.fail(self._error)
            return
        if finish.reason is FinishReason.LENGTH and not self._left:
            finish = replace(finish, reason=FinishReason.STOP, matched_token_id=self._eos)
        self._sink.finish(finish)

    def fail(self, error: Any) -> None:
        self._sink.fail(error)


@contextlib.contextmanager
def saying(
    model: TextModel, *answers: str | Breaking, constraints: list[Constraint | None] | None = None
) -> Iterator[list[str]]:
    """Let the workers give these answers, one per request; keep the prompts' texts.

    An answer ends with the model's EOS token, unless the request's max_new_tokens cut it or it is
    `Breaking`. The requests' constraints are added to ``constraints``.
    """
    prompts: list[str] = []
    left = list(answers)
    submit = GenerationWorker.submit
    (eos, *_) = model.eos_token_ids

    def say(self: GenerationWorker, start: GenerationRequest, sink: OutputSink) -> str:
        prompts.append(model.decode(start.token_ids, skip_special_tokens=False))
        if constraints is not None:
            constraints.append(start.sampling.constraint)
        answer = left.pop(0)
        text, error = (answer, None) if isinstance(answer, str) else (answer.text, answer.error)
        ids = [*model.encode(text, add_special_tokens=False), *([] if error else [eos])]
        most = min(start.sampling.max_new_tokens, len(ids))
        asked = replace(
            start, sampling=replace(start.sampling, max_new_tokens=most, ignore_eos=True)
        )
        return submit(self, asked, _Saying(sink, ids, eos, error))

    with mock.patch.object(GenerationWorker, "submit", say):
        yield prompts
