"""Write the chart's dashboards: `python deploy/helm/dashboards`; with `--check` compare only.

It needs grafana-foundation-sdk, which `make setup-deploy` installs into .venv-deploy. With
`--check FILE...` it checks these files against Grafana's schema and prints what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import capacity
import media
import overview
import schema
import workers
from grafana_foundation_sdk.cog.encoder import JSONEncoder

_FOLDER = Path(__file__).parents[1] / "millstream" / "dashboards"


def texts() -> dict[Path, str]:
    """Return every dashboard by its file."""
    boards = [module.board() for module in (overview, workers, media, capacity)]
    return {
        _FOLDER / f"{board.uid}.json": json.dumps(board.build(), cls=JSONEncoder, indent=1) + "\n"
        for board in boards
    }


def main(arguments: list[str]) -> int:
    """Write, or check; 1 if something is wrong."""
    if arguments:
        found = [
            f"{path}: {problem}"
            for path in arguments[1:]
            for problem in schema.problems(Path(path).read_text(encoding="utf-8"))
        ]
        found += [
            f"{path}: not what the script makes; run python deploy/helm/dashboards"
            for path, text in texts().items()
            if len(arguments) == 1
            and (not path.exists() or path.read_text(encoding="utf-8") != text)
        ]
        print("\n".join(found))
        return 1 if found else 0
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
