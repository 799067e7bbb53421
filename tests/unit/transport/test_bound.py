"""Above a bound the connection of the caller that holds most pays, and nobody else."""

from __future__ import annotations

from millstream_server.runtime.transport.limits.bounds import Bound


class Connection:
    def __init__(self, caller_key: str) -> None:
        self.caller_key = caller_key


class Held:
    """Connections that shed 10 at a time."""

    def __init__(self, most: int) -> None:
        self.shed: list[Connection] = []
        self.bound: Bound = Bound(most, self._shed)

    def _shed(self, connection: Connection) -> bool:
        if not self.bound.of(connection):
            return False
        self.shed.append(connection)
        self.bound.remove(connection, min(10, self.bound.of(connection)))
        return True


def test_below_the_bound_nobody_pays() -> None:
    held, one = Held(100), Connection("a")
    held.bound.add(one, 100)
    assert (held.shed, held.bound.used) == ([], 100)


def test_the_caller_that_holds_most_pays_until_there_is_room() -> None:
    held, greedy, modest = Held(100), Connection("greedy"), Connection("modest")
    held.bound.add(greedy, 80)
    held.bound.add(modest, 21)  # the one that comes last isn't the one that pays
    assert held.shed == [greedy]
    assert (held.bound.of(greedy), held.bound.of(modest), held.bound.used) == (70, 21, 91)


def test_connections_of_one_caller_count_together() -> None:
    held, modest = Held(100), Connection("modest")
    several = [Connection("greedy") for _ in range(4)]
    held.bound.add(modest, 30)
    for amount, connection in zip((15, 25, 20, 15), several, strict=True):
        held.bound.add(connection, amount)
    assert held.shed == [several[1]]
    assert held.bound.of(modest) == 30


def test_alone_the_caller_pays_itself_and_what_was_given_back_is_forgotten() -> None:
    held, one = Held(50), Connection("a")
    held.bound.add(one, 60)
    assert (held.shed, held.bound.used) == ([one, one], 40)
    held.bound.remove(one, 40)
    assert (held.bound.used, held.bound.of(one)) == (0, 0)
    assert not held.bound._held


def test_nothing_to_shed_ends_the_search() -> None:
    bound: Bound = Bound(10, lambda _: False)
    bound.add(Connection("a"), 11)
    assert bound.used == 11


def test_without_relief_only_what_is_too_much_is_shed() -> None:
    shed: list[Connection] = []
    one = Connection("a")

    def shed_one(connection: Connection) -> bool:
        shed.append(connection)
        bound.remove(connection, 1)
        return True

    bound: Bound = Bound(4, shed_one, relief=1.0)
    for _ in range(6):
        bound.add(one, 1)
    assert (len(shed), bound.used) == (2, 4)
