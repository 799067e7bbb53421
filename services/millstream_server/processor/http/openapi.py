"""/openapi.json: every endpoint, made of what reads bodies and what writes answers."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from millstream_server.processor.http import anthropic_schema as anthropic
from millstream_server.processor.http import images_schema as images
from millstream_server.processor.http import schema
from millstream_server.processor.http import tokens_schema as tokens
from millstream_server.processor.http import vectors_schema as vectors
from millstream_server.processor.http.anthropic import MessageErrorBody, TokenCount
from millstream_server.processor.http.anthropic_output import MessageAnswer, MessageEvent
from millstream_server.processor.http.chat_shape import ChatCompletion, ChatCompletionChunk
from millstream_server.processor.http.completion_shape import TextCompletion
from millstream_server.processor.http.errors import ErrorBody
from millstream_server.processor.http.model_list import ListedModel, ModelList
from millstream_server.processor.http.output import encode
from millstream_server.processor.http.responses import schema as responses
from millstream_server.processor.http.responses.output import ResponseEvent
from millstream_server.processor.http.responses.shown import Outcome, Repeated
from millstream_server.runtime.rpc.http import JSON, REQUEST_ID, Endpoint

Unsupported = Mapping[str, tuple[Any, ...]]

_MODULES = b"millstream_server.processor.http."
_SCHEMAS = "#/components/schemas/"
_RESPONSES = "#/components/responses/"
_FORM = "multipart/form-data"
_PARAMETER = re.compile(r"\{(\w+)\}")
_RETRIED = (429, 503)
_ID_HEADER = {REQUEST_ID: {"schema": {"type": "string"}}}
_RETRY_HEADER = {
    "retry-after": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}
}
_FAILURES = {
    400: "A field can't be read or done; `param` names it.",
    401: "The key is missing or unknown.",
    403: "The key may not do this.",
    404: "There is no such model or path.",
    409: "The request was aborted.",
    413: "The body is too large.",
    429: "The queue is full.",
    499: "The request was cancelled.",
    500: "A fault of the server; the message has an id for its operator.",
    503: "No worker is there now.",
    504: "The deadline passed.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a path takes and answers."""

    summary: str
    body: type | None = None
    unsupported: Unsupported = field(default_factory=dict)
    """Fields of the body that are refused, and values that ask for nothing."""
    raw: Mapping[str, Any] = field(default_factory=dict)
    """Types of the body's fields that are read apart from it."""
    answer: type | None = None
    """None: any JSON."""
    rest: type | None = None
    """What else is in the answer's object."""
    events: Sequence[type] = ()
    """What events say, if the body's `stream` is true."""
    failure: type = ErrorBody
    is_form: bool = False
    is_page: bool = False


_RERANK = About(
    summary="Rank documents by how well they answer a query.",
    body=vectors.Rerank,
    unsupported=vectors.UNSUPPORTED,
    answer=vectors.Ranking,
)
_SCORE = About(
    summary="Score pairs of texts.",
    body=vectors.Score,
    unsupported=vectors.UNSUPPORTED,
    answer=vectors.Scores,
)
ABOUT: Mapping[str, About] = {
    "/v1/chat/completions": About(
        summary="Answer a conversation.",
        body=schema.Chat,
        unsupported=schema.UNSUPPORTED,
        raw={"logit_bias": dict[str, float] | None},
        answer=ChatCompletion,
        events=(ChatCompletionChunk,),
    ),
    "/v1/chat/completions/render": About(
        summary="Return what a chat would send to an engine.",
        body=schema.Chat,
        unsupported=schema.UNSUPPORTED,
        answer=tokens.Rendered,
    ),
    "/v1/completions": About(
        summary="Go on with a text.",
        body=schema.Completion,
        unsupported=schema.UNSUPPORTED,
        raw={"prompt": str | list[Any], "logit_bias": dict[str, float] | None},
        answer=TextCompletion,
        events=(TextCompletion,),
    ),
    "/v1/models": About(summary="List the models.", answer=ModelList),
    "/v1/models/{model}": About(summary="Return one model.", answer=ListedModel),
    "/v1/responses": About(
        summary="Answer a conversation, in the shapes of OpenAI's Responses.",
        body=responses.Responses,
        unsupported=responses.UNSUPPORTED,
        answer=Outcome,
        rest=Repeated,
        events=(ResponseEvent,),
    ),
    "/v1/messages": About(
        summary="Answer a conversation, in Anthropic's shapes.",
        body=anthropic.Messages,
        unsupported=anthropic.UNSUPPORTED,
        answer=MessageAnswer,
        events=(MessageEvent,),
        failure=MessageErrorBody,
    ),
    "/v1/messages/count_tokens": About(
        summary="Count the tokens of a conversation.",
        body=anthropic.Count,
        answer=TokenCount,
        failure=MessageErrorBody,
    ),
    "/v1/embeddings": About(
        summary="Turn texts into vectors.",
        body=vectors.Embeddings,
        raw={"input": vectors.Inputs},
        unsupported=vectors.UNSUPPORTED,
        answer=vectors.Vectors,
    ),
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/rerank": _RERANK,
    "/v1/score": _SCORE,
    "/score": _SCORE,
    "/v1/images/generations": About(
        summary="Make images of a prompt.",
        body=images.Generations,
        unsupported=images.UNSUPPORTED,
        answer=images.Made,
        events=(images.Progress, images.Partial, images.Completed),
    ),
    "/v1/images/edits": About(
        summary="Make images of an image and a prompt.",
        body=images.Edits,
        unsupported=images.UNSUPPORTED,
        answer=images.Made,
        events=(images.Progress, images.Partial, images.Completed),
        is_form=True,
    ),
    "/tokenize": About(
        summary="Turn a prompt or a conversation into tokens.",
        body=tokens.Tokenize,
        unsupported=tokens.UNSUPPORTED,
        answer=tokens.Tokenized,
    ),
    "/detokenize": About(
        summary="Turn tokens into text.", body=tokens.Detokenize, answer=tokens.Detokenized
    ),
    "/openapi.json": About(summary="Return this document."),
    "/": About(summary="Return the page for browsers.", is_page=True),
}


