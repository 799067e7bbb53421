"""What a call costs under the packaged service config, beside `round_robin`, in each language here.

    python -m tests.benchmarks.service_configs      # five minutes; builds the examples first

CPU time of the example's process. The cost of a call is what `--calls` calls take more than nine,
so without the start; the median of the rounds' ratios may be 1.5. Of Debian's libraries only
Python's and npm's grpc-js know a weighted policy: the others show what their own choice costs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import pytest

from tests.clients import test_cpp, test_go, test_java, test_python, test_ruby, test_typescript
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.clients.client_examples import RECOMMENDED, ROUND_ROBIN, ExampleSuite

_FEW, _MOST = 9, 1.5
_LANGUAGES: dict[str, Callable[[], list[str]]] = {
    "python": test_python.command,
    "go": test_go.command,
    "java": test_java.command,
    "cpp": test_cpp.command,
    "ruby": test_ruby.command,
    "typescript": test_typescript.command,
}


def main() -> int:
    """Compare in every language; return 1 if one costs too much."""
    parser = parser_of("service_configs", __doc__)
    parser.add_argument("--calls", type=int, default=400, help="of a run")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    verdict = Verdict()
    with folder_for(arguments) as folder:
        suite = ExampleSuite(folder)
        with suite.running():
            for name, build in _LANGUAGES.items():
                progress(name)
                try:
                    ours = build()
                except pytest.skip.Exception as why:
                    verdict.measured[name] = {"skipped": str(why)}
                    continue
                plain = ours
                if name == "typescript":
                    plain = test_typescript.with_config(ours, ROUND_ROBIN)
                ratios = []
                for _ in range(arguments.rounds):
                    base = _cost_s(suite, plain, ROUND_ROBIN, arguments.calls)
                    ratios.append(_cost_s(suite, ours, RECOMMENDED, arguments.calls) / base)
                ratio = statistics.median(ratios)
                verdict.measured[name] = {"ratio": ratio, "ms": base * 1000}
                verdict.expect(ratio <= _MOST, f"{name}: a call costs {ratio:.2f} of round_robin's")
    return verdict.conclude(as_json=arguments.json)


def _cost_s(suite: ExampleSuite, command: list[str], config: str, calls: int) -> float:
    started = suite.cpu_s(command, config, _FEW)
    return (suite.cpu_s(command, config, calls) - started) / (calls - _FEW)


if __name__ == "__main__":
    sys.exit(main())
