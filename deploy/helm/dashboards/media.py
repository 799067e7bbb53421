"""Images and videos made and read, vectors and scores."""

from __future__ import annotations

from panels import MODEL, SUITE, TURNS, Board, Chart, Line, quantile, rate, share

_DURATION = "gen_ai_server_request_duration_seconds"
_STEP = "millstream_diffusion_step_duration_seconds"
_POD = "{{pod}}"


def board() -> Board:
    """Diffusion, embedding, encoding, and the ways of embeddings."""
    made = Board(
        "media", "Diffusion, embedding, encoding", "What workers other than those of text do"
    )
    _diffusion(made)
    _denoising(made)
    _embedding(made)
    _encoding(made)
    _transfers(made)
    return made


def _diffusion(board: Board) -> None:
    made = f'{TURNS}, gen_ai_operation_name=~"generate_.*"'
    stage = "millstream_diffusion_stage_duration_seconds"
    board.row(
        "Diffusion: requests",
        Chart(
            "Requests",
            "",
            "reqps",
            [
                Line(
                    rate(f"{_DURATION}_count", made, "gen_ai_operation_name"),
                    "{{gen_ai_operation_name}}",
                )
            ],
        ),
        Chart(
            "Whole request, 95 %",
            "",
            "s",
            [
                Line(
                    quantile(0.95, _DURATION, made, "gen_ai_request_model"),
                    "{{gen_ai_request_model}}",
                )
            ],
        ),
        Chart(
            "Waiting for a device",
            "On workers; those at the Processor are in Overview",
            "short",
            [Line(f"millstream_diffusion_queued_requests{{{SUITE}}} > 0", _POD)],
        ),
        Chart(
            "Stages, 95 %",
            "queue, run, write, deliver",
            "s",
            [Line(quantile(0.95, stage, SUITE, "stage"), "{{stage}}")],
        ),
    )


def _denoising(board: Board) -> None:
    board.row(
        "Diffusion: work",
        Chart(
            "Denoising steps",
            "",
            "short",
            [Line(rate("millstream_diffusion_steps_total", SUITE, "pod"), _POD)],
        ),
        Chart(
            "Step, 95 %",
            "From one step's end to the next",
            "s",
            [Line(quantile(0.95, _STEP, SUITE, "pod"), _POD)],
        ),
        Chart(
            "Outputs",
            "",
            "short",
            [Line(rate("millstream_diffusion_files_total", SUITE, "media_type"), "{{media_type}}")],
        ),
        Chart(
            "Bytes of outputs",
            "",
            "Bps",
            [
                Line(
                    rate("millstream_diffusion_file_bytes_total", SUITE, "media_type"),
                    "{{media_type}}",
                )
            ],
        ),
    )


def _embedding(board: Board) -> None:
    asked = f'{TURNS}, gen_ai_operation_name=~"embeddings|rerank"'
    batches, inputs = "millstream_vector_batches_total", "millstream_vector_batched_inputs_total"
    board.row(
        "Embedding",
        Chart(
            "Requests",
            "Vectors and scores",
            "reqps",
            [
                Line(
                    rate(f"{_DURATION}_count", asked, "gen_ai_operation_name"),
                    "{{gen_ai_operation_name}}",
                )
            ],
        ),
        Chart(
            "Whole request, 95 %",
            "",
            "s",
            [
                Line(
                    quantile(0.95, _DURATION, asked, "gen_ai_operation_name"),
                    "{{gen_ai_operation_name}}",
                )
            ],
        ),
        Chart(
            "Inputs per batch",
            "",
            "short",
            [Line(share(rate(inputs, SUITE, "pod"), rate(batches, SUITE, "pod")), _POD)],
        ),
        Chart(
            "Tokens",
            "Of requests that got all their vectors or scores",
            "short",
            [Line(rate("millstream_vector_tokens_total", SUITE, "pod"), _POD)],
        ),
    )


def _encoding(board: Board) -> None:
    batches, items = "millstream_encode_batches_total", "millstream_encode_batched_items_total"
    lookups = "millstream_encode_lookups_total"
    board.row(
        "Encoding of images and videos",
        Chart(
            "Items by where their result was",
            "hit: in the store; joined: being made",
            "short",
            [Line(rate(lookups, SUITE, "result"), "{{result}}")],
            stacked=True,
        ),
        Chart(
            "Stages, 95 %",
            "",
            "s",
            [
                Line(
                    quantile(0.95, "millstream_encode_stage_duration_seconds", SUITE, "stage"),
                    "{{stage}}",
                )
            ],
        ),
        Chart(
            "Items per batch",
            "Of the vision tower",
            "short",
            [Line(share(rate(items, SUITE, "pod"), rate(batches, SUITE, "pod")), _POD)],
        ),
        Chart(
            "Memory",
            "Results in the store, files that are held, clients' files at Processors",
            "bytes",
            [
                Line(f"sum(millstream_encode_store_bytes{{{SUITE}}})", "results"),
                Line(f"sum(millstream_encode_upload_bytes{{{SUITE}}})", "files"),
                Line(f"sum(millstream_media_bytes{{{SUITE}}})", "at Processors"),
            ],
        ),
    )


def _transfers(board: Board) -> None:
    received = f'{SUITE}, side="receiver"'
    board.row(
        "Embeddings on their way to the workers",
        Chart(
            "Transfers",
            "By way and outcome",
            "short",
            [
                Line(
                    rate("millstream_embedding_transfers_total", received, "way, outcome"),
                    "{{way}} {{outcome}}",
                )
            ],
        ),
        Chart(
            "Bytes",
            "",
            "Bps",
            [Line(rate("millstream_embedding_transfer_bytes_total", received, "way"), "{{way}}")],
        ),
        Chart(
            "Fetch, 95 %",
            "From the need to the bytes",
            "s",
            [
                Line(
                    quantile(0.95, "millstream_embedding_fetch_duration_seconds", SUITE, "way"),
                    "{{way}}",
                )
            ],
        ),
        Chart(
            "Leases, and workers connected",
            "Results leased to Processors",
            "short",
            [
                Line(f"sum(millstream_encode_leases{{{SUITE}}})", "leases"),
                Line(
                    f'min(millstream_workers_connected{{{MODEL}, role="encode"}})', "encode workers"
                ),
            ],
        ),
    )
