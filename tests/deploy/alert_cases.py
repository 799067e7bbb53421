"""For each alert series on which it fires and series on which it doesn't, in promtool's notation.

`A+BxN`: A, and N further samples, one a minute, each B more. `test_alerts.py` adds the labels
that all series of a release have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Series = Mapping[str, str]
_LONG = 4 * 60  # minutes; of a day whose first 20 hours had no requests


@dataclass(frozen=True)
class Case:
    """An alert of one severity.

    Attributes:
        fires: series on which it fires after `minutes`, with `labels`.
        quiet: series on which it doesn't, and isn't about to: the alert is not even pending.
    """

    alert: str
    severity: str
    minutes: int
    fires: Series
    quiet: Series
    labels: Mapping[str, str] = field(default_factory=dict)


def _turns(failed: float, per_minute: float = 100, minutes: int = _LONG) -> Series:
    name = "gen_ai_server_request_duration_seconds_count"
    about = 'pod="p", gen_ai_request_model="m"'
    return {
        f"{name}{{{about}}}": f"0+{per_minute - failed}x{minutes}",
        f'{name}{{{about}, error_type="WORKER_LOST"}}': f"0+{failed}x{minutes}",
    }


# Not the server's fault, however many there are.
_NOT_OURS = {
    "gen_ai_server_request_duration_seconds_count"
    '{pod="p", gen_ai_request_model="m", error_type="CANCELLED"}': "0+50x80"
}


def _slow(metric: str, bound: str, slow: float, minutes: int = _LONG) -> Series:
    about = 'pod="p", gen_ai_request_model="m"'
    return {
        f'{metric}_bucket{{{about}, le="{bound}"}}': f"0+{100 - slow}x{minutes}",
        f'{metric}_bucket{{{about}, le="+Inf"}}': f"0+100x{minutes}",
        f"{metric}_count{{{about}}}": f"0+100x{minutes}",
        **_turns(0, minutes=minutes),
    }


_FIRST = ("gen_ai_server_time_to_first_token_seconds", "2.5")
_NEXT = ("gen_ai_server_time_per_output_token_seconds", "0.1")
_M = {"model": "m"}
_PQ = 'pod="q"'
_WORKER = 'pod="w", model="m", role="decode", component="decode"'
_PROCESSOR = 'pod="p", component="processor"'


def _connected(**workers: int) -> Series:
    series = {f'millstream_admission_queued_requests{{{_PROCESSOR}, model="m"}}': "0x60"}
    for role, count in workers.items():
        series[f'millstream_workers_connected{{{_PROCESSOR}, model="m", role="{role}"}}'] = (
            f"{count}x60"
        )
    return series


def _wait(priority: str, bound: str) -> str:
    about = f'{_PROCESSOR}, model="m", priority="{priority}", le="{bound}"'
    return f"millstream_admission_wait_seconds_bucket{{{about}}}"


def _hand_off(outcome: str) -> str:
    return f'millstream_kv_handoffs_total{{{_PROCESSOR}, model="m", outcome="{outcome}"}}'


def _transfer(outcome: str) -> str:
    about = f'{_PQ}, side="receiver", way="nixl", outcome="{outcome}"'
    return f"millstream_embedding_transfers_total{{{about}}}"


def _certificate(days: float) -> Series:
    # promtool's clock starts at 0.
    return {
        f"millstream_certificate_expiry_timestamp_seconds{{{_PQ}}}": f"{days * 86400 + 7200}x120"
    }


SHORT = [
    Case(
        "MillstreamErrorBudgetBurn",
        "critical",
        70,
        _turns(2, minutes=80),  # 2 % of the turns, objective 0.1 %
        {**_turns(0.5, minutes=80), **_NOT_OURS},
        _M,
    ),
    # All fail, but five in the hour.
    Case(
        "MillstreamErrorBudgetBurn", "critical", 70, _turns(2, minutes=80), _turns(0.1, 0.1, 80), _M
    ),
    Case(
        "MillstreamFirstTokenSlow",
        "critical",
        70,
        _slow(*_FIRST, 80, 80),
        _slow(*_FIRST, 20, 80),
        _M,
    ),
    Case("MillstreamTokensSlow", "critical", 70, _slow(*_NEXT, 80, 80), _slow(*_NEXT, 20, 80), _M),
    Case(
        "MillstreamRequestsRefused",
        "warning",
        30,
        {f'millstream_admission_refused_total{{{_PROCESSOR}, cause="requests"}}': "0+12x40"},
        {f'millstream_admission_refused_total{{{_PROCESSOR}, cause="requests"}}': "0+5x40"},
        {"cause": "requests"},
    ),
    Case(
        "MillstreamQueueWaitLong",
        "warning",
        30,
        {
            _wait("normal", le): f"0+{n}x40"
            for le, n in (("5.12", 50), ("10.24", 100), ("+Inf", 100))
        },
        {
            _wait(p, le): f"0+{n}x40"
            for p, fast in (("normal", 100), ("low", 0))
            for le, n in (("0.16", fast), ("40.96", 100), ("+Inf", 100))
        },
        _M,
    ),
    Case(
        "MillstreamModelWithoutWorkers",
        "critical",
        10,
        _connected(prefill=1, decode=0),
        _connected(prefill=1, decode=1),
        {"pod": "p", "model": "m"},
    ),
    Case(
        "MillstreamModelWithoutWorkers",
        "critical",
        10,
        _connected(),
        _connected(aggregated=1),
        {"pod": "p", "model": "m"},
    ),
    Case(
        "MillstreamModelWithoutWorkers",
        "critical",
        10,
        _connected(diffusion=0),
        _connected(diffusion=1),
        {"pod": "p", "model": "m"},
    ),
    Case(
        "MillstreamModelWithoutWorkers",
        "critical",
        10,
        _connected(encode=1),
        _connected(embedding=1),
        {"pod": "p", "model": "m"},
    ),
    Case(
        "MillstreamDiscoveryFailing",
        "warning",
        10,
        {'millstream_discovery_source_failing{pod="p", source="workers"}': "1x20"},
        {'millstream_discovery_source_failing{pod="p", source="workers"}': "0x20"},
        {"pod": "p", "source": "workers"},
    ),
    Case(
        "MillstreamEncodeWorkersGone",
        "critical",
        10,
        _connected(encode=0, aggregated=1),
        _connected(encode=1, aggregated=1),
        {"pod": "p", "component": "processor", "model": "m", "role": "encode"},
    ),
    Case(
        "MillstreamHandoffsFailing",
        "critical",
        30,
        {
            _hand_off("ok"): "0+90x40",
            _hand_off("KV_TRANSFER_FAILED"): "0+10x40",
        },
        {
            _hand_off("ok"): "0+90x40",
            _hand_off("KV_TRANSFER_FAILED"): "0+1x40",
            _hand_off("CANCELLED"): "0+90x40",
        },
        _M,
    ),
    Case(
        "MillstreamTicketsRefused",
        "warning",
        25,
        {f"millstream_tickets_refused_total{{{_PQ}}}": "0x20 1x20"},
        {f"millstream_tickets_refused_total{{{_PQ}}}": "7x40"},
        {"pod": "q"},
    ),
    Case(
        "MillstreamEmbeddingTransfersFailing",
        "critical",
        30,
        {_transfer(o): f"0+{n}x40" for o, n in (("done", 80), ("broken", 20))},
        {
            # One way fails, the next brings it.
            _transfer(o): f"0+{n}x40"
            for o, n in (("done", 80), ("failed", 80), ("broken", 1))
        },
    ),
    Case(
        "MillstreamNotServing",
        "warning",
        40,
        {
            f'millstream_serving{{{_PQ}, service="millstream.v1.DecodeService"}}': "0x60",
            f"millstream_draining{{{_PQ}}}": "0x60",
        },
        {
            f'millstream_serving{{{_PQ}, service="millstream.v1.DecodeService"}}': "0x60",
            f"millstream_draining{{{_PQ}}}": "1x60",
        },
        {"pod": "q", "service": "millstream.v1.DecodeService"},
    ),
    Case(
        "MillstreamCanaryFailing",
        "critical",
        25,
        {f'millstream_canary_failures_total{{{_PQ}, dp_rank="0"}}': "0x20 1x20"},
        {f'millstream_canary_failures_total{{{_PQ}, dp_rank="0"}}': "3x40"},
        {"pod": "q", "dp_rank": "0"},
    ),
    Case(
        "MillstreamEngineSilent",
        "warning",
        10,
        {f"millstream_engine_load_age_seconds{{{_WORKER}}}": "0+60x20"},
        {f"millstream_engine_load_age_seconds{{{_WORKER}}}": "2x20"},
        {"pod": "w", "model": "m", "role": "decode"},
    ),
    Case(
        "MillstreamWorkerLost",
        "warning",
        25,
        {f'millstream_workers_lost_total{{{_PROCESSOR}, role="decode"}}': "0x20 1x20"},
        {f'millstream_workers_lost_total{{{_PROCESSOR}, role="decode"}}': "2x40"},
        {"role": "decode"},
    ),
    Case(
        "MillstreamRestarting",
        "critical",
        30,
        {f"process_start_time_seconds{{{_PQ}}}": "10x5 400x5 800x5 1200x30"},
        {f"process_start_time_seconds{{{_PQ}}}": "10x5 400x5 800x40"},
        {"pod": "q"},
    ),
    Case(
        "MillstreamKvCacheFull",
        "warning",
        25,
        {
            f"millstream_engine_used_blocks{{{_WORKER}}}": "97x40",
            f"millstream_engine_total_blocks{{{_WORKER}}}": "100x40",
        },
        {
            f"millstream_engine_used_blocks{{{_WORKER}}}": "90x40",
            f"millstream_engine_total_blocks{{{_WORKER}}}": "100x40",
            # A worker without a KV cache.
            f'millstream_engine_used_blocks{{{_PQ}, model="d", role="diffusion"}}': "0x40",
            f'millstream_engine_total_blocks{{{_PQ}, model="d", role="diffusion"}}': "0x40",
        },
        {"pod": "w", "model": "m", "role": "decode"},
    ),
    Case(
        "MillstreamProcessorBusy",
        "warning",
        30,
        {f"process_cpu_seconds_total{{{_PROCESSOR}}}": "0+58x40"},
        {
            f"process_cpu_seconds_total{{{_PROCESSOR}}}": "0+40x40",
            'process_cpu_seconds_total{pod="w", component="decode"}': "0+120x40",
        },
        {"pod": "p"},
    ),
    Case(
        "MillstreamFileDescriptors",
        "warning",
        15,
        {f"process_open_fds{{{_PQ}}}": "900x20", f"process_max_fds{{{_PQ}}}": "1024x20"},
        {f"process_open_fds{{{_PQ}}}": "700x20", f"process_max_fds{{{_PQ}}}": "1024x20"},
        {"pod": "q"},
    ),
    Case(
        "MillstreamCertificateExpires",
        "warning",
        100,
        _certificate(10),
        _certificate(20),
        {"pod": "q"},
    ),
    Case(
        "MillstreamCertificateExpires",
        "critical",
        100,
        _certificate(1),
        _certificate(10),
        {"pod": "q"},
    ),
    # No TLS: there is no time, and no alert.
    Case(
        "MillstreamCertificateExpires",
        "critical",
        100,
        _certificate(1),
        {f"millstream_certificate_expiry_timestamp_seconds{{{_PQ}}}": "NaN " * 120},
        {"pod": "q"},
    ),
    Case(
        "MillstreamScrapeDown",
        "warning",
        10,
        {f"up{{{_PROCESSOR}}}": "0x20"},
        {f"up{{{_PROCESSOR}}}": "1x20"},
        {"pod": "p", "component": "processor"},
    ),
    Case(
        "MillstreamNoMetrics",
        "critical",
        15,
        {'up{pod="w", component="decode"}': "1x20"},
        {f"up{{{_PROCESSOR}}}": "0x20"},
        {"component": "processor"},
    ),
]

# 0.4 % of the turns fail: three times too many for a month, too few to be urgent.
LONG = [
    Case("MillstreamErrorBudgetBurn", "warning", _LONG, _turns(0.4), _turns(0.2), _M),
    Case("MillstreamFirstTokenSlow", "warning", _LONG, _slow(*_FIRST, 18), _slow(*_FIRST, 10), _M),
    Case("MillstreamTokensSlow", "warning", _LONG, _slow(*_NEXT, 18), _slow(*_NEXT, 10), _M),
]
