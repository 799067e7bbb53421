"""What a decoder process may return: it has read a stranger's file, so it is not trusted."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from millstream_server.media.decoding import child
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.decoding.wire import (
    RESPONSE_BYTES,
    DecodingOutcome,
    DecodingRequest,
    DecodingResponse,
    pack_indices,
    unpack_indices,
)
from millstream_server.media.items import MediaLimits
from millstream_server.media.sniff import MediaFormat

REQUEST = DecodingRequest(
    media_format=MediaFormat.MP4,
    sampling=FrameSampling.ARANGE,
    limits=MediaLimits(
        max_pixels=1, max_frames=2, max_video_frames=3, max_video_s=4, fps=5, max_decoded_bytes=600
    ),
    nbytes=7,
)
RESPONSE = DecodingResponse(
    outcome=DecodingOutcome.DECODED, width=5, height=4, count=2, total_frames=9, fps=2.5, nbytes=120
)


def test_a_request_arrives_as_it_was() -> None:
    assert DecodingRequest.unpack(REQUEST.pack()) == REQUEST
    fitted = replace(REQUEST, fit=(64, 32))
    assert DecodingRequest.unpack(fitted.pack()) == fitted


def test_a_picture_of_another_size_than_asked_cannot_be() -> None:
    fitted = replace(REQUEST, fit=(5, 4))
    assert DecodingResponse.unpack(RESPONSE.pack(), fitted) == RESPONSE
    with pytest.raises(ValueError, match="a size that can't be"):
        DecodingResponse.unpack(RESPONSE.pack(), replace(REQUEST, fit=(4, 5)))


def test_a_response_arrives_as_it_was() -> None:
    assert len(RESPONSE.pack()) == RESPONSE_BYTES
    assert DecodingResponse.unpack(RESPONSE.pack(), REQUEST) == RESPONSE
    assert unpack_indices(pack_indices((0, 7, 2**32 - 1))) == (0, 7, 2**32 - 1)


@pytest.mark.parametrize(
    "lie",
    [
        replace(RESPONSE, nbytes=119),
        replace(RESPONSE, width=0, nbytes=0),
        replace(RESPONSE, count=3, nbytes=180),
        replace(RESPONSE, width=5000, height=4000, nbytes=5000 * 4000 * 6),
        DecodingResponse(outcome=DecodingOutcome.REFUSED, nbytes=2001),
        DecodingResponse(outcome=DecodingOutcome.REFUSED, count=1),
    ],
)
def test_a_response_that_cannot_be(lie: DecodingResponse) -> None:
    with pytest.raises(ValueError, match="a decoder process returned"):
        DecodingResponse.unpack(lie.pack(), REQUEST)


def test_an_outcome_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="77 is not a valid DecodingOutcome"):
        DecodingResponse.unpack(struct.pack("<B", 77) + RESPONSE.pack()[1:], REQUEST)


def test_a_bug_of_ours_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream_server.media.decoding.videos.decode_video", None)
    reply = child._decode(memoryview(b"junk"), REQUEST)
    assert reply.response.outcome is DecodingOutcome.FAILED
    assert reply.parts == (b"TypeError(\"'NoneType' object is not callable\")",)
