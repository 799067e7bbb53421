"""`millstream embed`, `millstream rerank` and `millstream models`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from operator import mul
from typing import Any

from rich import box
from rich.table import Table

from millstream.v1 import media_pb2, processor_pb2
from millstream_client import Client
from millstream_server.cli.answers import open_console
from millstream_server.cli.client import call_processor, role_name
from millstream_server.cli.flags import (
    MODEL_HELP,
    Commands,
    add_json,
    add_processor,
    add_target,
    command,
    fail,
    flag,
)

_TASKS = {
    processor_pb2.MODEL_TASK_CHAT: "chat",
    processor_pb2.MODEL_TASK_COMPLETE: "complete",
    processor_pb2.MODEL_TASK_EMBED: "embed",
    processor_pb2.MODEL_TASK_RERANK: "rerank",
    processor_pb2.MODEL_TASK_GENERATE_IMAGE: "image",
    processor_pb2.MODEL_TASK_GENERATE_VIDEO: "video",
}
_MEDIA = {media_pb2.MODALITY_IMAGE: "images", media_pb2.MODALITY_VIDEO: "videos"}
_EMBED = """\
Turn texts into vectors; prints a line of JSON for each.

examples:
  millstream embed "How do I bake bread?"
  millstream embed --compare "a cat" "a kitten" "a database"
  millstream embed - --dimensions 64 < lines.txt > vectors.jsonl
"""
_RERANK = """\
Sort documents by how well they answer a query.

examples:
  millstream rerank "How do I bake bread?" "Mix flour and water, then bake." "A GPU has cores."
  millstream rerank "What is prefill?" - --top-n 3 < passages.txt
"""
_MODELS = """\
List the models that are served and their workers.

examples:
  millstream models
  millstream models --address processor.example:50051 --tls-ca-file ca.pem
  millstream models --json | jq -r .name
