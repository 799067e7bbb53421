"""`millstream embed`, `millstream rerank` and `millstream models`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from operator import mul

from rich import box
from rich.table import Table

from millstream.v1 import media_pb2, processor_pb2
from millstream_client import Client
from millstream_server.cli.answers import open_console
from millstream_server.cli.client import call_processor, role_name
from millstream_server.cli.flags import Commands, add_processor, add_target, command, fail

_TASKS = {
    processor_pb2.MODEL_TASK_CHAT: "chat",
    processor_pb2.MODEL_TASK_COMPLETE: "complete",
    processor_pb2.MODEL_TASK_EMBED: "embed",
    processor_pb2.MODEL_TASK_RERANK: "rerank",
    processor_pb2.MODEL_TASK_GENERATE_IMAGE: "image",
    processor_pb2.MODEL_TASK_GENERATE_VIDEO: "video",
}
_MEDIA = {media_pb2.MODALITY_IMAGE: "images", media_pb2.MODALITY_VIDEO: "videos"}


def add_embed(commands: Commands) -> None:
    """Add the command that makes vectors."""
    parser = command(
        commands,
        "embed",
        _run_embed,
        "Turn texts into vectors; prints a line of JSON for each.",
        "",
        'millstream embed "How do I bake bread?"',
        'millstream embed --compare "a cat" "a kitten" "a database"',
        "millstream embed - --dimensions 64 < lines.txt > vectors.jsonl",
    )
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="a single - reads texts from stdin, one per line"
    )
    add_target(parser)
    parser.add_argument(
        "--dimensions", type=int, metavar="N", help="cut the vectors to so many numbers"
    )
    parser.add_argument(
        "--prompt-name",
        metavar="NAME",
        help="put this prompt of the model in front of each text, such as query or document",
    )
    parser.add_argument(
        "--compare", action="store_true", help="print how alike the texts are, instead of vectors"
    )


def add_rerank(commands: Commands) -> None:
    """Add the command that sorts documents."""
    parser = command(
        commands,
        "rerank",
        _run_rerank,
        "Sort documents by how well they answer a query.",
        "",
        'millstream rerank "How do I bake bread?" "Mix flour and water, then bake." '
        '"A GPU has cores."',
        'millstream rerank "What is prefill?" - --top-n 3 < passages.txt',
    )
    parser.add_argument("query", metavar="QUERY", help="the question")
    parser.add_argument(
        "documents",
        nargs="+",
        metavar="DOCUMENT",
        help="a single - reads documents from stdin, one per line",
    )
    add_processor(parser)
    parser.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="model to ask (default: the only one that ranks)",
    )
    parser.add_argument("--top-n", type=int, metavar="N", help="print the best N only")
    parser.add_argument(
        "--instruction",
        metavar="TEXT",
        help="what makes a document a good one, for models that read it",
    )


def add_models(commands: Commands) -> None:
    """Add the command that lists models."""
    parser = command(
        commands,
        "models",
        _run_models,
        "List the models that are served and their workers.",
        "",
        "millstream models",
        "millstream models --address processor.example:50051 --tls-ca-file ca.pem",
    )
    add_processor(parser)


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
        _print_similarities(texts, found.vectors)
    else:
        for text, vector in zip(texts, found.vectors, strict=True):
            numbers = [float(f"{number:.8g}") for number in vector]
            print(json.dumps({"text": text, "embedding": numbers}, ensure_ascii=False))
    if args.show_usage:
        width = len(found.vectors[0])
        print(f"{found.input_tokens} tokens · {width} dimensions", file=sys.stderr)
    return 0


def _print_similarities(texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> None:
    table = Table("", *(str(i + 1) for i in range(len(texts))), box=box.SIMPLE_HEAD)
    for i, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        # Of vectors of length 1 it is the cosine.
        row = [f"{sum(map(mul, vector, other)):.2f}" for other in vectors]
        table.add_row(f"{i + 1}  {text}", *row)
    open_console().print(table)


async def _rerank(client: Client, args: argparse.Namespace, documents: list[str]) -> int:
    results = await client.rerank(
        args.query,
        documents,
        top_n=args.top_n,
        instruction=args.instruction,
        model=args.model,
    )
    table = Table("score", "number", "document", box=box.SIMPLE_HEAD)
    for ranked in results:
        table.add_row(f"{ranked.score:.4f}", str(ranked.index + 1), documents[ranked.index])
    open_console().print(table)
    return 0


def _run_models(args: argparse.Namespace) -> int:
    return call_processor(args, lambda client, _: _list(client))


async def _list(client: Client) -> int:
    table = Table("model", "ready", "does", "context", "takes", "workers", box=box.SIMPLE_HEAD)
    served = await client.models()
    with_adapters = any(model.adapters for model in served)
    if with_adapters:
        table.add_column("adapters", overflow="fold")
    for model in served:
        workers = ", ".join(f"{pool.connected} {role_name(pool.role)}" for pool in model.workers)
        table.add_row(
            model.name,
            "yes" if model.ready else "no, lacks workers",
            ", ".join(_TASKS[task] for task in model.tasks if task in _TASKS) or "unknown",
            f"{model.context_length} tokens" if model.context_length else "",
            ", ".join(["text", *(_MEDIA.get(kind, "unknown") for kind in model.modalities)]),
            workers or "none connected",
            *([", ".join(model.adapters) or "none"] if with_adapters else []),
        )
    open_console().print(table)
    return 0
