"""The readers of bodies of HTTP requests and of RPCs as JSON, with their inputs and bounds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from millstream.v1 import embedding_pb2, processor_pb2
from millstream_server.processor.http import (
    anthropic_requests,
    completions,
    images,
    images_schema,
    requests,
    tokens,
    vectors,
)
from millstream_server.processor.http.form import read_form
from millstream_server.processor.http.responses import input as responses_input
from millstream_server.processor.http.responses import requests as responses_requests
from millstream_server.processor.http.responses import tools as responses_tools
from millstream_server.processor.prompts import check_token_ids
from millstream_server.processor.text.messages import ConversationPaths, check_messages
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import ServingError, StatusError
from millstream_server.runtime.rpc.json_messages import from_json
from tests.benchmarks.fuzzing.costs import Bound, Read, Reader
from tests.benchmarks.fuzzing.trees import Grammar
from tests.support.models.models import CHATML, save_tokenizer

_VOCABULARY = 1024


def refusing(read: Read, *refusals: type[Exception]) -> Read:
    """Let refusals be none of the reader's errors."""

    def reading(data: bytes) -> None:
        with contextlib.suppress(ServingError, StatusError, *refusals):
            read(data)

    return reading


@functools.cache
def _model() -> TextModel:
    with TemporaryDirectory() as folder:
        path = Path(folder)
        save_tokenizer(path)
        path.joinpath("config.json").write_text('{"max_position_embeddings": 4096}')
        path.joinpath("chat_template.jinja").write_text(CHATML)
        return TextModel.load(path)


def with_model(read: Callable[[TextModel, bytes], None]) -> Callable[[], Read]:
    return lambda: refusing(partial(read, _model()))


def plain(read: Read, *refusals: type[Exception]) -> Callable[[], Read]:
    return lambda: refusing(read, *refusals)


# ---- JSON ----------------------------------------------------------------------------------------

