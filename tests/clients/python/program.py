"""What a program of somebody else does with the package `millstream`; mypy reads it too.

`test_python.py` runs it with ADDRESS MODEL KEY, on the lowest and the highest versions of what the
package needs.
"""

import asyncio
import sys

import grpc
from google.protobuf import __version__ as protobuf_version

from millstream_client import Client, InvalidRequestError, SyncClient


async def chat(address: str, model: str, key: str) -> str:
    async with Client(address, api_key=key) as client:
        answer = await client.chat("Hello", model=model, max_new_tokens=5).answer()
        return f"{answer.text} {answer.usage.completion_tokens}"


def invalid_field(address: str, model: str, key: str) -> str:
    with SyncClient(address, api_key=key) as client:
        try:
            client.complete("Hello", model=model, top_p=2.0).answer()
        except InvalidRequestError as error:
            return error.violations[0].field
    return "none"


address, model, key = sys.argv[1:]
print(*sys.version_info[:2], sep=".")
print(f"grpcio {grpc.__version__}, protobuf {protobuf_version}")
print(asyncio.run(chat(address, model, key)))
print(invalid_field(address, model, key))
