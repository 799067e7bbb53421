"""What callers feel."""

from __future__ import annotations

from panels import MODEL, SUITE, TURNS, Board, Chart, Line, Number, quantile, quantiles, rate, share

_DURATION = "gen_ai_server_request_duration_seconds"
_ENDED = f"{_DURATION}_count"
_FIRST = "gen_ai_server_time_to_first_token_seconds"
_NEXT = "gen_ai_server_time_per_output_token_seconds"
_NOT_OURS = (
    'error_type!~"|ABANDONED|ADAPTER_NOT_FOUND|CANCELLED|DEADLINE_EXCEEDED'
    '|INVALID_REQUEST|MODEL_NOT_FOUND|UNSUPPORTED_FEATURE"'
)
_FAILED = f"{TURNS}, {_NOT_OURS}"


def board() -> Board:
    """Traffic, latency, errors, queue."""
    made = Board("overview", "Overview", "Traffic, latency, errors and queue, as callers feel them")
    _now(made)
    _traffic(made)
    _latency(made)
    _errors(made)
    _queue(made)
    _objectives(made)
    return made


def _now(board: Board) -> None:
    board.row(
        "Now",
        Number(
            "Requests",
            "Turns and other requests that ended",
            "reqps",
            rate(_ENDED, TURNS),
        ),
        Number("First token, 95 %", "", "s", quantile(0.95, _FIRST, TURNS)),
        Number("Per token, 95 %", "", "s", quantile(0.95, _NEXT, TURNS)),
        Number(
            "Failed",
            "Share of requests that failed on the server",
            "percentunit",
            f"({rate(_ENDED, _FAILED)} or vector(0)) / {rate(_ENDED, TURNS)}",
        ),
        Number(
            "Waiting",
            "Requests in the queue",
            "short",
            f"sum(millstream_admission_queued_requests{{{MODEL}}})",
        ),
        Number(
            "Workers",
            "Workers that take requests, as the Processor with the fewest sees them",
            "short",
            f"min(sum by (pod) (millstream_workers_connected{{{MODEL}}}))",
        ),
    )


def _traffic(board: Board) -> None:
    tokens = "millstream_tokens_total"
    board.row(
        "Traffic",
        Chart(
            "Requests by model",
            "Requests that ended, well or not",
            "reqps",
            [
                Line(
                    rate(_ENDED, TURNS, "gen_ai_request_model"),
                    "{{gen_ai_request_model}}",
                )
            ],
            stacked=True,
        ),
        Chart(
            "Requests by operation",
            "chat, text_completion, embeddings, generate_image and so on",
            "reqps",
            [
                Line(
                    rate(_ENDED, TURNS, "gen_ai_operation_name"),
                    "{{gen_ai_operation_name}}",
                )
            ],
            stacked=True,
        ),
        Chart(
            "Output tokens by model",
            "Counted when a turn ends",
            "short",
            [
                Line(
                    rate(tokens, f'{TURNS}, gen_ai_token_type="output"', "gen_ai_request_model"),
                    "{{gen_ai_request_model}}",
                )
            ],
        ),
        Chart(
            "Prompt tokens",
            "All, and those that were found in the KV cache",
            "short",
            [
                Line(
                    rate(
                        tokens, f'{TURNS}, gen_ai_token_type=~"input|cached"', "gen_ai_token_type"
                    ),
                    "{{gen_ai_token_type}}",
                )
            ],
        ),
    )


def _latency(board: Board) -> None:
    board.row(
        "Latency",
        Chart("First token", "From a request's arrival", "s", quantiles(_FIRST, TURNS)),
        Chart(
            "Per token", "After the first, of turns that ended well", "s", quantiles(_NEXT, TURNS)
        ),
        Chart(
            "Whole request",
            "Text, vectors, images and videos alike",
            "s",
            quantiles(_DURATION, TURNS),
        ),
    )
    by = "gen_ai_request_model"
    board.row(
        "Latency by model, 95 %",
        Chart(
            "First token",
            "",
            "s",
            [Line(quantile(0.95, _FIRST, TURNS, by), "{{gen_ai_request_model}}")],
        ),
        Chart(
            "Per token",
            "",
            "s",
            [Line(quantile(0.95, _NEXT, TURNS, by), "{{gen_ai_request_model}}")],
        ),
        Chart(
            "Whole request",
            "",
            "s",
            [Line(quantile(0.95, _DURATION, TURNS, by), "{{gen_ai_request_model}}")],
        ),
    )


def _errors(board: Board) -> None:
    ended = f'{TURNS}, error_type!=""'
    refused = f'{SUITE}, rpc_response_status_code!="OK"'
    board.row(
        "Errors",
        Chart(
            "Failures by reason",
            "Reasons of the contract; ABANDONED: the client left",
            "reqps",
            [Line(rate(_ENDED, ended, "error_type"), "{{error_type}}")],
            stacked=True,
        ),
        Chart(
            "Failed on the server, by model",
            "Without clients that left, requests that could never succeed and deadlines",
            "percentunit",
            [
                Line(
                    share(
                        rate(_ENDED, _FAILED, "gen_ai_request_model"),
                        rate(_ENDED, TURNS, "gen_ai_request_model"),
                    ),
                    "{{gen_ai_request_model}}",
                )
            ],
        ),
        Chart(
            "Refused for want of room, by cause",
            "",
            "reqps",
            [Line(rate("millstream_admission_refused_total", SUITE, "cause"), "{{cause}}")],
            stacked=True,
        ),
        Chart(
            "RPCs that failed, by status",
            "All services of all processes",
            "reqps",
            [
                Line(
                    rate(
                        "rpc_server_call_duration_seconds_count",
                        refused,
                        "rpc_response_status_code",
                    ),
                    "{{rpc_response_status_code}}",
                )
            ],
            stacked=True,
        ),
    )


def _queue(board: Board) -> None:
    waits = "millstream_admission_wait_seconds"
    board.row(
        "Queue",
        Chart(
            "Waiting requests",
            "",
            "short",
            [
                Line(
                    f"sum by (model) (millstream_admission_queued_requests{{{MODEL}}})", "{{model}}"
                )
            ],
        ),
        Chart(
            "Running requests",
            "Let through and not yet ended; one for n answers counts n times",
            "short",
            [
                Line(
                    f"sum by (model) (millstream_admission_running_requests{{{MODEL}}})",
                    "{{model}}",
                )
            ],
        ),
        Chart(
            "Wait by priority, 95 %",
            "",
            "s",
            [Line(quantile(0.95, waits, MODEL, "priority"), "{{priority}}")],
        ),
    )


def _objectives(board: Board) -> None:
    charts = [
        ("turns_failed", "Failed"),
        ("first_tokens_slow", "First token late"),
        ("tokens_slow", "Tokens slow"),
    ]
    board.row(
        "Share of requests that miss an objective (needs the chart's rules)",
        *(
            Chart(
                title,
                "Of the last hour, and of the last day",
                "percentunit",
                [
                    Line(
                        f"model:millstream_{name}:ratio_rate{window}{{{MODEL}}}",
                        f"{{{{model}}}} {window}",
                    )
                    for window in ("1h", "1d")
                ],
            )
            for name, title in charts
        ),
    )
