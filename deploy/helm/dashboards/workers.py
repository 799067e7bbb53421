"""Workers of text models: load, KV cache, batches, hand-offs."""

from __future__ import annotations

from panels import (
    ENGINE,
    MODEL,
    ROLE,
    SUITE,
    Board,
    Chart,
    Line,
    grown,
    quantile,
    quantiles,
    rate,
    share,
)

_POD = "{{pod}}"


def board() -> Board:
    """Load, KV cache, batches, hand-offs, health."""
    made = Board("workers", "Workers", "Load, KV cache, batches, hand-offs and health of workers")
    made.with_roles()
    _load(made)
    _streams(made)
    _hand_offs(made)
    _health(made)
    _engines(made)
    _sglang(made)
    return made


def _load(board: Board) -> None:
    used, total = (f"millstream_engine_{part}_blocks{{{ENGINE}}}" for part in ("used", "total"))
    board.row(
        "Load",
        Chart(
            "Running requests",
            "In the engine",
            "short",
            [Line(f"millstream_engine_running_requests{{{ENGINE}}}", _POD)],
        ),
        Chart(
            "Queued requests",
            "Taken by the engine, not begun",
            "short",
            [Line(f"millstream_engine_queued_requests{{{ENGINE}}}", _POD)],
        ),
        Chart(
            "KV cache held by requests",
            "What is only cached is not counted",
            "percentunit",
            [Line(share(used, total), _POD)],
            highest=1,
        ),
    )


def _streams(board: Board) -> None:
    tokens, frames = (
        "millstream_worker_stream_tokens_total",
        "millstream_worker_stream_frames_total",
    )
    board.row(
        "Steps",
        Chart(
            "Tokens",
            "Sent by workers on their streams",
            "short",
            [Line(rate(tokens, f'{ROLE}, component!="processor"', "pod"), _POD)],
        ),
        Chart(
            "Tokens per frame",
            "A worker sends one frame per step of its engine: about its batch",
            "short",
            [
                Line(
                    share(
                        rate(tokens, f'{ROLE}, component!="processor"', "pod"),
                        rate(frames, f'{ROLE}, component!="processor"', "pod"),
                    ),
                    _POD,
                )
            ],
        ),
        Chart(
            "Requests by outcome",
            "As workers count them",
            "reqps",
            [
                Line(
                    rate(
                        "millstream_worker_stream_requests_total",
                        f'{ROLE}, component!="processor"',
                        "role, outcome",
                    ),
                    "{{role}} {{outcome}}",
                )
            ],
        ),
    )


def _hand_offs(board: Board) -> None:
    board.row(
        "Hand-offs from prefill to decode",
        Chart(
            "Hand-offs by outcome",
            "ok, or the reason of failure",
            "reqps",
            [Line(rate("millstream_kv_handoffs_total", MODEL, "outcome"), "{{outcome}}")],
            stacked=True,
        ),
        Chart(
            "Prefill and transfer",
            "",
            "s",
            quantiles("millstream_kv_handoff_duration_seconds", MODEL),
        ),
        Chart(
            "Tickets refused",
            "Of hand-offs and embeddings",
            "short",
            [Line(rate("millstream_tickets_refused_total", SUITE, "pod"), _POD)],
        ),
    )


def _health(board: Board) -> None:
    connected = f"sum by (pod, model, role) (millstream_workers_connected{{{ENGINE}}})"
    board.row(
        "Health",
        Chart(
            "Connected workers",
            "As the Processor with the fewest sees them",
            "short",
            [Line(f"min by (model, role) ({connected})", "{{model}} {{role}}")],
        ),
        Chart(
            "Serving",
            "1 while health is SERVING",
            "short",
            [Line(f"min by (pod) (millstream_serving{{{SUITE}}})", _POD)],
            highest=1,
        ),
        Chart(
            "Lost workers",
            "Streams that broke without a drain",
            "short",
            [
                Line(
                    grown("millstream_workers_lost_total", ROLE, "role"),
                    "{{role}}",
                )
            ],
        ),
        Chart(
            "Draining",
            "1 from SIGTERM on",
            "short",
            [Line(f"max by (pod) (millstream_draining{{{SUITE}}})", _POD)],
            highest=1,
        ),
    )


def _engines(board: Board) -> None:
    board.row(
        "Engines",
        Chart(
            "Age of the engine's gauges",
            "Grows while engine or event loop don't respond",
            "s",
            [Line(f"millstream_engine_load_age_seconds{{{ENGINE}}}", _POD)],
        ),
        Chart(
            "Canary, 95 %",
            "Trial generations of a silent engine",
            "s",
            [Line(quantile(0.95, "millstream_canary_duration_seconds", SUITE, "pod"), _POD)],
        ),
        Chart(
            "Canary failures",
            "",
            "short",
            [
                Line(
                    grown("millstream_canary_failures_total", SUITE, "pod"),
                    _POD,
                )
            ],
        ),
    )


def _sglang(board: Board) -> None:
    board.row(
        "SGLang's own gauges",
        Chart(
            "Running requests",
            "sglang:num_running_reqs",
            "short",
            [Line(f"max by (pod) (sglang:num_running_reqs{{{SUITE}}})", _POD)],
        ),
        Chart(
            "Queued requests",
            "sglang:num_queue_reqs",
            "short",
            [Line(f"max by (pod) (sglang:num_queue_reqs{{{SUITE}}})", _POD)],
        ),
        Chart(
            "Token usage",
            "sglang:token_usage",
            "percentunit",
            [Line(f"max by (pod) (sglang:token_usage{{{SUITE}}})", _POD)],
            highest=1,
        ),
    )
