"""Sampling flags: one for each plain sampling knob of the contract."""

from __future__ import annotations

import argparse

from millstream.v1 import sampling_pb2
from millstream_client.knobs import KNOBS, generation_options
from millstream_server.cli.sampling_flags import add_sampling_flags, knobs_given

ALL = (
    "--temperature 0 --top-p 0.5 --top-k 0 --min-p 0.25 --frequency-penalty -1.5"
    " --presence-penalty 2 --repetition-penalty 1.5 --max-new-tokens 7 --min-new-tokens 3"
    " --stop-token-ids 5 --stop-token-ids 6 --no-ignore-eos --seed 9223372036854775807"
    " --seed-best-effort"
)


def _parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser)
    return parser.parse_args(line.split())


def test_every_knob_has_a_flag_that_arrives() -> None:
    knobs = knobs_given(_parse(ALL + " --stop a --stop b"))
    assert set(knobs) == {knob.name for knob in KNOBS} | {"stop"}
    options = generation_options(**knobs)
    assert options.sampling == sampling_pb2.SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=0,
        min_p=0.25,
        frequency_penalty=-1.5,
        presence_penalty=2,
        repetition_penalty=1.5,
        max_new_tokens=7,
        min_new_tokens=3,
        stop_token_ids=[5, 6],
        ignore_eos=False,
        seed=2**63 - 1,
        seed_best_effort=True,
    )
    assert list(options.stop) == ["a", "b"]


def test_a_flag_left_out_stays_unset() -> None:
    assert knobs_given(_parse("")) == {}
    assert knobs_given(_parse("--ignore-eos")) == {"ignore_eos": True}
