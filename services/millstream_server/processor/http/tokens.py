"""Text and tokens: /tokenize, /detokenize, and what a chat would send to a worker (…/render)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from millstream_server.generation.request import Prompt
from millstream_server.generation.sampling import ConstraintKind
from millstream_server.processor.answer_options import CONTINUE
from millstream_server.processor.chat_requests import PreparedTurn
from millstream_server.processor.http import bodies, requests
from millstream_server.processor.http import tokens_schema as schema
from millstream_server.processor.http.errors import refusing
from millstream_server.processor.http.forwarded import Pieces
from millstream_server.processor.http.output import encode
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.http.schema import Chat, read
from millstream_server.processor.text.messages import ConversationPaths
from millstream_server.processor.texts import MAX_DETOKENIZED_IDS, Tokens, UntokenizedChat
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.rpc.http import Endpoint, HttpCall

_TOKENIZE = msgspec.json.Decoder(schema.Tokenize)
_read_detokenize = partial(read, msgspec.json.Decoder(schema.Detokenize))
_TOKENS_AT_ONCE = 4096
_NAMES = ((re.compile(r"\btoken_ids\b"), "tokens"),)
_refuse = refusing(_NAMES)
_GRAMMARS = {
    ConstraintKind.JSON_SCHEMA: "json",
    ConstraintKind.REGEX: "regex",
    ConstraintKind.EBNF: "grammar",
    ConstraintKind.STRUCTURAL_TAG: "structural_tag",
}


class TokenEndpoints:
    """Serves /tokenize and /detokenize; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._texts = pipeline.texts
        self._threads = pipeline.threads

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/tokenize", self.tokenize, _refuse),
            Endpoint("POST", "/detokenize", self.detokenize, _refuse),
        ]

    async def tokenize(self, body: bytes, call: HttpCall) -> None:
        asked, chat = await bodies.read(self._threads, body, _read_tokenize)
        with self._pipeline.calls.call():
            if chat is not None:
                tokens = await self._texts.of_chat(chat)
            elif asked.prompt is not None:
                special = asked.add_special_tokens is not False
                tokens = await self._texts.of_text(
                    asked.model, asked.prompt, special_tokens=special
                )
            else:
                raise InvalidRequestError.of("prompt", "is missing; send prompt or messages")
            await call.send_from(
                Pieces(call, _written(tokens, with_texts=bool(asked.return_token_strs)))
            )

    async def detokenize(self, body: bytes, call: HttpCall) -> None:
        asked = await bodies.read(self._threads, body, _read_detokenize)
        if len(asked.tokens) > MAX_DETOKENIZED_IDS:
            raise InvalidRequestError.of("tokens", f"at most {MAX_DETOKENIZED_IDS}")
        with self._pipeline.calls.call():
            prompt = await self._texts.detokenize(
                asked.model, asked.tokens, special_tokens=not asked.skip_special_tokens
            )
        await call.write(encode(schema.Detokenized(prompt)))


def _read_tokenize(body: bytes) -> tuple[schema.Tokenize, UntokenizedChat | None]:
    """Return what is asked for, and the chat; None: it is a text."""
    asked = read(_TOKENIZE, body, schema.UNSUPPORTED)
    if asked.messages is None:
        return asked, None
    if asked.prompt is not None:
        raise InvalidRequestError.of("prompt", "comes with messages; send one of them")
    if asked.add_special_tokens:
        why = "the model's chat template adds them; leave it out"
        raise InvalidRequestError.of("add_special_tokens", why)
    chat = Chat(
        messages=asked.messages,
        tools=asked.tools,
        chat_template_kwargs=asked.chat_template_kwargs,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt,
    )
    answers = requests.answers_of(chat)
    messages = requests.messages_of(chat)
    if any(message.parts for message in messages):
        why = "this endpoint takes text only; use /v1/chat/completions/render"
        raise UnsupportedFeatureError.of("messages", why)
    return asked, UntokenizedChat(
        model=asked.model,
        messages=messages,
        tools=requests.tools_of(chat),
        answers=answers,
        paths=ConversationPaths(continues=CONTINUE if answers.continues else ""),
    )


def _written(tokens: Tokens, *, with_texts: bool) -> Iterator[bytes]:
    """Write an answer in pieces; ``with_texts`` it has the tokens' texts, too."""
    ids = tokens.ids
    yield b'{"count":%d,"max_model_len":%d,"tokens":[' % (len(ids), tokens.context_length)
    yield from _listed(ids, list)
    if not with_texts:
        yield b'],"token_strs":null}'
        return
    yield b'],"token_strs":['
    yield from _listed(ids, lambda part: [_shown(tokens, token) for token in part])
    yield b"]}"


def _listed(ids: Sequence[int], convert: Callable[[Sequence[int]], Any]) -> Iterator[bytes]:
    for start in range(0, len(ids), _TOKENS_AT_ONCE):
        part = encode(convert(ids[start : start + _TOKENS_AT_ONCE]))[1:-1]
        yield part if not start else b"," + part


def _shown(tokens: Tokens, token: int) -> str:
    return tokens.bytes_of(token).decode("utf-8", "replace")


# ---- …/render ------------------------------------------------------------------------------------


def rendered(prepared: PreparedTurn) -> schema.Rendered:
    """Convert what a chat would send."""
    request, options = prepared.request, prepared.options
    sampling = request.sampling
    grammar = sampling.constraint
    params = schema.SamplingParams(
        max_tokens=sampling.max_new_tokens,
        n=options.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_new_tokens,
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        stop=list(options.stops),
        stop_token_ids=sorted({*prepared.stop_token_ids, *sampling.stop_token_ids}),
        logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
        structured_outputs={_GRAMMARS[grammar.kind]: grammar.source} if grammar else None,
    )
    return schema.Rendered(
        request.request_id,
        request.model,
        list(request.token_ids),
        prepared.text,
        params,
        _features(request.prompt),
        request.cache_salt or None,
    )


def _features(prompt: Prompt) -> schema.Features | None:
    if not prompt.media:
        return None
    features = schema.Features({}, {})
    for item in prompt.media:
        kind = item.modality.value
        features.mm_hashes.setdefault(kind, []).append(item.digest.hex())
        features.mm_placeholders.setdefault(kind, []).extend(
            schema.Placeholder(span.start, span.length) for span in item.spans
        )
    return features
