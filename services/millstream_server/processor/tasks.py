"""What a model can do, and the refusal of what it can't."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.tasks import Task
from millstream_server.runtime.errors import InvalidRequestError, ModelNotFoundError

_DOES = {
    Task.CHAT: "chats",
    Task.COMPLETE: "continues texts",
    Task.EMBED: "embeds texts",
    Task.RERANK: "ranks documents",
    Task.GENERATE_IMAGE: "makes images",
    Task.GENERATE_VIDEO: "makes videos",
    Task.GENERATE_TEXT: "makes text of token ids",
}
_TEXT_TASKS = frozenset({Task.CHAT, Task.COMPLETE})
"""Both are refused the same way: a model without a template says itself that Chat needs one."""


_WITHOUT_TEXT = frozenset({Task.GENERATE_IMAGE, Task.GENERATE_VIDEO, Task.GENERATE_TEXT})
"""These need no tokenizer here."""


class ModelTasks:
    """Says which model a request is for, and refuses one that the model can't run."""

    def __init__(
        self,
        texts: Mapping[str, TextModel | None],
        of_workers: Callable[[str], frozenset[Task]],
    ) -> None:
        """``texts`` has every served model; ``of_workers`` says what a model's workers do."""
        self._texts = texts
        self._of_workers = of_workers

    def now(self, name: str) -> frozenset[Task]:
        """Return what a model does, as far as its workers have said; empty before any has."""
        tasks = self._of_workers(name)
        text = self._texts[name]
        if text is None:
            return tasks & _WITHOUT_TEXT
        if Task.COMPLETE in tasks and text.chat_template.available:
            return tasks | {Task.CHAT}
        return tasks

    def find(self, name: str, task: Task, field: str) -> str:
        """Return the model of a request; an empty name means the only one for this task.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and several models, or none, may do this; or
            the model's workers do something else.
        """
        if not name:
            return self._only(task, field)
        self.require(name)
        self._check(name, task, field)
        return name

    def require(self, name: str) -> None:
        """Check that a model is served.

        Raises:
            ModelNotFoundError: it isn't.
        """
        if name not in self._texts:
            raise ModelNotFoundError(
                f"model {name[:64]!r} is not served here; ListModels names those that are"
            )

    def _only(self, task: Task, field: str) -> str:
        if len(self._texts) == 1:
            (name,) = self._texts
            self._check(name, task, field)
            return name
        able = sorted(name for name in self._texts if task in self._probable(name))
        if len(able) == 1:
            return able[0]
        if not able:
            raise InvalidRequestError.of(field, f"no model here {_DOES[task]}")
        raise InvalidRequestError.of(field, f"name one of {able}")

    def _probable(self, name: str) -> frozenset[Task]:
        """Return what a model does or, before a worker has said it, what its files suggest."""
        if known := self.now(name):
            return known
        text = self._texts[name]
        if text is None:
            return frozenset({Task.GENERATE_IMAGE, Task.GENERATE_VIDEO})
        if text.chat_template.available:
            return _TEXT_TASKS
        return frozenset({Task.COMPLETE, Task.EMBED, Task.RERANK})

    def _check(self, name: str, task: Task, field: str) -> None:
        """Refuse a model whose workers do something else; without any, a worker may yet come.

        Raises:
            InvalidRequestError: they do.
        """
        wanted = _TEXT_TASKS if task in _TEXT_TASKS else {task}
        lacks_text = self._texts[name] is None and task not in _WITHOUT_TEXT
        if lacks_text and wanted & self._of_workers(name):
            sentence = "has no tokenizer here: start the Processor with --models NAME=DIR"
            raise InvalidRequestError.of(field, f"{name!r} {sentence}")
        does = self.now(name)
        if does and not wanted & does:
            raise InvalidRequestError.of(field, f"{name!r} {_instead(does)}")


def _instead(does: frozenset[Task]) -> str:
    """Say what a model does, and by which RPC."""
    parts = [f"{_DOES[task]}: use {task.value}" for task in Task if task in does]
    return "; ".join(parts)