_TEXT = {
    "text": [
        "a",
        "é",
        "𝄞",
        " ",
        "\\n",
        "\\u0041",
        "\\ud834",
        "①",
        "<|im_start|>",
        "<tool_call>",
        "{{",
    ],
    "name": ["a", "①", "a①", "⟨text*⟩", "constructor"],
    "json": [
        "1",
        "①",
        "1e308",
        '"⟨text*⟩"',
        "null",
        "{}",
        "[]",
        "[⟨json⟩]",
        '{"a":⟨json⟩}',
        "[⟨json*,⟩]",
        "{⟨pair*,⟩}",
        '"\udcff"',
    ],
    "pair": ['"⟨name⟩":⟨json⟩', '"a①":⟨json⟩'],
}
_SCHEMAS = {
    "schema": [
        "{}",
        "true",
        '{"type":"string"}',
        '{"type":[⟨type*,⟩]}',
        '{"$ref":"#/$defs/x②"}',
        '{"$ref":"#/$defs/x0"}',
        '{"anyOf":[⟨schema*,⟩]}',
        '{"type":"object","properties":{⟨property*,⟩}}',
        '{"items":⟨schema⟩}',
        '{"enum":[⟨json*,⟩]}',
        '{"pattern":"⟨pattern*⟩"}',
        "⟨json⟩",
    ],
    "type": ['"string"', '"object"', "1"],
    "property": ['"a①":⟨schema⟩', '"⟨name⟩":⟨schema⟩'],
    "pattern": ["a", "[a-z]", "(a|b)*", "\\\\d{3}", "(?:x+)+"],
}
_FIELDS = {
    "field": [
        '"stop":[⟨string*,⟩]',
        '"logit_bias":{⟨bias*,⟩}',
        '"stop_token_ids":[⟨number*,⟩]',
        '"tools":[⟨tool*,⟩]',
        '"tool_choice":⟨json⟩',
        '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":⟨schema⟩}}',
        '"chat_template_kwargs":{⟨pair*,⟩}',
        '"prompt_logprobs":⟨json⟩',
        '"⟨name⟩":⟨json⟩',
        '"reasoning_effort":⟨string⟩',
        '"a①":⟨json⟩',
        '"metadata":{⟨pair*,⟩}',
    ],
    "string": ['"⟨text*⟩"', '"a①"'],
    "bias": ['"①":1', '"⟨number⟩":-100', '"⟨name⟩":⟨json⟩'],
    "number": ["1", "①", "4294967295", "-0", "00", "1.0", "⟨digit*⟩"],
    "digit": ["1", "9"],
    "tool": [
        '{"type":"function","function":{"name":"f①","parameters":⟨schema⟩}}',
        '{"type":"function","function":{"name":"f①"}}',
        '{"type":"function","name":"f①","parameters":⟨schema⟩}',
        '{"name":"f①","input_schema":⟨schema⟩}',
        '{"type":"namespace","name":"n①","tools":[⟨tool*,⟩]}',
        '{"type":"custom","name":"c①","format":{"type":"grammar","syntax":"regex","definition":"⟨pattern*⟩"}}',
    ],
    "message": [
        '{"role":"user","content":⟨string⟩}',
        '{"role":"user","content":[⟨part*,⟩]}',
        '{"role":"assistant","content":⟨string⟩,"tool_calls":[⟨call*,⟩]}',
        '{"role":"assistant","content":[⟨part*,⟩]}',
        '{"role":"tool","tool_call_id":"c①","content":⟨string⟩}',
        '{"role":"system","content":⟨string⟩}',
        '{"type":"function_call","call_id":"c①","name":"f","arguments":"{}"}',
        '{"type":"function_call_output","call_id":"c①","output":⟨string⟩}',
        "{}",
    ],
    "part": [
        '{"type":"text","text":⟨string⟩}',
        '{"type":"input_text","text":⟨string⟩}',
        '{"type":"image_url","image_url":{"url":"⟨url⟩"}}',
        '{"type":"image","source":{"type":"base64","media_type":"image/png","data":"⟨base64*⟩"}}',
        '{"type":"input_image","image_url":"⟨url⟩"}',
        '{"type":"tool_use","id":"c①","name":"f","input":⟨json⟩}',
        '{"type":"tool_result","tool_use_id":"c①","content":⟨string⟩}',
        '{"type":"thinking","thinking":⟨string⟩}',
    ],
    "call": ['{"id":"c①","type":"function","function":{"name":"f","arguments":"{}"}}'],
    "url": [
        "data:image/png;base64,⟨base64*⟩",
        "data:⟨parameter*;⟩;base64,AAAA",
        "data:,⟨text*⟩",
        "https://⟨text*⟩",
    ],
    "parameter": ["a", "a=b", "", ","],
    "base64": ["AAAA", "A", "=", "\\n", "!"],
}


def _bodies(*wholes: str) -> Grammar:
    return Grammar({"body": wholes, **_FIELDS, **_SCHEMAS, **_TEXT})


def _chat(text: TextModel, data: bytes) -> None:
    asked, messages = requests.read_chat(data)
    tools = requests.tools_of(asked)
    requests.answers_of(asked)
    requests.chat_options(asked)
    _rendered(text, messages, tools)


def _rendered(text: TextModel, messages: Sequence[Any], tools: Sequence[Any]) -> None:
    if check_messages(messages, tools, ConversationPaths("messages")):
        return
    prompt = text.chat_template.render(messages, tools)
    text.encode(prompt[: 64 << 10], add_special_tokens=False)


def _messages(text: TextModel, data: bytes) -> None:
    asked, messages = anthropic_requests.read_messages(data)
    tools = anthropic_requests.tools_of(asked)
    anthropic_requests.options_of(asked)
    anthropic_requests.answers_of(asked)
    _rendered(text, messages, tools)


def _responses(text: TextModel, data: bytes) -> None:
    read = responses_input.read_body(data)
    asked = read.asked
    items = asked.input if isinstance(asked.input, list) else ()
    tools = responses_tools.Tools(asked.tools or (), items)
    responses_requests.answers_of(asked, tools)
    responses_requests.response_options(asked)
    _rendered(text, read.messages, tools.told)


