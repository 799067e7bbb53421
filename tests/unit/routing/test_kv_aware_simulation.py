"""kv_aware against an oracle and against least_loaded, in virtual time (`--quick`)."""

from __future__ import annotations

import itertools

from tests.benchmarks.routing import rows


def test_it_finds_nearly_all_that_an_oracle_finds_and_no_one_waits_longer() -> None:
    found = {
        workers: {row.policy: row for row in of}
        for workers, of in itertools.groupby(rows(quick=True), lambda row: row.workers)
    }
    assert list(found) == [4, 16, 64]
    for policies in found.values():
        kv_aware, least_loaded = policies["kv_aware"], policies["least_loaded"]
        assert kv_aware.of_oracle >= 0.95
        assert kv_aware.ttft_p99_ms <= least_loaded.ttft_p99_ms
        assert kv_aware.hit_rate > 1.1 * least_loaded.hit_rate, "the traffic shares prefixes"
