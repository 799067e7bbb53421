"""Millstream's client library: chat, complete, make images, embed; with asyncio or without."""

from millstream.v1.chat_pb2 import ChatMessage, ChatTool
from millstream.v1.diffusion_pb2 import DiffusionProgress, ImageFormat, OutputDelivery
from millstream.v1.embedding_pb2 import RankedDocument
from millstream.v1.generation_pb2 import FinishReason
from millstream.v1.processor_pb2 import (
    AnswerReading,
    ChoiceDelta,
    ReasoningOptions,
    RenderResponse,
    ServedModel,
    ToolChoice,
)
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
    ToolRoundsError,
    UnauthenticatedError,
    UnavailableError,
)
from millstream_client.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    ReasoningPiece,
    TextPiece,
    ToolCall,
)
from millstream_client.functions import Function
from millstream_client.media import Image, Video
from millstream_client.request import NO_RETRY, Retry
from millstream_client.requests import MediaMessage, assistant, system, tool_result, user
from millstream_client.results import Embeddings, GeneratedFile, GeneratedMedia
from millstream_client.streams import AnswerStream, MediaStream
from millstream_client.sync_client import SyncClient, SyncConversation
from millstream_client.sync_streams import SyncAnswerStream, SyncMediaStream, SyncToolRun
from millstream_client.tool_calls import ToolLimits, ToolResult
from millstream_client.tool_run import ToolRun
from millstream_client.transport import Options, Tls

__all__ = [
    "NO_RETRY",
    "Answer",
    "AnswerFormatError",
    "AnswerReading",
    "AnswerStream",
    "CallArguments",
    "CallEnded",
    "CallStarted",
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
    "Function",
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
    "ReasoningOptions",
    "ReasoningPiece",
    "RenderResponse",
    "RequestCancelledError",
    "Retry",
    "SamplingParams",
    "ServedModel",
    "SyncAnswerStream",
    "SyncClient",
    "SyncConversation",
    "SyncMediaStream",
    "SyncToolRun",
    "TextPiece",
    "Tls",
    "ToolCall",
    "ToolChoice",
    "ToolLimits",
    "ToolResult",
    "ToolRoundsError",
    "ToolRun",
    "UnauthenticatedError",
    "UnavailableError",
    "Video",
    "assistant",
    "system",
    "tool_result",
    "user",
]