def _completion(data: bytes) -> None:
    asked, prompts = completions._read(data)
    requests.options_of(asked, {})
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, _VOCABULARY)


def _others(data: bytes) -> None:
    """Read the bodies of the endpoints that have little in them; the first line names one."""
    readers: Mapping[str, Callable[[bytes], Any]] = {
        "count": anthropic_requests.read_count,
        "tokenize": tokens._read_tokenize,
        "detokenize": tokens._read_detokenize,
        "embeddings": vectors._read_embeddings,
        "rerank": vectors._read_rerank,
        "score": vectors._read_score,
        "images": images._read_generations,
    }
    name, _, body = data.partition(b"\n")
    readers[name.decode()](body)


_RPCS: Mapping[str, Callable[[], Any]] = {
    "chat": processor_pb2.ChatRequest,
    "complete": processor_pb2.CompleteRequest,
    "tokenize": processor_pb2.TokenizeRequest,
    "detokenize": processor_pb2.DetokenizeRequest,
    "parse": processor_pb2.ParseRequest,
    "embed": embedding_pb2.EmbedRequest,
}


def _rpc(data: bytes) -> None:
    name, _, body = data.partition(b"\n")
    from_json(_RPCS[name.decode()], body)


_RPC = Grammar(
    {
        "rpc": [
            'tokenize\n{"conversation":{"messages":[⟨message*,⟩]}}',
            'chat\n{"start":{"messages":[⟨message*,⟩],"options":{⟨option*,⟩}}}',
            'complete\n{"tokenIds":{"ids":[⟨number*,⟩]},"options":{⟨option*,⟩}}',
            'detokenize\n{"tokenIds":[⟨number*,⟩]}',
            'parse\n{"text":"⟨text*⟩"}',
            'parse\n{"reading":{"tools":[⟨message*,⟩]}}',
            'embed\n{"start":{"inputs":[⟨message*,⟩]}}',
            "chat\n{⟨pair*,⟩}",
            "tokenize\n⟨json⟩",
        ],
        "message": [
            "{}",
            '{"role":1}',
            '{"content":[⟨content*,⟩]}',
            '{"name":"⟨text*⟩"}',
            "⟨json⟩",
        ],
        "content": ["{}", '{"text":"⟨text*⟩"}', '{"image":{"data":"⟨base64*⟩"}}'],
        "base64": ["AAAA", "A", "-_", "="],
        "option": [
            '"sampling":{"logitBias":{⟨bias*,⟩}}',
            '"stop":[⟨string*,⟩]',
            '"sampling":{"stopTokenIds":[⟨number*,⟩]}',
            '"⟨name⟩":⟨json⟩',
        ],
        "bias": ['"①":1', '"①":"NaN"'],
        "string": ['"⟨text*⟩"', '"a①"'],
        "number": ["1", "①", '"1"', "1.0", "1e3", "4294967295"],
        **_TEXT,
    }
)


def _logit_bias(data: bytes) -> None:
    asked, _ = requests.read_chat(b'{"messages":[{"role":"user","content":"a"}],' + data + b"}")
    requests.chat_options(asked)


# ---- forms -------------------------------------------------------------------------


def _form(data: bytes) -> None:
    kind, _, body = data.partition(b"\n")
    read_form(images_schema.Edits, body, kind)


_FORM = Grammar(
    {
        "whole": [
            "multipart/form-data; boundary=b\n⟨part*⟩--b--\r\n",
            "multipart/form-data; ⟨parameter*; ⟩; boundary=⟨char*⟩\n⟨part*⟩",
            "multipart/form-data; boundary=b\n--b\r\n⟨header*⟩\r\nabc\r\n--b--",
        ],
        "part": [
            '--b\r\nContent-Disposition: form-data; name="⟨name*⟩"\r\n\r\n⟨char*⟩\r\n',
            '--b\r\nContent-Disposition: form-data; name="a①"; filename="⟨name*⟩"\r\n\r\n⟨char*⟩',
            "\r\n",
            "--b\r\n⟨header*⟩\r\n\r\n",
            "--b\r\n",
        ],
        "header": [
            "a①: ⟨char*⟩\r\n",
            "A:b\r\n",
            "Content-Disposition: form-data; ⟨parameter*; ⟩\r\n",
        ],
        "parameter": ["a=b", 'a="⟨name*⟩"', "a*0=b", "a*=utf-8''⟨name*⟩", "", "name=a①"],
        "name": ["a", "\\", '\\"', ";", "é", "①", "%41"],
        "char": ["a", "\r", "\n", "\r\n", "\r\n-", "--b", "\r\n--", "\xff", "é", "-"],
    }
)


