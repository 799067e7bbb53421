"""What holds of each language's example client."""

from __future__ import annotations

import pytest

from tests.support.clients.client_examples import RECOMMENDED, ROUND_ROBIN, ExampleSuite, Run
from tests.support.processes.simulated_suite import ALPHABET

_CALLS, _MOST_COST = 150, 5


class ExampleChecks:
    """Made into tests by a subclass with a fixture `command`: how the example is started."""

    retries = True
    """Whether the language's library retries, as the service config says."""

    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def round_robin(cls, command: list[str]) -> list[str]:
        """Return the same with `ROUND_ROBIN`, if it doesn't read the service config of a file."""
        return command

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, example_suite: ExampleSuite, command: list[str]) -> Run:
        return example_suite.run(command, retries=cls.retries)

    def test_it_asks_for_health(self, run: Run) -> None:
        assert run.of("health") == [{"event": "health", "status": "SERVING"}]

    def test_a_chat_is_streamed_and_cancelled_by_a_message(self, run: Run) -> None:
        deltas = [one["text"] for one in run.of("delta") if one["turn"] == 1]
        first = run.of("finished")[0]
        assert len(deltas) >= 3
        assert ALPHABET.startswith("".join(deltas))
        assert (first["turn"], first["finish_reason"]) == (1, "FINISH_REASON_CANCELLED")
        assert len("".join(deltas)) <= first["completion_tokens"] < 400

    def test_a_second_turn_follows_on_the_same_stream(self, run: Run) -> None:
        second = run.of("finished")[1]
        assert "".join(one["text"] for one in run.of("delta") if one["turn"] == 2) == "ABCDE"
        assert (second["turn"], second["finish_reason"]) == (2, "FINISH_REASON_LENGTH")
        assert second["completion_tokens"] == 5
        assert run.call("chat") == {"event": "ended", "call": "chat", "code": "OK"}

    def test_the_processor_logs_both_turns_under_the_clients_trace(self, run: Run) -> None:
        turns = [
            [word for line in log for word in line.split() if word.startswith("outcome=")][:2]
            for log in run.logs
        ]
        assert ["outcome=CANCELLED", "outcome=LENGTH"] in turns

    def test_a_deadline_ends_a_call(self, run: Run) -> None:
        assert run.call("deadline")["code"] == "DEADLINE_EXCEEDED"

    def test_errors_are_decoded_with_their_details(self, run: Run) -> None:
        invalid, overloaded = run.call("invalid"), run.call("overloaded")
        assert invalid == {
            "event": "error",
            "call": "invalid",
            "code": "INVALID_ARGUMENT",
            "message": "options.sampling.top_p: must be above 0 and at most 1",
            "reason": "INVALID_REQUEST",
            "domain": "millstream.io",
            "retryable": False,
            "violations": [
                {
                    "field": "options.sampling.top_p",
                    "description": "must be above 0 and at most 1",
                }
            ],
            "retry_delay_s": None,
        }
        assert overloaded["code"] == "RESOURCE_EXHAUSTED"
        assert (overloaded["reason"], overloaded["retryable"]) == ("OVERLOADED", True)
        assert overloaded["retry_delay_s"] >= 0.1

    def test_a_call_without_a_key_is_refused(self, run: Run) -> None:
        refused = run.call("no_key")
        assert (refused["code"], refused["reason"]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")

    def test_calls_are_balanced_over_the_servers(self, run: Run) -> None:
        assert run.of("balanced") == [{"event": "balanced", "calls": 9}]
        assert all(run.logs)

    def test_the_service_config_costs_what_round_robin_does(
        self, example_suite: ExampleSuite, command: list[str], round_robin: list[str]
    ) -> None:
        """In CPU time, the start's too; `tests.benchmarks.service_configs` has the bound 1.5."""
        check_cost(example_suite, command, round_robin)


def check_cost(suite: ExampleSuite, command: list[str], round_robin: list[str]) -> None:
    """Compare the CPU time of calls under a language's service config."""
    plain_s = suite.cpu_s(round_robin, ROUND_ROBIN, _CALLS)
    ours_s = suite.cpu_s(command, RECOMMENDED, _CALLS)
    assert ours_s < _MOST_COST * plain_s, (ours_s, plain_s)
