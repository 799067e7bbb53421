"""How an answer goes on at another server when its own is lost in the middle of it."""

from __future__ import annotations

from millstream.v1 import processor_pb2
from millstream_client.answers import Answer


def can_go_on(start: processor_pb2.ChatStart, answer: Answer) -> bool:
    """Return whether a Chat can go on behind what has come as if nothing had happened.

    Not with a bound on reasoning, nor with tools that must be called or whose schemas must be kept:
    the server makes a grammar of them, which begins anew.
    """
    choice = start.tool_choice.mode
    has_grammar = (
        start.reasoning.HasField("max_tokens")
        or choice == processor_pb2.TOOL_CHOICE_MODE_REQUIRED
        or bool(start.tool_choice.name)
        or any(tool.strict for tool in start.tools)
    )
    return not has_grammar and _can_go_on(start.options, answer)


def _can_go_on(options: processor_pb2.GenerationOptions, answer: Answer) -> bool:
    """Return whether a request's options allow it.

    Not several choices, of which one may have ended; not logprobs, penalties, a grammar or stop
    strings, which begin anew in a new request; not tool calls, of which the last one may be cut
    anywhere. And some of the budget must be left: else only the lost server knows how the answer
    ended.
    """
    sampling = options.sampling
    penalized = (
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty not in (0, 1)
    )
    begins_anew = (
        options.n > 1
        or options.HasField("logprobs")
        or options.stop
        or sampling.HasField("constraint")
        or penalized
        or answer.tool_calls
    )
    return not begins_anew and _left(sampling.max_new_tokens, answer) > 0


def can_go_on_with(request: processor_pb2.CompleteRequest, answer: Answer) -> bool:
    """Return whether a completion can be continued; of token ids it takes those that came."""
    has_what_came = request.WhichOneof("prompt") == "text" or request.options.return_token_ids
    return bool(has_what_came) and _can_go_on(request.options, answer)


def go_on(start: processor_pb2.ChatStart, answer: Answer) -> None:
    """Change a Chat's start to go on with an answer behind what has come; the answer notes it."""
    start.messages.append(answer.to_message())
    start.continue_final_message = True
    _use(start.options, answer)


def go_on_with(request: processor_pb2.CompleteRequest, answer: Answer) -> None:
    """Do the same with a completion: exactly where prompt and answer are token ids."""
    if request.WhichOneof("prompt") == "text":
        request.text += answer.text
    else:
        request.token_ids.ids.extend(answer.choices[0].token_ids)
    _use(request.options, answer)


def _use(options: processor_pb2.GenerationOptions, answer: Answer) -> None:
    """Take the tokens that have come from the budgets."""
    sampling, used = options.sampling, answer.choices[0].token_count
    if answer.resumed_after[-1:] != [used]:  # else the attempt before has brought nothing
        answer.resumed_after.append(used)
    if sampling.max_new_tokens:
        sampling.max_new_tokens -= used
    if sampling.min_new_tokens:
        sampling.min_new_tokens = max(0, sampling.min_new_tokens - used)


def _left(max_new_tokens: int, answer: Answer) -> int:
    return (max_new_tokens or 1 << 31) - answer.choices[0].token_count
