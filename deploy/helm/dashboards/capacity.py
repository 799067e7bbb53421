"""What is full, and what is nearly so."""

from __future__ import annotations

from panels import MODEL, SUITE, TURNS, Board, Chart, Line, quantile, rate, share

_POD = "{{pod}}"
_OUTPUT = f'{TURNS}, gen_ai_token_type="output"'
_GENERATORS = f'millstream_engine_info{{{MODEL}, role=~"aggregated|decode"}}'
_HELD = ("admission_open", "media")
_FRONT = f'{SUITE}, component="processor"'


def board() -> Board:
    """The queue, workers' room, Processors' room, the processes."""
    made = Board("capacity", "Capacity", "What is full, and by what replicas should be chosen")
    _demand(made)
    _workers(made)
    _output(made)
    _processors(made)
    _processes(made)
    return made


def _demand(board: Board) -> None:
    board.row(
        "Demand",
        Chart(
            "Waiting requests",
            "At Processors",
            "short",
            [
                Line(
                    f"sum by (model) (millstream_admission_queued_requests{{{MODEL}}})", "{{model}}"
                )
            ],
        ),
        Chart(
            "Waiting tokens",
            "That waiting requests may take",
            "short",
            [Line(f"sum by (model) (millstream_admission_queued_tokens{{{MODEL}}})", "{{model}}")],
        ),
        Chart(
            "Wait, 95 %",
            "",
            "s",
            [
                Line(
                    quantile(0.95, "millstream_admission_wait_seconds", MODEL, "model"), "{{model}}"
                )
            ],
        ),
        Chart(
            "Refused, by cause",
            "",
            "reqps",
            [Line(rate("millstream_admission_refused_total", SUITE, "cause"), "{{cause}}")],
        ),
    )


def _workers(board: Board) -> None:
    by = "model, role, pool"
    used, total = (
        f"sum by ({by}) (millstream_engine_{part}_blocks{{{MODEL}}})" for part in ("used", "total")
    )
    pool = "{{model}} {{role}} {{pool}}"
    board.row(
        "Workers, by pool",
        Chart("KV cache held", "", "percentunit", [Line(share(used, total), pool)], highest=1),
        Chart(
            "Running requests per worker",
            "",
            "short",
            [Line(f"avg by ({by}) (millstream_engine_running_requests{{{MODEL}}})", pool)],
        ),
        Chart(
            "Queued requests per worker",
            "",
            "short",
            [Line(f"avg by ({by}) (millstream_engine_queued_requests{{{MODEL}}})", pool)],
        ),
        Chart(
            "Workers",
            "Engines that are loaded",
            "short",
            [Line(f"sum by ({by}) (millstream_engine_info{{{MODEL}}})", pool)],
        ),
    )


def _output(board: Board) -> None:
    board.row(
        "Tokens",
        Chart(
            "Output tokens per decode worker",
            "What a worker brings at this load",
            "short",
            [
                Line(
                    f"{rate('millstream_tokens_total', _OUTPUT)} / sum({_GENERATORS})",
                    "tokens a second",
                )
            ],
        ),
        Chart(
            "Hand-off, 95 %",
            "Prefill and transfer",
            "s",
            [
                Line(
                    quantile(0.95, "millstream_kv_handoff_duration_seconds", MODEL, "model"),
                    "{{model}}",
                )
            ],
        ),
        Chart(
            "First token, 95 %",
            "",
            "s",
            [
                Line(
                    quantile(
                        0.95,
                        "gen_ai_server_time_to_first_token_seconds",
                        TURNS,
                        "gen_ai_request_model",
                    ),
                    "{{gen_ai_request_model}}",
                )
            ],
        ),
    )


def _processors(board: Board) -> None:
    board.row(
        "Processors",
        Chart(
            "CPU cores",
            "The event loop runs on one",
            "short",
            [Line(rate("process_cpu_seconds_total", _FRONT, "pod"), _POD)],
        ),
        Chart(
            "Open RPCs",
            "",
            "short",
            [Line(f"sum by (pod) (millstream_rpc_server_open{{{_FRONT}}})", _POD)],
        ),
        Chart(
            "Bytes held for open RPCs",
            "Messages, and clients' files",
            "bytes",
            [
                Line(
                    " + ".join(f"millstream_{kind}_bytes{{{_FRONT}}}" for kind in _HELD),
                    _POD,
                )
            ],
        ),
        Chart(
            "Gathering of tokens",
            "How long tokens are gathered into one message; grows with load",
            "s",
            [Line(f"millstream_pacing_interval_seconds{{{_FRONT}}}", _POD)],
        ),
    )


def _processes(board: Board) -> None:
    board.row(
        "Processes",
        Chart(
            "Resident memory",
            "Of the process that is scraped, not of SGLang's",
            "bytes",
            [Line(f"process_resident_memory_bytes{{{SUITE}}}", _POD)],
        ),
        Chart(
            "CPU cores",
            "Likewise",
            "short",
            [Line(rate("process_cpu_seconds_total", SUITE, "pod"), _POD)],
        ),
        Chart(
            "File descriptors in use",
            "",
            "percentunit",
            [Line(f"process_open_fds{{{SUITE}}} / process_max_fds{{{SUITE}}}", _POD)],
            highest=1,
        ),
        Chart(
            "Versions",
            "Processes by version",
            "short",
            [
                Line(
                    f"count by (version, service) (millstream_build_info{{{SUITE}}})",
                    "{{service}} {{version}}",
                )
            ],
        ),
    )
