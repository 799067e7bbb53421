"""Work out the labels of PromQL expressions, and what in them can't be.

    .venv-deploy/bin/python promql_labels.py < question.json

The question is {"metrics": {NAME: [LABEL…]}, "expressions": [TEXT…]}; the answer has for each
expression {"labels": […] or null, "names": […], "matchers": [[LABEL, VALUE]…], "problems": […]}.
`labels` are those of the result; null: a scalar, or a literal. It runs where promql-parser is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import promql_parser as promql

Labels = frozenset[str] | None
"""None: no series at all, as of `vector(0)`, which fits everything."""


class Analysis:
    """What one expression says."""

    def __init__(self, metrics: Mapping[str, Sequence[str]], text: str) -> None:
        """Parse and walk it."""
        self._metrics = metrics
        self.names: set[str] = set()
        self.matchers: list[tuple[str, str]] = []
        self.problems: list[str] = []
        self.labels = self._of(promql.parse(text))

    def _of(self, part: Any) -> Labels:
        kind = type(part).__name__
        handler = getattr(self, f"_{kind}", None)
        if handler is None:
            return None  # numbers and strings
        labels: Labels = handler(part)
        return labels

    def _VectorSelector(self, part: Any) -> Labels:
        self.names.add(part.name)
        if part.name not in self._metrics:
            self.problems.append(f"nobody emits {part.name}")
            return frozenset()
        labels = frozenset(self._metrics[part.name])
        for matcher in part.matchers.matchers:
            self.matchers.append((matcher.name, matcher.value))
            self._need({matcher.name}, labels, part.name)
        return labels

    def _MatrixSelector(self, part: Any) -> Labels:
        return self._of(part.vector_selector)

    def _ParenExpr(self, part: Any) -> Labels:
        return self._of(part.expr)

    def _AggregateExpr(self, part: Any) -> Labels:
        inner = self._of(part.expr) or frozenset()
        if part.modifier is None:
            return frozenset()
        named = frozenset(part.modifier.labels)
        self._need(named, inner, str(part.expr))
        return named if str(part.modifier).startswith("by") else inner - named

    def _Call(self, part: Any) -> Labels:
        inner = [self._of(argument) for argument in part.args]
        name = part.func.name
        if name == "label_replace":
            target, source = part.args[1].val, part.args[3].val
            self._need({source}, inner[0] or frozenset(), str(part))
            return (inner[0] or frozenset()) | {target}
        if name == "histogram_quantile":
            self._need({"le"}, inner[1] or frozenset(), str(part))
            return (inner[1] or frozenset()) - {"le"}
        return next((labels for labels in inner if labels is not None), None)

    def _BinaryExpr(self, part: Any) -> Labels:
        left, right = self._of(part.lhs), self._of(part.rhs)
        if left is None or right is None:
            return right if left is None else left
        matching = part.modifier and part.modifier.matching
        if matching:
            for side in (left, right):
                self._need(frozenset(matching.labels), side, str(part))
        elif left != right:
            self.problems.append(
                f"two sides never match, {sorted(left ^ right)} are on one only: {part}"
            )
        return left | right if str(part.op) == "or" else left

    def _need(self, wanted: frozenset[str] | set[str], there: frozenset[str], what: str) -> None:
        if missing := sorted(wanted - there):
            self.problems.append(f"{what} has no label {', '.join(missing)}")


def main() -> None:
    """Answer on stdout."""
    question = json.load(sys.stdin)
    answers = []
    for text in question["expressions"]:
        found = Analysis(question["metrics"], text)
        answers.append(
            {
                "labels": None if found.labels is None else sorted(found.labels),
                "names": sorted(found.names),
                "matchers": found.matchers,
                "problems": found.problems,
            }
        )
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
