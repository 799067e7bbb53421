"""Clients' regular expressions: ECMA 262's syntax, compiled by RE2 alone."""

from __future__ import annotations

import pytest

from millstream_server.processor.text.patterns import (
    MAX_PATTERN_CHARS,
    PatternError,
    check_pattern,
)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[\w.!#$%&'*+/=?^`{|}~-]+@[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$",
        r"^[\s\S]{0,5000}$",  # RE2's own limit is 1,000
        r"^((x{1000}){1000}){1000}$",
        r"(?<year>\d{4})-(?P<month>\d\d)",
        r"\u00e4[\u0000-\uffff]\u{1f600}\ud83d\ude00\x41\cA\0\/\-\_",
        r"\p{L}\P{Lu}\p{Script=Greek}[\p{L}\d_]",
        r"[^][][\b]",
        r"[[][[^][\]a-z[:x:]]",
        r"[(?=][\1][{2}]",
        r"^(?=.*\d)(?!x)(?<=y)(?<!z).{8,}$",
        r"(a)\1(?<n>b)\k<n>(?P<m>c)(?P=m)",
        r"a{ {a} a{,3}",
        r"(?i)x|(?:y)*?",
        "[A-\uffff]" * 800,
    ],
)
def test_patterns_of_ecma_262_are_accepted(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(", "missing )"),
        ("[a", "missing ]"),
        ("[b-a]", "invalid character class range"),
        ("*", "no argument for repetition"),
        ("a{3,2}", "{3,2} counts down"),
        ("\\", "trailing \\"),
        (r"\y", r"\y has no meaning"),
        (r"\Q(", r"\Q has no meaning"),
        (r"\u{110000}", "is no character"),
        (r"a(?=b", "missing )"),
        (r"(?<!a*", "missing )"),
        ("x" * (MAX_PATTERN_CHARS + 1), "has 4097 characters; at most 4096 are allowed"),
    ],
)
def test_other_patterns_are_refused_with_a_sentence(pattern: str, sentence: str) -> None:
    with pytest.raises(PatternError) as refused:
        check_pattern(pattern)
    assert sentence in str(refused.value)
