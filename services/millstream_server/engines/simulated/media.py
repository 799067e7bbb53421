"""What images and videos do to the simulated engine's output.

With media every token is the one before plus ``1 + digests + tensors``, modulo the vocabulary.
``digests`` is the sum of the CRC-32 of the items' digests, the first counted once, the second
twice, and so on, modulo 2**32; ``tensors`` is the same of the tensors' bytes. So a mix-up of items,
of their order or of their bytes shows in every token. By hand:

    tensors = sum((i + 1) * zlib.crc32(data) for i, data in enumerate(tensor_bytes)) % 2**32
    digests = sum((i + 1) * zlib.crc32(digest) for i, digest in enumerate(item_digests)) % 2**32
    tokens = [(last + n * (1 + digests + tensors)) % vocab_size for n in (1, 2, 3)]

A decode worker gets ``tensors`` from prefill, in place of the KV cache.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from millstream_server.media.items import MediaInput

_MODULUS = 1 << 32


def of_digests(media: Sequence[MediaInput]) -> int:
    """Return the number that follows from the items' digests; 0 without any."""
    return _weighted(zlib.crc32(item.digest) for item in media)


def of_tensors(media: Sequence[MediaInput]) -> int:
    """Return the number that follows from the tensors' bytes; 0 without any."""
    return _weighted(zlib.crc32(item.tensor.data) for item in media if item.tensor)


def _weighted(numbers: Iterable[int]) -> int:
    return sum(place * number for place, number in enumerate(numbers, 1)) % _MODULUS