def document(endpoints: Sequence[Endpoint]) -> bytes:
    """Write the OpenAPI document (3.1) of these endpoints.

    Raises:
        KeyError: `ABOUT` has nothing of one.
    """
    abouts = [ABOUT[endpoint.path] for endpoint in endpoints]
    schemas = _Schemas(abouts)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, about in zip(endpoints, abouts, strict=True):
        operation = _operation(endpoint, about, schemas)
        paths.setdefault(endpoint.path, {})[endpoint.verb.lower()] = operation
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Millstream",
            "description": "OpenAI's API, Anthropic's Messages, and what routers need.",
            "version": importlib.metadata.version("millstream"),
        },
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {
                name: response
                for failure in dict.fromkeys(about.failure for about in abouts)
                for name, response in _refusals(failure, schemas)
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return encode(made).replace(_MODULES, b"")  # msgspec writes them where a name comes twice


def _refusals(failure: type, schemas: _Schemas) -> Iterator[tuple[str, dict[str, Any]]]:
    content = {JSON: {"schema": schemas.of(failure)}}
    for status, why in _FAILURES.items():
        headers = _ID_HEADER | (_RETRY_HEADER if status in _RETRIED else {})
        yield (
            f"{failure.__name__}{status}",
            {"description": why, "headers": headers, "content": content},
        )


def _operation(endpoint: Endpoint, about: About, schemas: _Schemas) -> dict[str, Any]:
    answer = schemas.of(about.answer) if about.answer else {}
    if about.rest:
        answer = {"allOf": [answer, schemas.of(about.rest)]}
    content: dict[str, Any] = {JSON: {"schema": answer}}
    if about.is_page:
        content = {"text/html": {"schema": {"type": "string"}}}
    if about.events:
        # 3.1 has no schema of an event's data.
        events = [schemas.of(kind) for kind in about.events]
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event-data": events}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", endpoint.path).strip("_") or "page",
        "summary": about.summary,
        "responses": {
            "200": {"description": "OK", "headers": _ID_HEADER, "content": content},
            **{
                str(status): {"$ref": f"{_RESPONSES}{about.failure.__name__}{status}"}
                for status in _FAILURES
            },
        },
    }
    if parameters := _PARAMETER.findall(endpoint.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    if about.body is not None:
        kind = _FORM if about.is_form else JSON
        operation["requestBody"] = {
            "required": True,
            "content": {kind: {"schema": schemas.of(about.body)}},
        }
    return operation


class _Schemas:
    """The schemas of all that is sent, by the names that refer to them."""

    def __init__(self, abouts: Sequence[About]) -> None:
        found = [
            kind
            for about in abouts
            for kind in (about.body, about.answer, about.rest, about.failure, *about.events)
            if kind is not None
        ]
        kinds = list(dict.fromkeys(found))
        refs, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMAS + "{name}")
        self._refs = dict(zip(kinds, refs, strict=True))
        self.components = components
        for about in abouts:
            if about.body is not None:
                self._narrow(self.of(about.body)["$ref"].removeprefix(_SCHEMAS), about)

    def of(self, kind: type) -> dict[str, Any]:
        """Return the reference to a kind's schema."""
        return self._refs[kind]

    def _narrow(self, name: str, about: About) -> None:
        """Say of a body which values are refused, and which fields are files."""
        fields = self.components[name]["properties"]
        for raw, kind in about.raw.items():
            fields[raw] = msgspec.json.schema(kind)
        for refused, nothing in about.unsupported.items():
            if refused in fields:
                fields[refused] = {"enum": list(nothing), "description": "All else is refused."}
        if about.is_form:
            fields["image"] = {"type": "string", "format": "binary"}
