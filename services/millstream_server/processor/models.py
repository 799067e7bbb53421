"""Which model a request is for, what it can do, and its workers' limits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import EngineInfo, Role, Task
from millstream_server.formats.choosing import AnswerFormat, choose
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.media.items import Modality
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    UnavailableError,
)

_NO_FORMATS: Mapping[str, str] = {}
_DOES = {
    Task.CHAT: "chats",
    Task.COMPLETE: "continues texts",
    Task.EMBED: "embeds texts",
    Task.RERANK: "ranks documents",
    Task.GENERATE_IMAGE: "makes images",
    Task.GENERATE_VIDEO: "makes videos",
    Task.GENERATE_TEXT: "makes text of token ids",
}
_CHATTING = frozenset({Task.CHAT, Task.COMPLETE})
"""Both are refused the same way: a model without a template says itself that Chat needs one."""
_WITHOUT_TEXT = frozenset({Task.GENERATE_IMAGE, Task.GENERATE_VIDEO, Task.GENERATE_TEXT})
"""These need no tokenizer here."""
_UNGUESSED = frozenset({Task.EMBED, Task.RERANK, Task.GENERATE_TEXT})
"""Any model with a tokenizer may do these, as long as none of its workers has been seen."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model: its text handling and its workers' current limits."""

    name: str
    text: TextModel
    engine: GeneratorInfo
    defaults: Mapping[str, Any]
    """The model's own sampling parameters, without those that its engine refuses."""
    modalities: frozenset[Modality] = frozenset()
    """Media that a prompt may have now."""
    answer_format: AnswerFormat | None = None
    """How it writes reasoning and tool calls; None: not known."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model as `ListModels` shows it."""

    name: str
    text: TextModel | None
    """None: no directory was given, as for models that make images or videos."""
    ready: bool
    """Whether it has a worker of every role it needs."""
    engine: GeneratorInfo | None
    workers: Mapping[Role, int]
    """Connected workers by role."""
    modalities: frozenset[Modality] = frozenset()
    """Media that its prompts may have now."""
    tasks: frozenset[Task] = frozenset()
    """What it can do now."""
    answer_format: AnswerFormat | None = None
    others: Sequence[EngineInfo] = ()
    """Infos of its workers for images, videos, vectors and scores."""
    aliases: Sequence[str] = ()
    """Other names that requests may use."""
    default_of: frozenset[Task] = frozenset()
    """Tasks whose requests go to it if they name no model."""


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What operators say of the models' names."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names, and the model of each."""
    defaults: Mapping[Task, str] = field(default_factory=dict)
    """The model of requests that name none, where `Models.default` shall not find it."""


