"""What an engine's `deterministic` and `engine_tokenizer` turn on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.control.engine import Role
from millstream_server.formats.families import FORMATS
from millstream_server.formats.tags import Tool, Wanted, structural_tag
from millstream_server.generation.output import FinishReason
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.generation.validation import check_request
from millstream_server.runtime.errors import (
    InvalidRequestError,
    UnsupportedFeatureError,
)
from tests.support.answers import parser, read
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    aborted,
    answer,
    dies,
    generation,
    prompt,
    released,
    result,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

TAG = (
    '{"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": '
    '{"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "</f>"}}'
)


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def able(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """An engine with every ability."""
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("able") / "log",
        model_path=str(model),
        deterministic=True,
        engine_tokenizer=True,
    )
    await engine.ready()
    yield engine
    await engine.close()


class TestAble:
    """Aggregated, deterministic, with a tokenizer."""

    async def test_a_seed_repeats_and_matters(self, able: EngineProcess) -> None:
        async def draw(seed: int) -> list[int]:
            request = generation(prompt(20), temperature=1.0, seed=seed)
            return (await answer(able, request)).token_ids

        assert await draw(1) == await draw(1) != await draw(2)

    async def test_min_p_is_refused(self, able: EngineProcess) -> None:
        """An assertion in SGLang's sampler would end the scheduler."""
        info = await able.ready()
        with pytest.raises(UnsupportedFeatureError) as caught:
            check_request(generation(prompt(20), min_p=0.1), info, Role.AGGREGATED)
        assert [violation.field for violation in caught.value.violations] == ["sampling.min_p"]

    async def test_min_new_tokens_holds_stop_tokens_back(self, able: EngineProcess) -> None:
        free = (await answer(able, generation(prompt(20)))).token_ids
        stop = free[2]
        request = generation(prompt(20), stop_token_ids=(stop,), min_new_tokens=6)
        assert stop not in (await answer(able, request)).token_ids[:6]

    @pytest.mark.parametrize(
        ("kind", "source", "answers"),
        [
            (ConstraintKind.EBNF, 'root ::= "yes" | "no"', {"yes", "no"}),
            (ConstraintKind.REGEX, "a{3}b", {"aaab"}),
            (ConstraintKind.JSON_SCHEMA, '{"enum": [1, 2]}', {"1", "2"}),
            (ConstraintKind.STRUCTURAL_TAG, TAG, {"<f>1</f>", "<f>2</f>"}),
        ],
    )
    async def test_constraints(
        self,
        able: EngineProcess,
        model: Path,
        kind: ConstraintKind,
        source: str,
        answers: set[str],
    ) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only here

        request = generation(prompt(20), 20, constraint=Constraint(kind, source))
        sink = able.submit(request)
        assert (await result(sink)).reason is FinishReason.STOP
        text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(sink.token_ids)
        assert text.strip() in answers

    async def test_a_required_call_is_made_and_read(self, able: EngineProcess, model: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only here

        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        wanted = Wanted(tools=(Tool("f", schema),), must_call=True, parallel=False)
        source = structural_tag(FORMATS["qwen-xml"], wanted)
        assert source is not None
        constraint = Constraint(ConstraintKind.STRUCTURAL_TAG, source)
        sink = able.submit(generation(prompt(20), 100, constraint=constraint))
        assert (await result(sink)).reason is FinishReason.STOP
        text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(sink.token_ids)
        (call,) = read(parser(FORMATS["qwen-xml"], {"f": schema}), [text])
        assert call in {("call", "0", "f", '{"n": 1}'), ("call", "0", "f", '{"n": 2}')}

    @pytest.mark.parametrize(
        ("kind", "source"),
        [
            (ConstraintKind.EBNF, "root := "),
            (ConstraintKind.REGEX, "[0-9"),
            (ConstraintKind.JSON_SCHEMA, "{not json"),
            (ConstraintKind.STRUCTURAL_TAG, TAG.replace('{"enum": [1, 2]}', '{"type": "odd"}')),
        ],
    )
    async def test_a_bad_grammar_fails_its_own_request_without_a_token(
        self, able: EngineProcess, kind: ConstraintKind, source: str
    ) -> None:
        sink = able.submit(generation(prompt(20), constraint=Constraint(kind, source)))
        with pytest.raises(InvalidRequestError) as caught:
            await result(sink)
        assert caught.value.violations[0].field == "sampling.constraint"
        assert sink.token_ids == []
        await released(able)

    async def test_abort_while_a_grammar_is_compiled(self, able: EngineProcess) -> None:
        # Takes the compiler a second or more: it looks at every pair of rules.
        names = [f"r{number}" for number in range(250)]
        rules = [f'{name} ::= "{name}x" [a-z]* root' for name in names]
        source = "\n".join([f"root ::= {' | '.join(names)}", *rules])
        request = generation(prompt(20), 400, constraint=Constraint(ConstraintKind.EBNF, source))
        sink = able.submit(request)
        await asyncio.sleep(0.005)
        await aborted(able, request, sink)
        assert sink.token_ids == []

    async def test_the_detokenizers_death_is_noticed(self, able: EngineProcess) -> None:
        # The last test of its class: the engine does not come back.
        _scheduler, detokenizer = (await able.inspect())["pids"]
        await dies(able, lambda: os.kill(detokenizer, signal.SIGKILL))


def _large(count: int) -> Constraint:
    """Return a schema that takes the compiler seconds: of each pair of properties it has a rule."""
    properties = {f"property_{number}": {"type": "string"} for number in range(count)}
    source = json.dumps({"type": "object", "properties": properties})
    return Constraint(ConstraintKind.JSON_SCHEMA, source)


def _niceness(pid: int) -> set[int]:
    """Return that of a process's threads."""
    stats = [each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {int(stat.rpartition(")")[2].split()[16]) for stat in stats}


async def test_a_grammar_that_compiles_too_long_fails_alone(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(
        tmp_path / "log", model_path=str(model), engine_tokenizer=True, grammar_timeout_s=0.5
    )
    try:
        await engine.ready()
        for _ in range(2):  # the second time SGLang has it in its cache
            late = engine.submit(generation(prompt(20), constraint=_large(1300)))
            assert (await answer(engine, generation(prompt(20)))).token_ids
            with pytest.raises(InvalidRequestError, match="--grammar-timeout-s"):
                await result(late)
            assert late.token_ids == []
        scheduler, _detokenizer = (await engine.inspect())["pids"]
        assert 19 in _niceness(scheduler)  # it still compiles, and leaves the cores to others
    finally:
        await engine.close()
