"""Methods that attacks call, and messages for them, serialized."""

from __future__ import annotations

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2

CHAT = "/millstream.v1.ProcessorService/Chat"
COMPLETE = "/millstream.v1.ProcessorService/Complete"
PARSE = "/millstream.v1.ProcessorService/Parse"
TOKENIZE = "/millstream.v1.ProcessorService/Tokenize"
LIST_MODELS = "/millstream.v1.ProcessorService/ListModels"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

CHECK_REQUEST = health_pb2.HealthCheckRequest().SerializeToString()
LIST_REQUEST = processor_pb2.ListModelsRequest().SerializeToString()


def options(
    tokens: int, choices: int = 1, top: int | None = None
) -> processor_pb2.GenerationOptions:
    sampling = sampling_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    made = processor_pb2.GenerationOptions(sampling=sampling, n=choices)
    if top is not None:
        made.logprobs.top = top
    return made


def chat(tokens: int, *, request_id: str = "") -> bytes:
    content = [chat_pb2.ContentPart(text="hi")]
    return processor_pb2.ChatRequest(
        start=processor_pb2.ChatStart(
            messages=[chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)],
            options=options(tokens),
            request_id=request_id,
        )
    ).SerializeToString()


def complete(tokens: int, choices: int, top: int | None) -> bytes:
    return processor_pb2.CompleteRequest(
        text="hi", options=options(tokens, choices, top)
    ).SerializeToString()


def tokenize(text: str) -> bytes:
    return processor_pb2.TokenizeRequest(text=text).SerializeToString()


def tokenize_tool(schema: str) -> bytes:
    """Ask for the tokens of a conversation with one tool."""
    content = [chat_pb2.ContentPart(text="hi")]
    conversation = processor_pb2.Conversation(
        messages=[chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)],
        tools=[chat_pb2.ChatTool(name="f", parameters_json_schema=schema)],
    )
    return processor_pb2.TokenizeRequest(conversation=conversation).SerializeToString()


def parse(form: str, text: str, *, schema: str = "", begun: str = "") -> bytes:
    """Ask for an answer to be read that may call one tool."""
    tool = chat_pb2.ChatTool(name="f", parameters_json_schema=schema)
    reading = processor_pb2.AnswerReading(format=form, tools=[tool], begun=begun)
    return processor_pb2.ParseRequest(reading=reading, text=text).SerializeToString()


def reflect_file(name: str) -> bytes:
    """Ask for a file; the answer repeats the question."""
    made: bytes = reflection_pb2.ServerReflectionRequest(file_by_filename=name).SerializeToString()
    return made
