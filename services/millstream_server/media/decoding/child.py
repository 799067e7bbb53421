"""A decoder process: reads files from its standard input, a socket, and returns pixels on it.

Started by `DecoderPool` only. Before it reads anything it limits its memory, files and time, and
asks the kernel to be killed with its parent; it also ends when the socket does.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import socket
import sys

from millstream_server.media.decoding.wire import (
    DECODER_THREADS,
    MAX_SENTENCE_BYTES,
    READY,
    REQUEST_BYTES,
    DecodingOutcome,
    DecodingRequest,
    DecodingResponse,
    Refusal,
    Reply,
    pack_indices,
)
from millstream_server.media.items import Modality

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_MAX_FILES = 64


def main() -> None:
    """Decode files until the socket is closed: `child.py PARENT_PID MEMORY_BYTES`."""
    _limit(parent=int(sys.argv[1]), memory_bytes=int(sys.argv[2]))
    link = socket.socket(fileno=os.dup(0))
    link.sendall(READY)
    while header := _receive(link, REQUEST_BYTES):
        request = DecodingRequest.unpack(bytes(header))
        if not (data := _receive(link, request.nbytes)):
            break
        _limit_cpu(request)
        reply = _decode(memoryview(data), request)
        link.sendall(reply.response.pack() + pack_indices(reply.indices))
        for part in reply.parts:
            link.sendall(part)
        del data, reply


def _limit(parent: int, memory_bytes: int) -> None:
    """Give up what decoding doesn't need."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if os.getppid() != parent:  # the parent had ended before the request
            sys.exit(1)
    for kind, most in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
    ):
        resource.setrlimit(kind, (most, most))


def _limit_cpu(request: DecodingRequest) -> None:
    """Bound the processor time of this request; the pool bounds the time on the clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = DECODER_THREADS * request.limits.decode_timeout_s + 1
    most = math.ceil(used.ru_utime + used.ru_stime + allowed)
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _receive(link: socket.socket, nbytes: int) -> bytearray | None:
    """Read exactly ``nbytes``; returns None when the other side is closed."""
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        received = link.recv_into(view[got:])
        if not received:
            return None
        got += received
    return data


def _decode(data: memoryview, request: DecodingRequest) -> Reply:
    try:
        # Imported when first needed: many encode workers never see a video.
        if request.modality is Modality.IMAGE:
            from millstream_server.media.decoding.images import decode_image  # noqa: PLC0415

            return decode_image(data, request)
        from millstream_server.media.decoding.videos import decode_video  # noqa: PLC0415

        return decode_video(data, request)
    except Refusal as refusal:
        return _sentence(DecodingOutcome.REFUSED, str(refusal))
    except MemoryError:
        return _sentence(DecodingOutcome.OUT_OF_MEMORY, "")
    except Exception as error:  # noqa: BLE001 - one file must not end the others; goes to the log
        return _sentence(DecodingOutcome.FAILED, repr(error))


def _sentence(outcome: DecodingOutcome, text: str) -> Reply:
    encoded = text.encode(errors="replace")[:MAX_SENTENCE_BYTES]
    return Reply(DecodingResponse(outcome=outcome, nbytes=len(encoded)), (), (encoded,))


if __name__ == "__main__":
    main()
