"""/v1/models: what clients may name, in the fields of OpenAI's API and of Anthropic's."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from millstream_server.processor.http.errors import refuse
from millstream_server.processor.http.output import encode
from millstream_server.processor.models import not_served
from millstream_server.processor.texts import Texts
from millstream_server.runtime.rpc.http import Endpoint, HttpCall

_LIST = "/v1/models"
_ONE = "/v1/models/{model}"


class ListedModel(msgspec.Struct, kw_only=True):
    """A name that requests may use; `root` is the model's own, `tasks` what it does now."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """Most tokens of a prompt and its answer, by the name that SGLang and vLLM have for it."""
    tasks: list[str]
    # Anthropic's
    type: Literal["model"]
    lifecycle: str
    display_name: str
    max_input_tokens: int | None
    created_at: str


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ListedModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
    models: list[Any] | msgspec.UnsetType = msgspec.UNSET


class ModelEndpoints:
    """Serves the list of models, and each of them; one per process."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        now = int(time.time())  # models have no date
        self._created, self._created_at = now, datetime.fromtimestamp(now, UTC).isoformat()

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("GET", _LIST, self.models, refuse),
            Endpoint("GET", _ONE, self.model, refuse),
        ]

    async def models(self, _body: bytes, call: HttpCall) -> None:
        """List what clients may name, aliases too."""
        data = self._models()
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        listed = ModelList("list", data, has_more=False, first_id=first, last_id=last)
        if "client_version" in parse_qs(call.query):
            # Codex asks so for what it knows of models of its own maker, prompts among it.
            listed.models = []
        await call.write(encode(listed))

    async def model(self, _body: bytes, call: HttpCall) -> None:
        name = unquote(call.path.removeprefix(f"{_LIST}/"))
        found = next((model for model in self._models() if model.id == name), None)
        if found is None:
            raise not_served(name)
        await call.write(encode(found))

    def _models(self) -> list[ListedModel]:
        found: list[ListedModel] = []
        for model in self._texts.models():
            tasks = sorted(task.name.lower() for task in model.tasks)
            found += [
                self._model(name, model.name, model.context_length, tasks)
                for name in (model.name, *model.aliases)
            ]
        return found

    def _model(self, name: str, root: str, context: int | None, tasks: list[str]) -> ListedModel:
        return ListedModel(
            id=name,
            object="model",
            created=self._created,
            owned_by="millstream",
            root=root,
            max_model_len=msgspec.UNSET if context is None else context,
            max_input_tokens=context,
            tasks=tasks,
            type="model",
            lifecycle="active",
            display_name=name,
            created_at=self._created_at,
        )
