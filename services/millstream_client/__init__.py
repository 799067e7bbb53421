"""Millstream's client library: chat, complete, make images, embed; with asyncio or without."""

from millstream.v1.chat_pb2 import ChatMessage, ChatTool
from millstream.v1.diffusion_pb2 import DiffusionProgress, ImageFormat, OutputDelivery
from millstream.v1.embedding_pb2 import RankedDocument
from millstream.v1.generation_pb2 import FinishReason
from millstream.v1.processor_pb2 import ChoiceDelta, ServedModel
from millstream.v1.sampling_pb2 import Constraint, LogprobOptions, SamplingParams
from millstream.v1.usage_pb2 import GenerationUsage
from millstream_client.answers import Answer, Choice
from millstream_client.client import Client
from millstream_client.conversation import Conversation
from millstream_client.errors import (
    AnswerFormatError,
    DeadlineExceededError,
    FieldViolation,
    IncompleteAnswerError,
    InternalError,
    InvalidRequestError,
    MediaFileError,
    MessageTooLargeError,
    MillstreamError,
    NotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from millstream_client.media import Image, Video
from millstream_client.request import NO_RETRY, Retry
from millstream_client.requests import MediaMessage, assistant, system, tool_result, user
from millstream_client.results import Embeddings, GeneratedFile, GeneratedMedia
from millstream_client.streams import AnswerStream, MediaStream
from millstream_client.sync_client import (
    SyncAnswerStream,
    SyncClient,
    SyncConversation,
    SyncMediaStream,
)
from millstream_client.transport import Options, Tls

__all__ = [
    "NO_RETRY",
    "Answer",
    "AnswerFormatError",
    "AnswerStream",
    "ChatMessage",
    "ChatTool",
    "Choice",
    "ChoiceDelta",
    "Client",
    "Constraint",
    "Conversation",
    "DeadlineExceededError",
    "DiffusionProgress",
    "Embeddings",
    "FieldViolation",
    "FinishReason",
    "GeneratedFile",
    "GeneratedMedia",
    "GenerationUsage",
    "Image",
    "ImageFormat",
    "IncompleteAnswerError",
    "InternalError",
    "InvalidRequestError",
    "LogprobOptions",
    "MediaFileError",
    "MediaMessage",
    "MediaStream",
    "MessageTooLargeError",
    "MillstreamError",
    "NotFoundError",
    "Options",
    "OutputDelivery",
    "OverloadedError",
    "PermissionDeniedError",
    "RankedDocument",
    "RequestCancelledError",
    "Retry",
    "SamplingParams",
    "ServedModel",
    "SyncAnswerStream",
    "SyncClient",
    "SyncConversation",
    "SyncMediaStream",
    "Tls",
    "UnauthenticatedError",
    "UnavailableError",
    "Video",
    "assistant",
    "system",
    "tool_result",
    "user",
]
