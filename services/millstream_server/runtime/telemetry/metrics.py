"""Every metric of the suite, except an engine's own, which its adapter declares.

docs/metrics.md lists them; a test compares.

Names follow the OpenTelemetry conventions where there are any, in Prometheus's form
(`gen_ai.server.time_to_first_token` in seconds is `gen_ai_server_time_to_first_token_seconds`).
Other names begin with `millstream_`. Label values are from small closed sets: methods and models
we serve, reasons of the contract; never ids, clients' addresses or texts.

Recording takes about a microsecond and is done per request, frame or event, never per token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily

# No `_created` series per counter and histogram: Prometheus doesn't need them. This holds for the
# whole process, so for SGLang's metrics too, which have none when SGLang serves them.
disable_created_metrics()  # type: ignore[no-untyped-call]

REGISTRY = CollectorRegistry(auto_describe=True)
"""Our own registry: in a worker SGLang uses the library's default one."""

ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
GCCollector(registry=REGISTRY)

counter = functools.partial(Counter, registry=REGISTRY)
gauge = functools.partial(Gauge, registry=REGISTRY)


def histogram(name: str, text: str, labels: Sequence[str], buckets: Sequence[float]) -> Histogram:
    """Make a histogram of ours; ``text`` is its help."""
    return Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)


