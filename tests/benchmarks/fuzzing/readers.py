"""The readers of callers' bytes: at the wire, of files and texts; and the table of all."""

from __future__ import annotations

import contextlib

from hpack.exceptions import HPACKError

from millstream_server.media.decoding.videos import is_cut_off
from millstream_server.media.items import Modality
from millstream_server.media.sniff import MediaFormat, check_media
from millstream_server.processor.prompts import check_token_ids
from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.stops import StopMatcher, check_stops
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.transport.headers import MalformedError, NotGrpcError, read_head
from millstream_server.runtime.transport.hpack_blocks import KeepingDecoder
from millstream_server.runtime.transport.http1_requests import BrokenError, RequestReader
from tests.benchmarks.fuzzing.answers import ANSWER_READERS
from tests.benchmarks.fuzzing.constraints import CONSTRAINT_READERS
from tests.benchmarks.fuzzing.costs import Bound, Reader
from tests.benchmarks.fuzzing.doors import DOOR_READERS, plain, with_model
from tests.benchmarks.fuzzing.trees import Grammar

_HEAD_BYTES = 16 << 10
_MUCH = 1 << 30


# ---- HTTP/1.1, HTTP/2 ----------------------------------------------------------------------------


class _Dropped:
    """A stream whose body is dropped."""

    def received(self, data: bytes, nbytes: int) -> None: ...

    def closed_by_client(self) -> None: ...


def _http1(data: bytes) -> None:
    """Read as a connection does: the first request is served until it is whole."""
    reader, stream = RequestReader(_HEAD_BYTES, Ledger(_MUCH)), _Dropped()
    more = reader.take(data)
    while more or reader.first is not None:
        first = reader.first
        if first is not None and first.verb:
            if first.stream is None:
                first.check(_HEAD_BYTES)
                first.stream = stream  # type: ignore[assignment]
                first.pass_on()
            if first.whole:
                reader.requests.pop(0)
        if not more and (first is None or not first.whole):
            return
        more = reader.take(b"")


def _hpack(data: bytes) -> None:
    decoder = KeepingDecoder()
    decoder.max_header_list_size = max(64 << 10, 2 * len(data))
    read_head(decoder.decode(data, raw=True), _HEAD_BYTES)


_HEADERS = {
    "header": [
        "X:a\r\n",
        "⟨word*⟩: ⟨word*⟩\r\n",
        "a①: ⟨word⟩\r\n",
        "Transfer-Encoding: ⟨word*, ⟩\r\n",
        "Content-Length: ⟨word⟩\r\n",
        "Expect: 100-continue\r\n",
        ":\r\n",
    ],
    "word": ["a", "X", "①", " ", "\t", "é", "-", "chunked", "%41", ",", ";q=1"],
}
_HTTP1 = Grammar(
    {
        "requests": ["⟨request*⟩"],
        "request": [
            "GET /⟨word*⟩ HTTP/1.1\r\nHost: x\r\n⟨header*⟩\r\n",
            "POST / HTTP/1.1\r\nHost: x\r\n⟨header*⟩Content-Length: 3\r\n\r\nabc",
            "GET / HTTP/1.0\r\n⟨header*⟩\r\n",
            "GET /?⟨word*&⟩ HTTP/1.1\r\nHost: x\r\n⟨header*⟩",
        ],
        **_HEADERS,
    }
)
_TRAILERS = Grammar(
    {
        "request": [
            "POST / HTTP/1.1\r\nHost: x\r\n⟨coded⟩\r\n⟨chunk*⟩0\r\n⟨header*⟩⟨end⟩",
        ],
        "coded": [
            "Transfer-Encoding: chunked\r\n",
            "Upgrade: x\r\nConnection: upgrade\r\nTransfer-Encoding: chunked\r\n",
        ],
        "chunk": [
            "3\r\nabc\r\n",
            "1\r\na\r\n1\r\na\r\n1\r\na\r\n1\r\na\r\n",
            "3;⟨word*⟩=⟨word*⟩\r\nabc\r\n",
            "1\r\na\r\n",
            "0000003\r\nabc\r\n",
        ],
        "end": ["", "\r\n"],
        **_HEADERS,
    }
)
_HPACK = Grammar(
    {
        "block": ["\x83\x86\x84⟨field*⟩"],
        "field": [
            "\x82",
            "⟨indexed⟩",
            "\x40\x01⟨letter⟩\x01⟨letter⟩",
            "\x00\x01⟨letter⟩\x03⟨letter⟩bc",
            "\x10\x01a\x00",
            "\x20",
            "\x3f⟨long*⟩\x00",
            "\x7f⟨long*⟩\x01",
            "\x40\x01a\x7f\x00⟨letter*⟩",
            "\x40\x81\x1f\x84⟨huffman*⟩",
            "\xff⟨long*⟩\x00",
        ],
        "indexed": ["\xbe", "\xbf", "\xc0", "\x8f", "\x88", "\xf0"],
        "letter": ["a", "b", "A", "\x00", "é"],
        "long": ["\x80", "\xff", "\x81"],
        "huffman": ["\x1f", "\xff", "\x00"],
    }
)

# ---- files and texts ----