"""


def add_embed(commands: Commands) -> None:
    """Add the command that makes vectors."""
    parser = command(commands, "embed", _run_embed, _EMBED)
    flag(parser, "texts TEXT", "a single - reads texts from stdin, one per line", nargs="+")
    add_target(parser)
    flag(parser, "--dimensions N", "cut the vectors to so many numbers")
    flag(
        parser,
        "--prompt-name NAME",
        "put this prompt of the model in front of each text, such as query or document",
    )
    flag(parser, "--compare", "print how alike the texts are, instead of vectors")
    add_json(parser, "with --compare: the rows of the table")


def add_rerank(commands: Commands) -> None:
    """Add the command that sorts documents."""
    parser = command(commands, "rerank", _run_rerank, _RERANK)
    flag(parser, "query QUERY", "the question")
    flag(
        parser,
        "documents DOCUMENT",
        "a single - reads documents from stdin, one per line",
        nargs="+",
    )
    add_processor(parser)
    flag(parser, "--model NAME", MODEL_HELP, default="")
    flag(parser, "--top-n N", "print the best N only")
    flag(parser, "--instruction TEXT", "what makes a document a good one, for models that read it")
    add_json(parser, "documents")


def add_models(commands: Commands) -> None:
    """Add the command that lists models."""
    parser = command(commands, "models", _run_models, _MODELS)
    add_processor(parser)
    add_json(parser, "models")


def _run_embed(args: argparse.Namespace) -> int:
    texts = _texts(args.texts)
    if not texts:
        return fail("there is no text")
    return call_processor(args, lambda client, _: _embed(client, args, texts))


def _run_rerank(args: argparse.Namespace) -> int:
    documents = _texts(args.documents)
    if not documents:
        return fail("there is no document")
    return call_processor(args, lambda client, _: _rerank(client, args, documents))


def _texts(given: Sequence[str]) -> list[str]:
    """Return the texts that were given; a single - reads them from stdin, one per line."""
    if list(given) == ["-"]:
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    return list(given)


async def _embed(client: Client, args: argparse.Namespace, texts: list[str]) -> int:
    found = await client.embed(
        texts, dimensions=args.dimensions, prompt_name=args.prompt_name, model=args.model
    )
    if args.compare:
        _print_similarities(texts, found.vectors, as_json=args.json)
    else:
        for text, vector in zip(texts, found.vectors, strict=True):
            numbers = [float(f"{number:.8g}") for number in vector]
            _print_json({"text": text, "embedding": numbers})
    if args.show_usage:
        width = len(found.vectors[0])
        print(f"{found.input_tokens} tokens · {width} dimensions", file=sys.stderr)
    return 0


def _print_similarities(
    texts: Sequence[str], vectors: Sequence[Sequence[float]], *, as_json: bool
) -> None:
    # Of vectors of length 1 it is the cosine.
    rows = [[sum(map(mul, vector, other)) for other in vectors] for vector in vectors]
    if as_json:
        for text, row in zip(texts, rows, strict=True):
            _print_json({"text": text, "similarities": [round(each, 6) for each in row]})
        return
    table = Table("", *(str(i + 1) for i in range(len(texts))), box=box.SIMPLE_HEAD)
    for i, (text, row) in enumerate(zip(texts, rows, strict=True)):
        table.add_row(f"{i + 1}  {text}", *(f"{each:.2f}" for each in row))
    open_console().print(table)


def _print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields, ensure_ascii=False))


async def _rerank(client: Client, args: argparse.Namespace, documents: list[str]) -> int:
    results = await client.rerank(
        args.query,
        documents,
        top_n=args.top_n,
        instruction=args.instruction,
        model=args.model,
    )
    if args.json:
        for one in results:
            text = documents[one.index]
            _print_json({"score": one.score, "index": one.index, "document": text})
        return 0
    table = Table("score", "number", "document", box=box.SIMPLE_HEAD)
    for ranked in results:
        table.add_row(f"{ranked.score:.4f}", str(ranked.index + 1), documents[ranked.index])
    open_console().print(table)
    return 0


def _run_models(args: argparse.Namespace) -> int:
    return call_processor(args, lambda client, _: _list(client, args))


async def _list(client: Client, args: argparse.Namespace) -> int:
    served = await client.models()
    if args.json:
        for model in served:
            _print_json(_fields(model))
        return 0
    columns = ["model", "ready", "does", "context", "takes", "workers"]
    # What says nothing is left out.
    columns += ["default for"] if len(served) > 1 else []
    columns += [name for name in ("aliases", "adapters") if any(getattr(m, name) for m in served)]
    columns += ["answer format"] if any(m.HasField("answer_format") for m in served) else []
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, overflow="fold")
    for model in served:
        cells = _cells(model)
        table.add_row(*(cells[name] for name in columns))
    open_console().print(table)
    return 0


def _cells(model: processor_pb2.ServedModel) -> dict[str, str]:
    fields = _fields(model)
    workers = ", ".join(f"{count} {role}" for role, count in fields["workers"].items())
    return {
        "model": model.name,
        "ready": "yes" if model.ready else "no, lacks workers",
        "does": ", ".join(fields["does"]) or "unknown",
        "context": f"{model.context_length} tokens" if model.context_length else "",
        "takes": ", ".join(fields["takes"]),
        "workers": workers or "none connected",
        "default for": ", ".join(fields["default_for"]),
        "aliases": ", ".join(model.aliases),
        "adapters": ", ".join(model.adapters) or "none",
        "answer format": ": ".join((fields["answer_format"] or {}).values()),
    }


def _fields(model: processor_pb2.ServedModel) -> dict[str, Any]:
    form = model.answer_format
    has_form = model.HasField("answer_format")
    return {
        "name": model.name,
        "ready": model.ready,
        "does": [_TASKS[task] for task in model.tasks if task in _TASKS],
        "default_for": [_TASKS[task] for task in model.default_of if task in _TASKS],
        "context_length": model.context_length,
        "takes": ["text", *(_MEDIA.get(kind, "unknown") for kind in model.modalities)],
        "workers": {role_name(pool.role): pool.connected for pool in model.workers},
        "aliases": list(model.aliases),
        "adapters": list(model.adapters),
        "tokenizer": model.text_files.tokenizer,
        "chat_template": model.text_files.chat_template,
        "answer_format": {"name": form.name, "reason": form.reason} if has_form else None,
    }