class ScrapedGauge(NamedTuple):
    """A gauge whose collector gets the value at each scrape."""

    name: str
    text: str
    labels: tuple[str, ...]

    def family(self, value: float, labels: Sequence[str]) -> GaugeMetricFamily:
        """Make a family of one series, for a collector to yield."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        family.add_metric(labels, value)
        return family


_RPC = ("rpc_system_name", "rpc_method", "rpc_response_status_code")
_RPC_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 60, 600)
_GEN_AI = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
    "error_type",
)
# The buckets of the GenAI conventions.
_DURATION_BUCKETS = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


# ---- RPCs ----------------------------------------------------------------------------------------

RPC_SERVER_DURATION = histogram(
    "rpc_server_call_duration_seconds",
    "From an RPC's arrival to its status; a stream counts when it ends",
    _RPC,
    _RPC_BUCKETS,
)
RPC_CLIENT_DURATION = histogram(
    "rpc_client_call_duration_seconds",
    "From an RPC's start to its status, of RPCs this process sends to workers",
    _RPC,
    _RPC_BUCKETS,
)
HTTP_SERVER_DURATION = histogram(
    "http_server_request_duration_seconds",
    "From an HTTP request's head to the end of its response; not of gRPC's requests",
    ("http_request_method", "http_route", "http_response_status_code"),
    _RPC_BUCKETS,
)
RPC_SERVER_OPEN = gauge("millstream_rpc_server_open", "RPCs being handled", ["rpc_method"])

# ---- generations ---------------------------------------------------------------------------------

REQUEST_DURATION = histogram(
    "gen_ai_server_request_duration_seconds",
    "From a turn's arrival at the Processor to its end",
    _GEN_AI,
    _DURATION_BUCKETS,
)
TIME_TO_FIRST_TOKEN = histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From a turn's arrival at the Processor to its first token",
    _GEN_AI[:4],
    _TTFT_BUCKETS,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Of turns that ended well: time after the first token, divided by the tokens after it",
    _GEN_AI[:4],
    _PER_TOKEN_BUCKETS,
)
TOKENS = counter(
    "millstream_tokens",
    "Tokens of ended turns: input (prompts), cached (of those, found in the KV cache), output",
    ["gen_ai_request_model", "gen_ai_token_type"],
)

# ---- admission -----------------------------------------------------------------------------------

ADMISSION_RUNNING = gauge(
    "millstream_admission_running_requests",
    "Requests let through and not yet ended; one for n answers counts n times",
    ["model"],
)
ADMISSION_QUEUED = gauge(
    "millstream_admission_queued_requests", "Requests that wait to be let through", ["model"]
)
ADMISSION_QUEUED_TOKENS = gauge(
    "millstream_admission_queued_tokens", "Tokens that waiting requests may take", ["model"]
)
ADMISSION_OPEN_BYTES = gauge(
    "millstream_admission_open_bytes", "Bytes of messages held by open RPCs"
)
TRANSPORT_STREAMS = gauge("millstream_transport_streams", "Open RPCs of clients, of every method")
TRANSPORT_RECEIVED_BYTES = gauge(
    "millstream_transport_received_bytes",
    "Bytes of requests, whole or not, that no handler has read yet",
)
TRANSPORT_UNSENT_BYTES = gauge(
    "millstream_transport_unsent_bytes", "Bytes of responses that wait for clients to read"
)
TEXT_WAITING = gauge(
    "millstream_text_waiting_seconds",
    "Thread time that bodies, texts and grammars that wait to be read will take, by estimate",
)
MEDIA_BYTES = gauge(
    "millstream_media_bytes", "Bytes of clients' images and videos held by open conversations"
)
ADMISSION_WAIT = histogram(
    "millstream_admission_wait_seconds",
    "How long a request waited to be let through",
    ["model", "priority"],
    _DURATION_BUCKETS,
)
ADMISSION_REFUSED = counter(
    "millstream_admission_refused",
    "Requests refused for want of room: "
    "requests, tokens, pixel_steps, bytes, received_bytes, unsent_bytes, media, streams, text, "
    "deadline, displaced",
    ["cause"],
)
for _cause in (
    *("requests", "tokens", "bytes", "received_bytes", "unsent_bytes"),
    *("media", "streams", "text", "deadline", "displaced"),
):
    # 0 from the start: else the first refusal is not seen as an increase.
    ADMISSION_REFUSED.labels(_cause)

# ---- routing -------------------------------------------------------------------------------------

PREFIX_INDEX_BLOCKS = gauge(
    "millstream_prefix_index_blocks",
    "Cached KV blocks of workers that routing knows of, each counted once per worker that holds it",
    ["model"],
)
ROUTING_CACHED_TOKENS = counter(
    "millstream_routing_cached_tokens",
    "Prompt tokens that routing expected in the KV cache of the worker it chose",
    ["model"],
)

# ---- the stream between Processor and worker -----------------------------------------------------

WORKERS_CONNECTED = gauge(
    "millstream_workers_connected", "Workers that take requests", ["model", "role"]
)
WORKERS_LOST = counter(
    "millstream_workers_lost", "Streams to workers that broke without a drain", ["role"]
)
REDISPATCHES = counter(
    "millstream_redispatches",
    "Choices that lost their worker, by how they went on elsewhere (continue, "
    "continue_with_state, again, replay) or why they could not (refused, no_worker, repeated_loss)",
    ["model", "outcome"],
)
REPEATED_LOSSES_REFUSED = counter(
    "millstream_repeated_losses_refused",
    "Requests refused since an equal one of the same caller has lost two workers",
    ["model"],
)
DISCOVERY_FAILURES = counter(
    "millstream_discovery_failures", "Times that discovery broke by a bug and was started again"
)
DISCOVERY_SOURCE_FAILING = gauge(
    "millstream_discovery_source_failing",
    "1 while a source of workers' addresses can't be read; the last addresses stay in use",
    ["source"],
)
STREAM_REQUESTS_OPEN = gauge(
    "millstream_worker_stream_open_requests", "Requests open on worker streams", ["role"]
)
STREAM_REQUESTS = counter(
    "millstream_worker_stream_requests",
    "Requests ended on worker streams, by finish reason or reason of failure",
    ["role", "outcome"],
)
STREAM_FRAMES = counter(
    "millstream_worker_stream_frames",
    "Step frames: sent by a worker, received by a Processor",
    ["role"],
)
STREAM_TOKENS = counter("millstream_worker_stream_tokens", "Tokens in those frames", ["role"])

# ---- KV hand-off ---------------------------------------------------------------------------------

KV_HANDOFF_DURATION = histogram(
    "millstream_kv_handoff_duration_seconds",
    "From the start of both legs to the prefill leg's end: prefill and transfer",
    ["model"],
    _DURATION_BUCKETS,
)
KV_HANDOFFS = counter(
    "millstream_kv_handoffs",
    "Hand-offs by outcome: ok, or the reason of failure",
    ["model", "outcome"],
)
TICKETS_REFUSED = counter(
    "millstream_tickets_refused", "Tickets of hand-offs and embeddings a worker refused"
)

# ---- embeddings ----------------------------------------------------------------------------------

EMBEDDING_TRANSFERS = counter(
    "millstream_embedding_transfers",
    "Embeddings fetched by a worker (side receiver) and handed out (side sender); outcome done, "
    "failed (the way didn't work; the receiver tries inline once) or broken",
    ["side", "way", "outcome"],
)
EMBEDDING_BYTES = counter(
    "millstream_embedding_transfer_bytes", "Bytes of embeddings that arrived", ["side", "way"]
)
EMBEDDING_DURATION = histogram(
    "millstream_embedding_fetch_duration_seconds",
    "From the need of an embedding to its bytes, by the way that they went in the end",
    ["way"],
    _TTFT_BUCKETS,
)

# ---- encoding of images and videos ---------------------------------------------------------------

ENCODE_STAGE_DURATION = histogram(
    "millstream_encode_stage_duration_seconds",
    "How long an item spent in a stage: upload, queue (waits to be decoded), decode, prepare (the "
    "model's own processor), batch_queue (waits for the vision tower), forward (its batch's time)",
    ["stage"],
    _TTFT_BUCKETS,
)
ENCODE_BATCHES = counter("millstream_encode_batches", "Batches that went to the vision tower")
ENCODE_BATCHED_ITEMS = counter("millstream_encode_batched_items", "Items in those batches")
ENCODE_LOOKUPS = counter(
    "millstream_encode_lookups",
    "Items by where their result was: hit (in the store), joined (being made for another request) "
    "or miss",
    ["result"],
)
for _result in ("hit", "joined", "miss"):
    ENCODE_LOOKUPS.labels(_result)
ENCODE_UPLOAD_BYTES = gauge(
    "millstream_encode_upload_bytes", "Bytes of files that an encode worker holds"
)
ENCODE_STORE_BYTES = gauge(
    "millstream_encode_store_bytes", "Bytes of results in an encode worker's store"
)
ENCODE_LEASES = gauge("millstream_encode_leases", "Results leased to Processors")

# ---- vectors -------------------------------------------------------------------------------------

EMBED_BATCHES = counter(
    "millstream_vector_batches", "Batches that an embedding worker's engine was given"
)
EMBED_BATCHED_INPUTS = counter(
    "millstream_vector_batched_inputs", "Inputs and pairs in those batches"
)
EMBED_TOKENS = counter(
    "millstream_vector_tokens", "Tokens of the requests that got all their vectors or scores"
)

# ---- images and videos by diffusion --------------------------------------------------------------

DIFFUSION_QUEUED = gauge(
    "millstream_diffusion_queued_requests", "Requests that wait for a diffusion worker's device"
)
DIFFUSION_STAGE_DURATION = histogram(
    "millstream_diffusion_stage_duration_seconds",
    "How long a request spent in a stage: queue, run (all outputs), write (an output's file), "
    "deliver (the file is sent or stored)",
    ["stage"],
    _DURATION_BUCKETS,
)
DIFFUSION_STEPS = counter("millstream_diffusion_steps", "Denoising steps that were run")
DIFFUSION_STEP_DURATION = histogram(
    "millstream_diffusion_step_duration_seconds",
    "From one denoising step's end to the next",
    [],
    _TTFT_BUCKETS,
)
DIFFUSION_FILES = counter(
    "millstream_diffusion_files", "Outputs that were delivered", ["media_type"]
)
DIFFUSION_FILE_BYTES = counter(
    "millstream_diffusion_file_bytes", "Bytes of those outputs' files", ["media_type"]
)

# ---- engine: the gauges are made at scrape time, by `worker.engine_metrics` ----------------------

_ENGINE = ("model", "role")
ENGINE_INFO = ScrapedGauge(
    "millstream_engine_info",
    "1; its labels say what runs here",
    (*_ENGINE, "engine", "engine_version", "device"),
)
ENGINE_MOST = ScrapedGauge(
    "millstream_engine_max_running_requests", "Requests the engine runs at once at most", _ENGINE
)
ENGINE_RUNNING = ScrapedGauge(
    "millstream_engine_running_requests", "Requests the engine is working on", _ENGINE
)
ENGINE_QUEUED = ScrapedGauge(
    "millstream_engine_queued_requests", "Requests the engine has taken and not begun", _ENGINE
)
ENGINE_USED_BLOCKS = ScrapedGauge(
    "millstream_engine_used_blocks",
    "KV cache blocks held by requests; what is only cached is not in use",
    _ENGINE,
)
ENGINE_TOTAL_BLOCKS = ScrapedGauge(
    "millstream_engine_total_blocks", "KV cache blocks the engine has", _ENGINE
)
ENGINE_LOAD_AGE = ScrapedGauge(
    "millstream_engine_load_age_seconds",
    "How old the engine's gauges are; grows while the engine or the event loop doesn't answer",
    _ENGINE,
)

MODEL_LOAD = gauge(
    "millstream_model_load_seconds",
    "How long each stage of this worker's start took; those that its engine tells apart",
    ["phase"],
)
CANARY_DURATION = histogram(
    "millstream_canary_duration_seconds",
    "How long a canary generation took; one is run when the engine was silent for a while",
    ["dp_rank"],
    _TTFT_BUCKETS,
)
CANARY_FAILURES = counter(
    "millstream_canary_failures", "Canary generations that failed or were late", ["dp_rank"]
)

# ---- KV events -----------------------------------------------------------------------------------

KV_EVENTS = counter(
    "millstream_kv_events",
    "Changes of the prefix cache that the engine told: stored, removed, cleared",
    ["event"],
)
KV_CACHED_BLOCKS = gauge(
    "millstream_kv_cached_blocks",
    "KV cache blocks that the prefix cache holds, in any medium, as the engine told",
    ["dp_rank"],
)
KV_SNAPSHOTS = counter(
    "millstream_kv_snapshots",
    "Whole sets of blocks sent to readers of KV events, by cause: new (a reader without a "
    "position), restarted (its position is of another process), slow (the events after its "
    "position are gone)",
    ["cause"],
)
for _event in ("stored", "removed", "cleared"):
    KV_EVENTS.labels(_event)
for _cause in ("new", "restarted", "slow"):
    KV_SNAPSHOTS.labels(_cause)

# ---- process -------------------------------------------------------------------------------------

BUILD_INFO = gauge(
    "millstream_build_info", "1; its labels say what this process is", ["version", "service"]
)

SERVING = gauge(
    "millstream_serving", "1 while the service's health is SERVING, else 0", ["service"]
)
LOOP_PIECE = histogram(
    "millstream_event_loop_piece_seconds",
    "CPU time for which the event loop was held in one piece, without garbage collections; up to "
    "2 ms too long; in an idle process some are seen too short",
    [],
    (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5),
)
DRAINING = gauge("millstream_draining", "1 from SIGTERM on")
PACING_INTERVAL = gauge(
    "millstream_pacing_interval_seconds", "How long the Processor gathers tokens into one message"
)
CERTIFICATE_EXPIRY = gauge(
    "millstream_certificate_expiry_timestamp_seconds",
    "When the server's certificate expires, seconds since 1970; NaN without TLS",
)
CERTIFICATE_EXPIRY.set(math.nan)  # 0 would be taken for an expired one
