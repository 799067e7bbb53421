"""/v1/completions: each prompt is a turn; several are answered side by side in one body."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from millstream_server.generation.request import LogprobOptions
from millstream_server.processor.conversation import Caller, Completion
from millstream_server.processor.http import bodies, requests, schema
from millstream_server.processor.http.chats import output_of, tell_seed
from millstream_server.processor.http.completion_shape import CompletionShape
from millstream_server.processor.http.errors import refuse
from millstream_server.processor.http.joined_output import JoinedOutput
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.request_id import MAX_REQUEST_ID_BYTES
from millstream_server.runtime.rpc.http import Endpoint, HttpCall

_COMPLETIONS = msgspec.json.Decoder(schema.Completion)
_PROMPT: msgspec.json.Decoder[str | list[int]] = msgspec.json.Decoder(str | schema.Ids)
_PROMPTS: msgspec.json.Decoder[list[str | list[int]]] = msgspec.json.Decoder(
    Annotated[list[str | schema.Ids], msgspec.Meta(min_length=1)]
)
_AT = re.compile(r"\$\[(\d+)\]")
"""Which of several can't be read, in msgspec's errors."""
_SEVERAL = re.compile(rb"\[\s*[\[\"]").match
_DEFAULT_MAX_TOKENS = 16
"""Of a completion that names none, as OpenAI has it."""
_MAX_PROMPTS = 128
_OF_PROMPT = re.compile(r"^(?:text|token_ids\.ids)\b")


class Completions:
    """Serves raw prompts; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._chats = pipeline.chats

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("POST", "/v1/completions", self.complete, refuse)]

    async def complete(self, body: bytes, call: HttpCall) -> None:
        asked, prompts = await bodies.read(self._pipeline.threads, body, _read)
        completions = [
            _completion(asked, prompt, _id_of(call.request_id, index, len(prompts)))
            for index, prompt in enumerate(prompts)
        ]
        with self._pipeline.calls.call():
            if len(prompts) > 1:
                await self._several(asked, completions, call)
                return
            output = output_of(CompletionShape(), asked, call)
            with _errors_name("prompt"):
                turn = await self._chats.complete(completions[0], Caller.of(call), call, output)
            tell_seed(turn.options, call)
            await self._chats.send(turn, output, call)

    async def _several(
        self, asked: schema.Completion, completions: Sequence[Completion], call: HttpCall
    ) -> None:
        n = completions[0].options.n
        outputs = [
            output_of(CompletionShape(first), asked, call, is_part=True)
            for first in range(0, len(completions) * n, n)
        ]
        joined = JoinedOutput(outputs, call)
        try:
            for index, output in enumerate(outputs):
                part, caller = joined.call_of(output), Caller.of(call)
                with _errors_name(f"prompt[{index}]"):
                    turn = await self._chats.complete(completions[index], caller, part, output)
                joined.turns.append(turn)
            tell_seed(turn.options, call)
            await call.send_from(joined)
        finally:
            for turn in joined.turns:
                self._chats.end(turn)
            joined.close()


@contextlib.contextmanager
def _errors_name(prompt: str) -> Iterator[None]:
    """Let errors name a prompt by its path here."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.at(lambda field: _OF_PROMPT.sub(prompt, field)) from error


def _completion(
    asked: schema.Completion, prompt: str | Sequence[int], request_id: str
) -> Completion:
    n = 1 if asked.n is None else asked.n
    if asked.best_of not in (None, n):
        raise InvalidRequestError.of("best_of", "must be n, or left out")
    most = _DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    logprobs = None
    if asked.logprobs is not None:
        logprobs = LogprobOptions(top=requests.checked_top(asked.logprobs, "logprobs"))
    options = requests.options_of(asked, {"max_new_tokens": most}, logprobs=logprobs)
    return Completion(model=asked.model, request_id=request_id, prompt=prompt, options=options)


def _id_of(request_id: str, index: int, prompts: int) -> str:
    """Return the id of one prompt's turn, which the logs have."""
    if prompts == 1:
        return request_id
    end = f"-{index}"
    return request_id[: MAX_REQUEST_ID_BYTES - len(end)] + end


def _read(body: bytes) -> tuple[schema.Completion, Sequence[str | Sequence[int]]]:
    """Read a body and its prompts.

    Raises:
        InvalidRequestError: it can't be read, there are too many prompts, or one is neither text
        nor token ids.
    """
    asked = schema.read(_COMPLETIONS, body)
    with contextlib.suppress(*schema.BROKEN):
        return asked, [_PROMPT.decode(asked.prompt)]
    try:
        several = _PROMPTS.decode(asked.prompt)
    except schema.BROKEN as error:
        found = _AT.search(str(error)) if _SEVERAL(bytes(asked.prompt)) else None
        field = f"prompt[{found[1]}]" if found else "prompt"
        raise InvalidRequestError.of(field, "must be a text or a list of token ids") from None
    if len(several) > _MAX_PROMPTS:
        raise InvalidRequestError.of("prompt", f"at most {_MAX_PROMPTS}, not {len(several)}")
    return asked, several
