"""`check_request`: every bound, every field name, all violations at once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.control.operations import LoraAdapter
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.grammar_shapes import (
    MAX_CONSTRAINT_BYTES,
    MAX_CONSTRAINT_DEPTH,
    MAX_STRUCTURAL_TAG_BYTES,
    MAX_STRUCTURAL_TAG_DEPTH,
    MAX_STRUCTURAL_TAG_PARTS,
)
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind, Sampling
from millstream_server.generation.ticket import EngineData, KvTransfer, Ticket
from millstream_server.generation.validation import (
    MAX_VIOLATIONS,
    FieldPaths,
    check_request,
)
from millstream_server.processor.conversation import Options
from millstream_server.processor.requests import DEFAULT_LIMITS, check
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.json_bounds import MAX_JSON_DEPTH, MAX_SUBSCHEMAS
from tests.support.steps import Watched

_INFO = GeneratorInfo(
    engine="simulated",
    engine_version="1",
    vocab_size=100,
    context_length=50,
    block_size=1,
    total_blocks=1000,
    max_running_requests=4,
    abilities=frozenset(Ability),
)
_MEDIA = SimpleNamespace(soft_tokens={"image": 90, "video": 91})
_TEXT: Any = SimpleNamespace(family=object(), soft_tokens=frozenset({90, 91}))
_HANDOFF = Ticket("127.0.0.1", 8998, 7)


def _request(**changes: Any) -> GenerationRequest:
    sampling = Sampling(**{"max_new_tokens": 10, **changes.pop("sampling", {})})
    prompt = Prompt(changes.pop("token_ids", [1, 2, 3]))
    return GenerationRequest(prompt=prompt, sampling=sampling, **changes)


def _fields(request: GenerationRequest, role: Role = Role.AGGREGATED) -> list[str]:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request, _INFO, role)
    assert not isinstance(caught.value, UnsupportedFeatureError)
    for violation in caught.value.violations:
        assert violation.description
        assert violation.field in caught.value.message
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.0},
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0},
        {"top_p": 1e-9, "top_k": 1, "min_p": 1.0},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 2.0},
        {"max_new_tokens": 47},
        {"min_new_tokens": 10},
        {"stop_token_ids": (0, 99), "logit_bias": {0: -100.0, 99: 100.0}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"constraint": Constraint(ConstraintKind.REGEX, "a" * MAX_CONSTRAINT_BYTES)},
    ],
)
def test_values_at_their_bounds_pass(sampling: dict[str, Any]) -> None:
    check_request(_request(sampling=sampling), _INFO, Role.AGGREGATED)


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"temperature": math.inf}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.01}, "sampling.top_p"),
        ({"top_p": math.nan}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"min_p": -0.1}, "sampling.min_p"),
        ({"min_p": 1.1}, "sampling.min_p"),
        ({"frequency_penalty": 2.1}, "sampling.frequency_penalty"),
        ({"frequency_penalty": math.nan}, "sampling.frequency_penalty"),
        ({"presence_penalty": -2.1}, "sampling.presence_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": 2.1}, "sampling.repetition_penalty"),
        ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
        ({"min_new_tokens": 11}, "sampling.min_new_tokens"),
        ({"min_new_tokens": -1}, "sampling.min_new_tokens"),
        ({"stop_token_ids": (5, 100)}, "sampling.stop_token_ids[1]"),
        ({"stop_token_ids": (-1,)}, "sampling.stop_token_ids[0]"),
        ({"stop_token_ids": tuple(range(99)) * 3}, "sampling.stop_token_ids"),
        ({"logit_bias": {100: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: 100.5}}, "sampling.logit_bias"),
        ({"logit_bias": {1: math.nan}}, "sampling.logit_bias"),
        ({"logit_bias": {1: -math.inf}}, "sampling.logit_bias"),
        ({"seed": 2**63}, "sampling.seed"),
        ({"constraint": Constraint(ConstraintKind.EBNF, "")}, "sampling.constraint"),
        (
            {"constraint": Constraint(ConstraintKind.REGEX, "é" * (MAX_CONSTRAINT_BYTES // 2 + 1))},
            "sampling.constraint",
        ),
    ],
)
def test_values_out_of_range_name_their_field(sampling: dict[str, Any], field: str) -> None:
    assert _fields(_request(sampling=sampling)) == [field]


@pytest.mark.parametrize(
    ("token_ids", "field"),
    [([], "token_ids"), ([1, 2, 3, 100], "token_ids[3]"), ([-1], "token_ids[0]")],
)
def test_bad_prompts(token_ids: list[int], field: str) -> None:
    assert _fields(_request(token_ids=token_ids)) == [field]


def test_a_request_that_does_not_fit_says_all_three_numbers() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(_request(sampling={"max_new_tokens": 48}), _INFO, Role.AGGREGATED)
    (violation,) = caught.value.violations
    for number in ("3", "48", "50"):
        assert number in violation.description


def test_the_field_that_must_shrink_is_named() -> None:
    assert _fields(_request(sampling={"max_new_tokens": 48})) == ["sampling.max_new_tokens"]
    assert _fields(_request(token_ids=[1] * 50)) == ["token_ids"]


@pytest.mark.parametrize("top", [-1, 21])
def test_logprobs_top(top: int) -> None:
    assert _fields(_request(logprobs=LogprobOptions(top=top))) == ["logprobs.top"]


def test_everything_wrong_is_named_at_once() -> None:
    sampling = {"temperature": -1.0, "top_p": 2.0, "max_new_tokens": 0}
    found = _fields(_request(token_ids=[], sampling=sampling))
    assert found == [
        "token_ids",
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_new_tokens",
    ]


def test_the_number_of_violations_is_bounded() -> None:
    sampling = {"stop_token_ids": tuple(range(1000, 1200))}
    assert len(_fields(_request(sampling=sampling))) == MAX_VIOLATIONS


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_disaggregated_roles_need_a_ticket(role: Role) -> None:
    assert _fields(_request(), role) == ["ticket"]
    check_request(_request(ticket=_HANDOFF), _INFO, role)


@pytest.mark.parametrize("room", [-1, 2**63])
def test_a_ticket_with_an_impossible_room_is_refused(room: int) -> None:
    handoff = dataclasses.replace(_HANDOFF, room=room)
    assert _fields(_request(ticket=handoff), Role.DECODE) == ["ticket"]


@pytest.mark.parametrize(
    ("given", "own", "refusal"),
    [
        (None, None, ""),
        (None, KvTransfer("a"), ""),
        (None, KvTransfer("a", b"d"), "ticket.engine_data: is needed for a; update the Processor"),
        (None, KvTransfer("a", prefill_first=True), "ticket.engine_data: is needed for a; update "),
        (EngineData("a", bytes(65536)), KvTransfer("a"), ""),
        (EngineData("a", bytes(65537)), KvTransfer("a"), ".data: has 65537 bytes; at most 65536"),
        (EngineData("b", b""), KvTransfer("a"), "engine_data.kind: must be a, this worker's"),
        (EngineData("", b""), KvTransfer("a"), "engine_data.kind: must be a, this worker's"),
        (EngineData("a", b""), None, "ticket.engine_data.kind: this worker takes none"),
    ],
    ids=itertools.count(),
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_ticket_has_engine_data_of_the_workers_kind(
    given: EngineData | None, own: KvTransfer | None, refusal: str, role: Role
) -> None:
    """Without: as tickets of version 0.1.0 are."""
    request = _request(ticket=dataclasses.replace(_HANDOFF, engine_data=given))
    info = dataclasses.replace(_INFO, kv_transfer=own)
    if not refusal:
        check_request(request, info, role)
        return
    with pytest.raises(InvalidRequestError) as refused:
        check_request(request, info, role)
    assert refusal in refused.value.message


def test_an_aggregated_worker_takes_no_ticket() -> None:
    assert _fields(_request(ticket=_HANDOFF)) == ["ticket"]


@pytest.mark.parametrize(
    ("changes", "field", "setting"),
    [
        ({"sampling": {"seed": 1}}, "sampling.seed", "deterministic"),
        ({"sampling": {"min_new_tokens": 1}}, "sampling.min_new_tokens", "engine_tokenizer"),
        (
            {"sampling": {"constraint": Constraint(ConstraintKind.REGEX, "a")}},
            "sampling.constraint",
            "engine_tokenizer",
        ),
        ({"sampling": {"logit_bias": {1: 1.0}}}, "sampling.logit_bias", ""),
        ({"logprobs": LogprobOptions(prompt=True)}, "logprobs.prompt", ""),
    ],
)
def test_a_missing_ability_names_the_setting_that_turns_it_on(
    changes: dict[str, Any], field: str, setting: str
) -> None:
    request = _request(**changes)
    check_request(request, _INFO, Role.AGGREGATED)
    bare = dataclasses.replace(_INFO, abilities=frozenset())
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_request(request, bare, Role.AGGREGATED)
    (violation,) = caught.value.violations
    assert violation.field == field
    assert setting in violation.description


def test_a_worker_with_grammars_may_lack_structural_tags() -> None:
    request = _grammar(ConstraintKind.STRUCTURAL_TAG, _tag(_ANY))
    other = dataclasses.replace(_INFO, abilities=_INFO.abilities - {Ability.STRUCTURAL_TAGS})
    check_request(_grammar(ConstraintKind.REGEX, "a"), other, Role.AGGREGATED)
    with pytest.raises(UnsupportedFeatureError, match="takes no structural_tag"):
        check_request(request, other, Role.AGGREGATED)


def test_bad_values_are_reported_before_missing_abilities() -> None:
    bare = dataclasses.replace(_INFO, abilities=frozenset())
    request = _request(sampling={"seed": 1, "top_p": 2.0})
    with pytest.raises(InvalidRequestError) as caught:
        check_request(request, bare, Role.AGGREGATED)
    assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]


# ---- grammars


def _grammar(kind: ConstraintKind, source: str) -> GenerationRequest:
    return _request(sampling={"constraint": Constraint(kind, source)})


def _nested(depth: int) -> str:
    """Make a schema of so many objects around each other."""
    return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)


def _tag(form: object, **more: object) -> str:
    return json.dumps({"type": "structural_tag", "format": form, **more})


def _wrapped(form: object, kind: str = "optional", depth: int = 1) -> object:
    for _ in range(depth):
        form = {"type": kind, "content": form}
    return form


_ANY = {"type": "any_text"}
_SCHEMA = {"type": "json_schema", "json_schema": json.loads(_nested(MAX_JSON_DEPTH))}


def _groups(depth: int, inside: str) -> str:
    return "(" * depth + inside + ")" * depth


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.JSON_SCHEMA, "{}"),
        (ConstraintKind.JSON_SCHEMA, _nested(MAX_JSON_DEPTH)),
        (ConstraintKind.JSON_SCHEMA, json.dumps({"anyOf": [True] * (MAX_SUBSCHEMAS - 2)})),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {}}}'),
        (ConstraintKind.REGEX, _groups(MAX_CONSTRAINT_DEPTH, "a")),
        (ConstraintKind.REGEX, "(a)" * 1000),
        (ConstraintKind.REGEX, r"\(" * 1000),
        (ConstraintKind.REGEX, r"[(\](]" * 1000),
        (ConstraintKind.REGEX, "[" + "(" * 1000),  # no regex: for the engine to say
        (ConstraintKind.EBNF, "root ::= " + _groups(MAX_CONSTRAINT_DEPTH, '"a"')),
        (ConstraintKind.EBNF, 'root ::= ("\\"(" | [(])' + "\nroot ::= #(" * 1000),
        (ConstraintKind.STRUCTURAL_TAG, _tag(_wrapped(_ANY, depth=MAX_STRUCTURAL_TAG_DEPTH - 2))),
        (ConstraintKind.STRUCTURAL_TAG, _tag(_wrapped(_SCHEMA))),
        (
            ConstraintKind.STRUCTURAL_TAG,
            _tag({"type": "const_string", "value": "a" * (MAX_STRUCTURAL_TAG_BYTES - 100)}),
        ),
        (
            ConstraintKind.STRUCTURAL_TAG,
            _tag(
                {
                    "type": "or",
                    "elements": [
                        {"type": "dispatch", "rules": [["<a>", {"type": "regex", "pattern": "b"}]]},
                        {
                            "type": "triggered_tags",
                            "triggers": ["<"],
                            "tags": [{"type": "tag", "begin": "<", "content": _ANY, "end": ">"}],
                        },
                    ],
                }
            ),
        ),
    ],
)
def test_grammars_within_their_bounds_pass(kind: ConstraintKind, source: str) -> None:
    check_request(_grammar(kind, source), _INFO, Role.AGGREGATED)


_FORM = 'must have "type": "structural_tag" and "format", nothing else'
_FORMATS = (
    "any_text, const_string, dispatch, grammar, json_schema, optional, or, plus, regex, repeat, "
    "sequence, star, tag, tags_with_separator, triggered_tags"
)
_DEEP_JSON = f"json_schema must not nest deeper than {MAX_JSON_DEPTH}"


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        (ConstraintKind.JSON_SCHEMA, _nested(MAX_JSON_DEPTH + 1), _DEEP_JSON),
        (ConstraintKind.JSON_SCHEMA, _nested(6000), _DEEP_JSON),
        (ConstraintKind.JSON_SCHEMA, '{"items":' * 6000, _DEEP_JSON),
        (ConstraintKind.JSON_SCHEMA, '{"items":{}', "json_schema must be valid JSON"),
        (ConstraintKind.JSON_SCHEMA, "[]", "json_schema must be a JSON object"),
        (ConstraintKind.JSON_SCHEMA, "true", "json_schema must be a JSON object"),
        (
            ConstraintKind.JSON_SCHEMA,
            json.dumps({"anyOf": [True] * MAX_SUBSCHEMAS}),
            f"json_schema must not have more than {MAX_SUBSCHEMAS} parts",
        ),
        (
            ConstraintKind.JSON_SCHEMA,
            '{"$ref": "http://localhost/a"}',
            "json_schema must not refer outside itself: every $ref starts with '#'",
        ),
        (
            ConstraintKind.REGEX,
            _groups(MAX_CONSTRAINT_DEPTH + 1, "a"),
            f"regex must not nest deeper than {MAX_CONSTRAINT_DEPTH}",
        ),
        (
            ConstraintKind.REGEX,
            ")" * 1000 + "(" * 1000,
            f"regex must not nest deeper than {MAX_CONSTRAINT_DEPTH}",
        ),
        (
            ConstraintKind.EBNF,
            "root ::= " + _groups(MAX_CONSTRAINT_DEPTH + 1, '"a"'),
            f"ebnf must not nest deeper than {MAX_CONSTRAINT_DEPTH}",
        ),
        *[
            (ConstraintKind.STRUCTURAL_TAG, source, f"structural_tag {says}")
            for source, says in (
                ("{", "must be valid JSON"),
                ("[]", "must be a JSON object"),
                (
                    _tag(_wrapped(_ANY, depth=MAX_STRUCTURAL_TAG_DEPTH - 1)),
                    f"must not nest deeper than {MAX_STRUCTURAL_TAG_DEPTH}",
                ),
                (
                    _tag({"type": "json_schema", "json_schema": {"enum": [True] * 17000}}),
                    f"must not have more than {MAX_STRUCTURAL_TAG_PARTS} parts",
                ),
                ('{"structures": [], "triggers": []}', _FORM),
                (_tag(_ANY, structures=[]), _FORM),
                (_tag(None), f"needs, as format.type, one of {_FORMATS}"),
                (
                    _tag(_wrapped({"type": "token", "token": 1})),
                    f"needs, as format.content.type, one of {_FORMATS}",
                ),
                (
                    _tag({"type": "sequence", "elements": 5}),
                    "needs a list that isn't empty: format.elements",
                ),
                (
                    _tag({"type": "tags_with_separator", "tags": [_ANY]}),
                    "needs a tag: format.tags[0]",
                ),
                (
                    _tag({"type": "dispatch", "rules": [[_ANY]]}),
                    "needs a text and a format: format.rules[0]",
                ),
                (
                    _tag({"type": "json_schema", "json_schema": json.loads(_nested(33))}),
                    f"must not nest deeper than {MAX_JSON_DEPTH}: format.json_schema",
                ),
                (
                    _tag({"type": "regex", "pattern": _groups(MAX_CONSTRAINT_DEPTH + 1, "a")}),
                    f"must not nest deeper than {MAX_CONSTRAINT_DEPTH}: format.pattern",
                ),
                (_tag({"type": "grammar"}), "needs a text: format.grammar"),
            )
        ],
    ],
)
def test_a_grammar_of_a_dangerous_shape_never_reaches_the_engine(
    kind: ConstraintKind, source: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(_grammar(kind, source), _INFO, Role.AGGREGATED)
    (violation,) = caught.value.violations
    assert (violation.field, violation.description) == ("sampling.constraint", says)


# ---- adapters, ranks, salts


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_the_worker_does_not_have_is_refused(rank: int) -> None:
    two = dataclasses.replace(_INFO, dp_size=2)
    check_request(_request(dp_rank=1), two, Role.AGGREGATED)
    with pytest.raises(InvalidRequestError, match=f"dp_rank: must be from 0 to 1, not {rank}"):
        check_request(_request(dp_rank=rank), two, Role.AGGREGATED)


@pytest.mark.parametrize(("rank", "in_ticket"), [(0, 1), (None, 1), (1, None)])
def test_a_prefill_rank_is_the_tickets(rank: int | None, in_ticket: int | None) -> None:
    two = dataclasses.replace(_INFO, dp_size=2)
    ticket = dataclasses.replace(_HANDOFF, prefill_dp_rank=in_ticket)
    with pytest.raises(InvalidRequestError, match="ticket's prefill_dp_rank"):
        check_request(_request(dp_rank=rank, ticket=ticket), two, Role.PREFILL)
    check_request(_request(dp_rank=in_ticket, ticket=ticket), two, Role.PREFILL)
    check_request(_request(dp_rank=rank, ticket=ticket), two, Role.DECODE)


def test_resumed_tokens_are_a_part_of_the_prompt_and_need_the_ability() -> None:
    check_request(_request(resumed_tokens=2), _INFO, Role.AGGREGATED)
    assert _fields(_request(resumed_tokens=3)) == ["resumed_tokens"]
    bare = dataclasses.replace(_INFO, abilities=frozenset())
    with pytest.raises(UnsupportedFeatureError, match="resumed_tokens"):
        check_request(_request(resumed_tokens=2), bare, Role.AGGREGATED)


@pytest.mark.parametrize("salt", ["s" * 129, "\u00e9" * 65, "a\0b"])
def test_a_salt_is_short_and_has_no_zero_byte(salt: str) -> None:
    assert _fields(_request(cache_salt=salt)) == ["cache_salt"]
    check_request(_request(cache_salt="s" * 128), _INFO, Role.AGGREGATED)


def test_an_adapter_needs_a_worker_that_has_it() -> None:
    with pytest.raises(UnsupportedFeatureError, match="no LoRA adapters"):
        check_request(_request(adapter="law"), _INFO, Role.AGGREGATED)
    loaded = dataclasses.replace(
        _INFO, takes_adapters=True, adapters=(LoraAdapter("law"), LoraAdapter("code"))
    )
    check_request(_request(adapter="law"), loaded, Role.AGGREGATED)
    with pytest.raises(AdapterNotFoundError, match="'art' isn't loaded; loaded now: 'code', 'law'"):
        check_request(_request(adapter="art"), loaded, Role.AGGREGATED)


def test_a_prompts_length_comes_before_a_look_at_its_tokens() -> None:
    info = dataclasses.replace(_INFO, media=cast("Any", _MEDIA))
    served: Any = SimpleNamespace(text=_TEXT, engine=info)
    options = Options(path="", sampling={})
    for length, most in ((_INFO.context_length + 1, 0), (20, 6 * 20)):
        ids = Watched([1] * length)
        request = _request(token_ids=ids, request_id="r")
        with contextlib.suppress(InvalidRequestError):
            check(request, options, served, DEFAULT_LIMITS, FieldPaths())
        assert ids.seen <= most
    served = SimpleNamespace(text=_TEXT, engine=_INFO)
    request = _request(token_ids=[1, 90, 91], request_id="r")
    with pytest.raises(InvalidRequestError, match="2 of the model's own placeholders"):
        check(request, options, served, DEFAULT_LIMITS, FieldPaths())