def _media(data: bytes) -> None:
    for modality in (Modality.IMAGE, Modality.VIDEO):
        with contextlib.suppress(ServingError):
            check_media(data, modality)
    for form in (MediaFormat.MP4, MediaFormat.WEBM):
        is_cut_off(memoryview(data), form)


_MEDIA = Grammar(
    {
        "file": [
            "\x89PNG\r\n\x1a\n⟨byte*⟩",
            "⟨box*⟩",
            "\x1a\x45\xdf\xa3⟨byte*⟩webm⟨byte*⟩",
            "⟨blank*⟩<⟨tag*⟩⟨byte*⟩",
            "RIFF⟨byte*⟩",
        ],
        "byte": ["\0", "\xff", "a", "\x01", "é", "\xe2\x82"],
        "blank": [" ", "\n", "\xef\xbb\xbf"],
        "tag": ["svg", "?xml", "!--", "<svg", "html"],
        "box": ["\0\0\0\x08free", "\0\0\0\x10ftypisom\0\0\0\0", "\0\0\0\x01mdat\0\0\0\0\0\0\0\x10"],
    }
)


def _stops(data: bytes) -> None:
    """Read stop strings, line by line, and push the last line's text by token and whole."""
    *stops, text = data.decode("utf-8", "replace").split("\n")
    if check_stops(stops):
        stops = [stop[:256] for stop in stops[:16] if stop] or ["a"]
    by_token, whole = StopMatcher(stops), StopMatcher(stops)
    for at in range(0, len(text), 3):
        by_token.push(text[at : at + 3])
    whole.push(text)
    by_token.flush()


_STOPS = Grammar(
    {
        "whole": ["⟨stop*\n⟩\n⟨char*⟩", "⟨char*⟩x\n⟨char*⟩"],
        "stop": ["⟨char*⟩", "⟨char*⟩x", "①", "aaaaaaaab"],
        "char": ["a", "b", "ab", "é", "𝄞", "①", "]", "\\", "^", "-"],
    }
)


def _ids(text: TextModel, data: bytes) -> None:
    """Detokenize, whole and one by one; each two bytes are an id."""
    ids = [int.from_bytes(data[at : at + 2], "big") for at in range(0, len(data), 2)]
    with contextlib.suppress(ServingError):
        check_token_ids(ids, text.vocab_size)
    ids = [token % text.vocab_size for token in ids]
    text.decode(ids, skip_special_tokens=True)
    pieces = detokenizer(text)
    for token in ids:
        pieces.push((token,))
    pieces.flush()


_IDS = Grammar(
    {
        "ids": ["⟨id*⟩"],
        "id": [
            "\0\x01",
            "\0\x41",
            "\0\xf0",
            "\0\xa0",
            "\x01\x10",
            "\x03\xff",
            "\x02\x30",
            "\0\xe3",
        ],
    }
)


def _tokenize(text: TextModel, data: bytes) -> None:
    text.encode(data.decode("utf-8", "replace"), add_special_tokens=True)


_TOKENIZE = Grammar(
    {
        "text": ["⟨char*⟩", "⟨char*⟩ ⟨char*⟩"],
        "char": [
            "a",
            " ",
            "\n",
            "é",
            "𝄞",
            "the ",
            "1",
            "<|im_start|>",
            "<s>",
            "\t",
            "①",
            "́",
            "👩‍",
            ".",
        ],
    }
)


READERS: tuple[Reader, ...] = (
    Reader(
        name="http1",
        of="transport/http1_requests.py",
        make=plain(_http1, BrokenError),
        grammar=_HTTP1,
        bound=Bound(calls=3, us=3, memory_of=2 * _HEAD_BYTES),
    ),
    Reader(
        name="trailers",
        of="transport/http1_requests.py",
        make=plain(_http1, BrokenError),
        grammar=_TRAILERS,
        bound=Bound(calls=3, us=3, memory_of=2 * _HEAD_BYTES),
        sizes=(256, 4 << 10, 128 << 10),
    ),
    Reader(
        name="hpack",
        of="transport/hpack_blocks.py, headers.py",
        make=plain(_hpack, HPACKError, MalformedError, NotGrpcError),
        grammar=_HPACK,
        bound=Bound(calls=60, us=15),
        sizes=(256, 4 << 10, 16 << 10),
        binary=True,
    ),
    Reader(
        name="media",
        of="media/sniff.py, decoding/videos.py",
        make=plain(_media),
        grammar=_MEDIA,
        bound=Bound(calls=6, us=4),
        binary=True,
    ),
    Reader(
        name="stops",
        of="text/stops.py",
        make=plain(_stops),
        grammar=_STOPS,
        bound=Bound(calls=25, us=4),
    ),
    Reader(
        name="token-ids",
        of="text/detokenizer.py, prompts.py",
        make=with_model(_ids),
        grammar=_IDS,
        bound=Bound(calls=12, us=6, memory=150),
        binary=True,
    ),
    Reader(
        name="tokenize",
        of="text/tokenizer.py",
        make=with_model(_tokenize),
        grammar=_TOKENIZE,
        bound=Bound(calls=1, us=6, memory=500, total_s=4.0),
        sizes=(4 << 10, 64 << 10, 1 << 20),
        resident=True,
    ),
    *DOOR_READERS,
    *ANSWER_READERS,
    *CONSTRAINT_READERS,
)
