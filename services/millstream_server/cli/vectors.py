"""`millstream embed` and `millstream rerank`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from rich import box
from rich.table import Table

from millstream_client import Client
from millstream_server.cli.client import call_processor
from millstream_server.cli.console import open_console


def run_embed(args: argparse.Namespace) -> int:
    """Print vectors, or how alike texts are; return the exit code."""
    texts = _texts(args.texts)
    if not texts:
        print("error: there is no text", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args, lambda client, _: _embed(client, args, texts)))


def run_rerank(args: argparse.Namespace) -> int:
    """Print documents, best first; return the exit code."""
    documents = _texts(args.documents)
    if not documents:
        print("error: there is no document", file=sys.stderr)
        return 1
    return asyncio.run(call_processor(args, lambda client, _: _rerank(client, args, documents)))


def _texts(given: Sequence[str]) -> list[str]:
    """Return the texts that were given; a single - reads them from stdin, one per line."""
    if list(given) == ["-"]:
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    return list(given)


async def _embed(client: Client, args: argparse.Namespace, texts: list[str]) -> int:
    found = await client.embed(texts, dimensions=args.dimensions, model=args.model)
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
        row = [f"{_similarity(vector, other):.2f}" for other in vectors]
        table.add_row(f"{i + 1}  {text}", *row)
    open_console().print(table)


def _similarity(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


async def _rerank(client: Client, args: argparse.Namespace, documents: list[str]) -> int:
    results = await client.rerank(args.query, documents, top_n=args.top_n, model=args.model)
    table = Table("score", "number", "document", box=box.SIMPLE_HEAD)
    for ranked in results:
        table.add_row(f"{ranked.score:.4f}", str(ranked.index + 1), documents[ranked.index])
    open_console().print(table)
    return 0