_JSON = Bound(calls=8, us=6)
DOOR_READERS: tuple[Reader, ...] = (
    Reader(
        name="chat",
        of="http/requests.py, text/messages.py, text/template.py",
        make=with_model(_chat),
        grammar=_bodies(
            '{"messages":[⟨message*,⟩]}',
            '{"messages":[{"role":"user","content":"a"}],⟨field*,⟩}',
            '{"messages":[⟨message*,⟩],⟨field*,⟩}',
            "⟨json⟩",
        ),
        bound=_JSON,
    ),
    Reader(
        name="messages",
        of="http/anthropic_requests.py",
        make=with_model(_messages),
        grammar=_bodies(
            '{"max_tokens":1,"messages":[⟨message*,⟩]}',
            '{"max_tokens":1,"messages":[⟨message*,⟩],"system":[⟨part*,⟩],⟨field*,⟩}',
        ),
        bound=_JSON,
    ),
    Reader(
        name="responses",
        of="http/responses",
        make=with_model(_responses),
        grammar=_bodies(
            '{"input":[⟨message*,⟩]}',
            '{"input":"a",⟨field*,⟩}',
            '{"input":[⟨message*,⟩],⟨field*,⟩}',
        ),
        bound=Bound(calls=8, us=6, memory=50),
    ),
    Reader(
        name="completions",
        of="http/completions.py, prompts.py",
        make=plain(_completion),
        grammar=_bodies(
            '{"prompt":"⟨text*⟩"}',
            '{"prompt":[⟨number*,⟩]}',
            '{"prompt":[⟨string*,⟩]}',
            '{"prompt":⟨json⟩,⟨field*,⟩}',
        ),
        bound=_JSON,
    ),
    Reader(
        name="bodies",
        of="http/tokens.py, vectors.py, images.py, anthropic_requests.py",
        make=plain(_others),
        grammar=_bodies(
            'count\n{"messages":[⟨message*,⟩]}',
            'tokenize\n{"messages":[⟨message*,⟩],⟨field*,⟩}',
            'tokenize\n{"prompt":⟨string⟩}',
            'detokenize\n{"tokens":[⟨number*,⟩]}',
            'embeddings\n{"input":⟨json⟩}',
            'embeddings\n{"input":[⟨string*,⟩]}',
            'embeddings\n{"input":[[⟨number*,⟩],[⟨number*,⟩]]}',
            'rerank\n{"query":"a","documents":[⟨string*,⟩]}',
            'score\n{"text_1":⟨string⟩,"text_2":[⟨string*,⟩]}',
            'images\n{"prompt":⟨string⟩,⟨field*,⟩}',
        ),
        bound=_JSON,
    ),
    Reader(
        name="rpc-json",
        of="rpc/json_messages.py",
        make=plain(_rpc),
        grammar=_RPC,
        bound=Bound(calls=15, us=7, total_s=1.1),
        sizes=(1 << 10, 32 << 10, 1 << 20),
    ),
    Reader(
        name="form",
        of="http/form.py",
        make=plain(_form),
        grammar=_FORM,
        bound=Bound(calls=30, us=6),
        binary=True,
    ),
    Reader(
        name="logit-bias",
        of="http/requests.py",
        make=plain(_logit_bias),
        grammar=Grammar(
            {
                "whole": ['"logit_bias":{⟨bias*,⟩}', '"logit_bias":⟨json⟩'],
                **_FIELDS,
                **_SCHEMAS,
                **_TEXT,
            }
        ),
        bound=_JSON,
    ),
)