class Models:
    """All models of a Processor."""

    def __init__(
        self,
        texts: Mapping[str, TextModel | None],
        router: Router,
        names: ModelNames | None = None,
        formats: Mapping[str, str] = _NO_FORMATS,
        broken: Collection[str] = (),
    ) -> None:
        """Serve ``texts``, by model name, on the workers of ``router``; None: without text.

        ``formats`` has the formats that were set, by model; the files of ``broken`` ones can't be
        read, and their requests fail.
        """
        self._texts = texts
        self._broken = broken
        self._router = router
        self._given = names or ModelNames()
        self._formats = formats
        self._served: dict[tuple[str, Task], ServedModel] = {}
        """Cache, emptied when a worker is added, removed or changed; has only names of ours."""
        router.watch(self._served.clear)

    @property
    def names(self) -> Sequence[str]:
        return sorted(self._texts)

    def name_of(self, name: str, task: Task, field: str = "model") -> str:
        """Return the model of a request, whose name may be an alias; empty: the task's default.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and there is no default; or the model's workers
            do something else.
        """
        if not name:
            found = self.default(task)
            if found is None:
                raise InvalidRequestError.of(field, _which(self._able(task), task))
            name = found
        name = self.known(name)
        self._check(name, task, field)
        return name

    def default(self, task: Task) -> str | None:
        """Return the model of requests that name none; None: several could do it, or none can.

        It is the one that the settings name, else the only one for the task, else, for chats and
        texts to continue, the first one in the settings that isn't a diffusion language model. It
        stays the same while its workers are away.
        """
        given, router = self._given.defaults, self._router
        chosen = given.get(task) or (given.get(Task.CHAT) if task is Task.COMPLETE else None)
        if chosen is not None:
            return chosen
        able = self._able(task)
        if len(able) > 1 and task in _CHATTING:
            chats = [name for name in able if Task.CHAT in self._probable(name)] or able
            able = [name for name in chats if Task.GENERATE_TEXT not in router.tasks(name)][:1]
        return able[0] if len(able) == 1 else None

    def _doing(self, task: Task) -> list[str]:
        """Return the models that probably do a task, in the order of the settings."""
        router = self._router
        return [n for n in self._texts if task in self._probable(n) | router.tasks(n)]

    def _able(self, task: Task) -> list[str]:
        """Return the models that do a task or, if none is known to, those that may yet."""
        able = self._doing(task)
        if not able and task is Task.CHAT:  # they say themselves that they lack a template
            return self._doing(Task.COMPLETE)
        if not able and task in _UNGUESSED:
            return [name for name, text in self._texts.items() if text and not self._does(name)]
        return able

    def known(self, name: str) -> str:
        """Return the model of a name or an alias.

        Raises:
            ModelNotFoundError: it isn't served here.
            UnavailableError: its files can't be read.
        """
        name = self._given.aliases.get(name, name)
        if name not in self._texts:
            raise not_served(name)
        if name in self._broken:
            raise UnavailableError(
                f"the files of {name!r} can't be read here; the log of the Processor says why"
            )
        return name

    def _probable(self, name: str) -> frozenset[Task]:
        """Return what a model does or, before a worker has said it, what its files suggest."""
        if name in self._broken:
            return frozenset()
        if known := self._does(name):
            return known
        text = self._texts[name]
        if text is None:
            return frozenset({Task.GENERATE_IMAGE, Task.GENERATE_VIDEO})
        if text.chat_template.available:
            return _CHATTING
        return frozenset({Task.COMPLETE, Task.EMBED, Task.RERANK})

    def _check(self, name: str, task: Task, field: str) -> None:
        """Refuse a model whose workers do something else; without any, a worker may yet come.

        Raises:
            InvalidRequestError: they do.
        """
        wanted = _CHATTING if task in _CHATTING else {task}
        lacks_text = self._texts[name] is None and task not in _WITHOUT_TEXT
        if lacks_text and wanted & self._router.tasks(name):
            sentence = "has no tokenizer here: start the Processor with --models NAME=DIR"
            raise InvalidRequestError.of(field, f"{name!r} {sentence}")
        does = self._does(name)
        if does and not wanted & does:
            raise InvalidRequestError.of(field, f"{name!r} {self._instead(does, task)}")

    def _instead(self, does: frozenset[Task], task: Task) -> str:
        """Say what a model does, and which one does the task that it was asked for."""
        done = " and ".join(_DOES[each] for each in Task if each in does)
        return f"{done}; {_which(self._doing(task), task)}"

    def _does(self, name: str) -> frozenset[Task]:
        """Return what a model does, as far as its workers have said; empty before any has."""
        tasks = self._router.tasks(name)
        text = self._texts[name]
        if text is None:
            return frozenset() if name in self._broken else tasks & _WITHOUT_TEXT
        if Task.COMPLETE in tasks and text.chat_template.available:
            return tasks | {Task.CHAT}
        return tasks

    def text(self, name: str, field: str = "model") -> tuple[str, TextModel]:
        """Look up a model's text handling; an empty name means the default for chats.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and there is no default; or the model has no
            tokenizer here.
        """
        if not name:
            with_text = [name for name, text in self._texts.items() if text]
            name = self.default(Task.CHAT) or (with_text[0] if len(with_text) == 1 else "")
            if not name:
                listed = ", ".join(with_text)
                why = f"name one of {listed}" if listed else "no model here has a tokenizer"
                raise InvalidRequestError.of(field, why)
        name = self.known(name)
        text = self._texts[name]
        if text is None:
            raise InvalidRequestError.of(field, f"{name!r} has no tokenizer here")
        return name, text

    def served(self, name: str, field: str = "model", task: Task = Task.CHAT) -> ServedModel:
        """Look up a model with connected workers.

        Raises:
            NoWorkerError: none of its workers is connected.
            InvalidRequestError: it does something else.
        """
        found = self._served.get((name, task))
        if found is None:
            found = self._served[name, task] = self._find(name, field, task)
        return found

    def _find(self, name: str, field: str, task: Task) -> ServedModel:
        name = self.name_of(name, task, field)
        text = self._texts[name]
        workers = self._router.of(name)
        engine = workers.limits
        if engine is None or text is None:
            self._router.require(name)
            raise NoWorkerError(
                "no worker of this model is in service; retry in a moment", retry_delay_s=1.0
            )
        defaults = text.generation_defaults.given(engine.refused_fields)
        return ServedModel(
            name,
            text,
            engine,
            defaults,
            self._modalities(name),
            self.answer_format(name, text),
        )

    def answer_format(self, name: str, text: TextModel, given: str = "") -> AnswerFormat | None:
        """Return the format that is ``given``, else a model's own; None: it isn't known."""
        engine = self._router.of(name).limits
        return choose(
            given=given or self._formats.get(name, ""),
            response_template=text.response_template,
            encoded=text.answers,
            told_calls=engine.tool_call_parser if engine else "",
            told_reasoning=engine.reasoning_parser if engine else "",
            template=text.chat_template.source,
            has_token=text.has_token,
            special_tokens=text.special_tokens,
        )

    def status(self) -> list[ModelStatus]:
        """Return what ListModels shows of each model, by name."""
        defaults = {task: self.default(task) for task in Task}
        aliases = self._given.aliases.items()
        return [
            ModelStatus(
                name,
                text,
                self._router.ready(name) and name not in self._broken,
                self._router.of(name).limits,
                self._router.connected(name),
                self._modalities(name),
                self._does(name) if self._router.ready(name) else frozenset(),
                self.answer_format(name, text) if text else None,
                self._router.task_workers(name).infos,
                sorted(alias for alias, model in aliases if model == name),
                frozenset(task for task in self._probable(name) if defaults[task] == name),
            )
            for name, text in sorted(self._texts.items())
        ]

    def _modalities(self, name: str) -> frozenset[Modality]:
        text = self._texts[name]
        family = text.family if text else None
        return self._router.of(name).modalities & family.modalities if family else frozenset()

    def ready(self) -> bool:
        return all(self._router.ready(name) for name in self._texts if name not in self._broken)


def not_served(name: str) -> ModelNotFoundError:
    """Make the error of a name that is no model's."""
    sentence = f"model {name[:64]!r} is not served here; ListModels names those that are"
    return ModelNotFoundError(sentence)


def _which(able: Sequence[str], task: Task) -> str:
    return f"name one of {', '.join(able)}" if able else f"no model here {_DOES[task]}"
