"""Tokens of texts, texts of tokens, and the models, as Processors know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from millstream.v1 import processor_pb2
from millstream_server.door import wire
from millstream_server.door.names import Names
from millstream_server.door.processors import Processors
from millstream_server.links.channel import rpc_of
from millstream_server.processor.texts import ListedModel, Tokens, UntokenizedChat

_TOKENIZE = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Tokenize")
_DETOKENIZE = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Detokenize")
_LIST = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/ListModels")


class RemoteTexts:
    """`processor.http.pipeline.Texts`; one per process."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors

    async def of_text(
        self, model: str, text: str, *, special_tokens: bool, with_bytes: bool = False
    ) -> Tokens:
        names = Names(others={"text": "prompt"})
        return await self._tokens(
            lambda: processor_pb2.TokenizeRequest(
                model=model,
                text=text,
                no_special_tokens=not special_tokens,
                return_token_bytes=with_bytes,
            ),
            names,
        )

    async def of_chat(self, chat: UntokenizedChat) -> Tokens:
        names = Names.of_untokenized(chat)
        return await self._tokens(lambda: wire.tokenize_chat_of(chat), names)

    async def _tokens(self, make: Callable[[], Any], names: Names) -> Tokens:
        with names.in_errors():
            found = await self._processors.call(_TOKENIZE, wire.sendable(make))
        ids = found.token_ids[:]
        texts = dict(zip(ids, found.token_bytes, strict=False))
        return Tokens(ids, found.context_length, texts.__getitem__, found.rendered_prompt)

    async def detokenize(self, model: str, ids: Sequence[int], *, special_tokens: bool) -> str:
        request = processor_pb2.DetokenizeRequest(
            model=model, token_ids=ids, include_special_tokens=special_tokens
        )
        found = await self._processors.call(_DETOKENIZE, request)
        text: str = found.text
        return text

    async def models(self) -> Sequence[ListedModel]:
        return [wire.listed(model) for model in await self.served()]

    async def served(self) -> Sequence[processor_pb2.ServedModel]:
        """List the models, with all that Processors say of them."""
        found = await self._processors.call(_LIST, processor_pb2.ListModelsRequest())
        models: Sequence[processor_pb2.ServedModel] = found.models
        return models
