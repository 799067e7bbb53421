"""Inputs as trees of a small grammar: drawn, changed, crossed, made larger and smaller.

A grammar has alternatives by symbol. In an alternative

    ⟨name⟩      is one of a symbol; of the alternative's own symbol: it can be nested
    ⟨name*,⟩    is a list of them, here with commas between
    ① ②        are the index of a part of a list or a nest, and the one behind it
    ◎           is how many parts the alternative's first list has
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_SLOT = re.compile(r"⟨(\w+)(?:(\*)([^⟩]*))?⟩")
_INDEX, _NEXT, _COUNT = "①②◎"
_MOST_KIDS = 4
_DEPTH = 7
_PLAIN_CHARS = 300


@dataclass(slots=True)
class Many:
    """A list: its parts come again and again."""

    symbol: str
    between: str
    kids: list[Node]
    times: int

    def copy(self) -> Many:
        return Many(self.symbol, self.between, [kid.copy() for kid in self.kids], self.times)

    @property
    def size(self) -> int:
        rounds, more = divmod(self.times, len(self.kids))
        sizes = [kid.size for kid in self.kids]
        return sum(sizes) * rounds + sum(sizes[:more]) + len(self.between) * (self.times - 1)

    def parts(self) -> list[str]:
        """Return the texts that come in turn; of a list that is short not all do."""
        return [kid.text() for kid in self.kids[: self.times]]

    def text(self) -> str:
        units = self.parts()
        if not any(mark in unit for unit in units for mark in (_INDEX, _NEXT)):
            rounds, more = divmod(self.times, len(units))
            return self.between.join(units * rounds + units[:more])
        return self.between.join(
            _numbered(units[index % len(units)], index) for index in range(self.times)
        )


@dataclass(slots=True)
class Node:
    """An alternative of a symbol, and what stands in its slots; nested ``times`` times."""

    symbol: str
    literals: Sequence[str]
    kids: list[Node | Many]
    own: int | None
    """Which of the kids is of the same symbol."""
    times: int = 1

    def copy(self) -> Node:
        kids = [kid.copy() for kid in self.kids]
        return Node(self.symbol, self.literals, kids, self.own, self.times)

    @property
    def size(self) -> int:
        whole = sum(map(len, self.literals)) + sum(kid.size for kid in self.kids)
        if self.own is None or self.times == 1:
            return whole
        inner = self.kids[self.own].size
        return (whole - inner) * self.times + inner

    def pieces(self) -> tuple[str, str, str]:
        """Return what is before the nested part, that, and what is behind it."""
        texts = [kid.text() for kid in self.kids]
        at = len(texts) if self.own is None else self.own
        made = ["", "", ""]
        for number, literal in enumerate(self.literals):
            made[0 if number <= at else 2] += literal
            if number < len(texts):
                made[1 if number == at else 0 if number < at else 2] += texts[number]
        lists = [kid.times for kid in self.kids if isinstance(kid, Many)]
        count = str(lists[0] if lists else self.times)
        before, inner, behind = [piece.replace(_COUNT, count) for piece in made]
        return before, inner, behind

    def text(self) -> str:
        before, inner, behind = self.pieces()
        if self.times == 1:
            return before + inner + behind
        if not any(mark in before + behind for mark in (_INDEX, _NEXT)):
            return before * self.times + inner + behind * self.times
        indexes = range(self.times)
        begins = [_numbered(before, index) for index in indexes]
        ends = [_numbered(behind, index) for index in reversed(indexes)]
        return "".join([*begins, inner, *ends])


def _numbered(text: str, index: int) -> str:
    return text.replace(_INDEX, str(index)).replace(_NEXT, str(index + 1))


def rendered(tree: Node) -> str:
    """Return the input."""
    return _numbered(tree.text(), 0)


def shown(tree: Node | Many) -> str:
    """Return an input for people: what comes again and again is there once."""
    if tree.size <= _PLAIN_CHARS:
        return tree.text()
    if isinstance(tree, Many):
        units = tree.between.join(map(shown, tree.kids[: tree.times]))
        rounds = tree.times // len(tree.kids)
        return f"⟪{units}{tree.between}⟫ x {rounds} " if rounds > 1 else units
    if tree.own is not None and tree.times > 1:
        before, inner, behind = tree.pieces()
        cut = inner if len(inner) < _PLAIN_CHARS else shown(tree.kids[tree.own])
        return f"⟪{before}⟫ x {tree.times} {cut}⟪{behind}⟫ x {tree.times} "
    texts = [*map(shown, tree.kids), ""]
    lists = [kid.times for kid in tree.kids if isinstance(kid, Many)]
    made = "".join(a + b for a, b in zip(tree.literals, texts, strict=True))
    return made.replace(_COUNT, str(lists[0] if lists else tree.times))


def walk(tree: Node | Many) -> Iterator[Node | Many]:
    """Yield all parts of a tree, itself first."""
    yield tree
    for kid in tree.kids:
        yield from walk(kid)


def repeats(tree: Node) -> list[Node | Many]:
    """Return what of a tree can come more often."""
    return [each for each in walk(tree) if isinstance(each, Many) or each.own is not None]


def resize(tree: Node, part: Node | Many, size: int) -> None:
    """Let a ``part`` of a tree come as often as makes the tree about so large."""
    round_ = len(part.kids) if isinstance(part, Many) else 1
    part.times = round_
    one = tree.size
    part.times = 2 * round_
    each = tree.size - one
    part.times = max(1, round_ * (1 + (size - one) // each)) if each > 0 else 1


@dataclass(slots=True)
class _Alternative:
    literals: Sequence[str]
    slots: Sequence[tuple[str, bool, str]]
    own: int | None
    height: int = 99


@dataclass
class Grammar:
    """Makes trees; the first symbol is the whole."""

    rules: Mapping[str, Sequence[str]]
    _found: dict[str, list[_Alternative]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the rules."""
        self.start = next(iter(self.rules))
        for symbol, texts in self.rules.items():
            self._found[symbol] = [_alternative(symbol, text) for text in texts]
        for _ in self.rules:
            for each in [one for found in self._found.values() for one in found]:
                names = [name for name, _, _ in each.slots]
                each.height = 1 + max([self._height(name) for name in names], default=0)
        assert all(self._height(symbol) < _DEPTH * 2 for symbol in self.rules), "without an end"

    def _height(self, symbol: str) -> int:
        return min(each.height for each in self._found[symbol])

    @property
    def kinds(self) -> int:
        """How many alternatives the whole has."""
        return len(self._found[self.start])

    def draw(
        self, chance: random.Random, symbol: str = "", depth: int = _DEPTH, kind: int | None = None
    ) -> Node:
        """Make a tree; of its own ``kind``, or any."""
        symbol = symbol or self.start
        found = self._found[symbol]
        fits = [each for each in found if each.height <= depth]
        made = found[kind] if kind is not None else chance.choice(fits or [self._least(symbol)])
        kids: list[Node | Many] = []
        for name, is_list, between in made.slots:
            if is_list:
                count = chance.choice((1, 1, 1, 2, 3))
                nodes = [self.draw(chance, name, depth - 1) for _ in range(count)]
                kids.append(Many(name, between, nodes, chance.choice((1, 2, 3, 4, 8)) * count))
            else:
                kids.append(self.draw(chance, name, depth - 1))
        times = 1 if made.own is None else chance.choice((1, 1, 2, 3, 16))
        return Node(symbol, made.literals, kids, made.own, times)

    def _least(self, symbol: str) -> _Alternative:
        return min(self._found[symbol], key=lambda each: each.height)

    def changed(self, tree: Node, others: Sequence[Node], chance: random.Random) -> Node:
        """Return a tree that differs a little, or has a part of another one."""
        tree = tree.copy()
        for _ in range(chance.choice((1, 1, 2, 3))):
            part = chance.choice(list(walk(tree)))
            match chance.randrange(4):
                case 0 if others:
                    self._cross(tree, chance.choice(others), chance)
                case 1 if isinstance(part, Many):
                    self._change_list(part, chance)
                case 2 if found := repeats(tree):
                    one = chance.choice(found)
                    one.times = max(1, int(one.times * chance.choice((0.5, 2, 3, 8))))
                case _:
                    self._redraw(part, chance)
        return tree

    def _change_list(self, part: Many, chance: random.Random) -> None:
        if len(part.kids) > 1 and chance.random() < 0.5:
            part.kids = [chance.choice(part.kids)]
        elif len(part.kids) < _MOST_KIDS:
            part.kids.append(self.draw(chance, part.symbol, 3))
            part.times = max(part.times, len(part.kids))

    def _redraw(self, part: Node | Many, chance: random.Random) -> None:
        if part.kids:
            at = chance.randrange(len(part.kids))
            kid = part.kids[at]
            if isinstance(kid, Node):
                part.kids[at] = self.draw(chance, kid.symbol, chance.choice((2, 3, 4)))

    @staticmethod
    def _cross(tree: Node, other: Node, chance: random.Random) -> None:
        given = {each.symbol: each for each in walk(other) if isinstance(each, Node)}
        places = [
            (part, at)
            for part in walk(tree)
            for at, kid in enumerate(part.kids)
            if isinstance(kid, Node) and kid.symbol in given
        ]
        if places:
            part, at = chance.choice(places)
            part.kids[at] = given[part.kids[at].symbol].copy()

    def smaller(self, tree: Node) -> Iterator[Node]:
        """Yield smaller trees, the much smaller first."""
        for number, part in enumerate(list(walk(tree))):
            options: list[int] = []
            if isinstance(part, Many) or part.own is not None:
                options = sorted({1, part.times // 4, part.times // 2, part.times - 1} - {0})
            for times in options:
                if times < part.times:
                    other = tree.copy()
                    list(walk(other))[number].times = times
                    yield other
            if isinstance(part, Many) and len(part.kids) > 1:
                for one in part.kids:
                    other = tree.copy()
                    found = list(walk(other))[number]
                    assert isinstance(found, Many)
                    found.kids = [one.copy()]
                    yield other
            for at, kid in enumerate(part.kids):
                if isinstance(kid, Node):
                    for less in self._less(kid):
                        other = tree.copy()
                        list(walk(other))[number].kids[at] = less
                        yield other

    def _less(self, kid: Node) -> Iterator[Node]:
        """Yield what may stand in the place of a part: the least, or what is within it."""
        least = self.draw(random.Random(0), kid.symbol, 0)
        if least.size < kid.size:
            yield least
        for each in walk(kid):
            if isinstance(each, Node) and each is not kid and each.symbol == kid.symbol:
                yield each.copy()


def _alternative(symbol: str, text: str) -> _Alternative:
    literals, slots, at = [], [], 0
    for found in _SLOT.finditer(text):
        literals.append(text[at : found.start()])
        slots.append((found[1], bool(found[2]), found[3] or ""))
        at = found.end()
    own = [n for n, (name, is_list, _) in enumerate(slots) if name == symbol and not is_list]
    return _Alternative([*literals, text[at:]], slots, own[0] if own else None)
