"""Names that a TLS certificate gives its holder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CertificateName:
    """An entry of the Subject Alternative Name.

    The kind counts: a CA that lets its users choose DNS names may sign "DNS:spiffe://td/processor",
    which isn't the SPIFFE id.
    """

    kind: Literal["uri", "dns"]
    value: str
