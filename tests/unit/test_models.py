"""Which model a request that names none is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.control.engine import Task
from millstream_server.processor.models import ModelNames, Models
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.errors import InvalidRequestError, UnavailableError
from millstream_server.runtime.settings import SettingsError, load

_CHATS, _DIFFUSES = {Task.COMPLETE}, {Task.COMPLETE, Task.GENERATE_TEXT}


@dataclass
class _Router:
    """Says what the workers of each model do; models that aren't in it have none yet."""

    does: dict[str, set[Task]] = field(default_factory=dict)

    def tasks(self, model: str) -> frozenset[Task]:
        return frozenset(self.does.get(model, ()))

    def watch(self, callback: object) -> None:
        pass


def _models(does: dict[str, set[Task]], *more: str, template: bool = True, **names: Any) -> Models:
    text: Any = SimpleNamespace(chat_template=SimpleNamespace(available=template))
    router: Any = _Router(does)
    return Models(dict.fromkeys([*does, *more], text), router, ModelNames(**names))


def test_the_only_model_for_a_task() -> None:
    models = _models({"chats": _CHATS, "vectors": {Task.EMBED}})
    assert [models.default(task) for task in (Task.CHAT, Task.COMPLETE, Task.EMBED)] == [
        *("chats", "chats", "vectors")
    ]
    assert models.default(Task.RERANK) is None


def test_of_several_that_chat_the_first_that_is_no_diffusion_language_model() -> None:
    models = _models({"dllm": _DIFFUSES, "b": _CHATS, "a": _CHATS})
    assert (models.default(Task.CHAT), models.default(Task.COMPLETE)) == ("b", "b")
    assert models.default(Task.GENERATE_TEXT) == "dllm"
    assert models.text("")[0] == "b"


def test_it_stays_the_same_while_its_workers_are_away() -> None:
    assert _models({"b": set(), "a": _CHATS}).default(Task.CHAT) == "b"


def test_of_several_that_do_anything_else_one_must_be_named() -> None:
    models = _models({"b": {Task.EMBED}, "a": {Task.EMBED}})
    with pytest.raises(InvalidRequestError, match="model: name one of b, a"):
        models.name_of("", Task.EMBED)


def test_what_operators_say_wins() -> None:
    does = {"b": _CHATS, "a": _CHATS, "c": {Task.EMBED}, "d": {Task.EMBED}}
    models = _models(does, defaults={Task.CHAT: "a", Task.EMBED: "d"})
    assert [models.default(task) for task in (Task.CHAT, Task.COMPLETE, Task.EMBED)] == [
        *("a", "a", "d")
    ]


def test_a_model_whose_workers_have_not_come_yet_may_do_what_none_is_known_to() -> None:
    models = _models({"chats": _CHATS}, "later")
    assert models.name_of("", Task.EMBED) == "later"


def _settings(*flags: str) -> ProcessorSettings:
    given = ["--models", "a=/a,b=/b", "--workers", "x:1", *flags]
    return load(ProcessorSettings, given, {}, prog="p", description="")


def test_aliases_and_defaults_are_flags_that_may_be_repeated() -> None:
    settings = _settings(
        *("--model-alias", "x=a", "--model-alias", "y=b"),
        *("--default-models", "chat=b,embed=a"),
    )
    assert settings.aliases() == {"x": "a", "y": "b"}
    assert settings.defaults() == {Task.CHAT: "b", Task.EMBED: "a"}


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--model-alias", "x=c", "'x=c' names no model of --models: a, b"),
        ("--model-alias", "a=b", "'a' is a model's own name"),
        ("--model-alias", "x=a,x=b", "'x' is there twice"),
        ("--model-alias", "x", "'x' lacks one side"),
        ("--default-models", "talk=a", "'talk' is none of chat, complete, embed, rerank"),
    ],
)
def test_names_that_mean_nothing_end_the_start(flag: str, value: str, why: str) -> None:
    settings = _settings(flag, value)
    with pytest.raises(SettingsError, match=why):
        (settings.aliases if flag == "--model-alias" else settings.defaults)()


def test_a_model_whose_files_cant_be_read_is_nobodys_default() -> None:
    text: Any = SimpleNamespace(chat_template=SimpleNamespace(available=True))
    router: Any = _Router({"good": _CHATS, "broken": _CHATS})
    models = Models({"broken": None, "good": text}, router, broken={"broken"})
    assert models.default(Task.CHAT) == "good"
    assert models.default(Task.GENERATE_IMAGE) is None
    assert models.text("") == ("good", text)
    for call in (lambda: models.text("broken"), lambda: models.name_of("broken", Task.CHAT)):
        with pytest.raises(UnavailableError, match="the files of 'broken' can't be read here"):
            call()
