"""docs/client.md shows the service config that is recommended.

Its snippets are run by tests/integration/test_first_hour.py.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from millstream_client.service_config import RECOMMENDED

_PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_page_shows_the_config_that_is_recommended() -> None:
    (shown,) = re.findall(r"^```json\n(.*?)^```", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert json.loads(shown) == RECOMMENDED
