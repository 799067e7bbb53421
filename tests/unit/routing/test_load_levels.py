"""Members in order of load."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from millstream_server.routing.prefix.prefixes import LoadLevels


def test_the_least_loaded_of_a_set_is_found() -> None:
    levels = LoadLevels()
    loads = {0: 5000.0, 1: 0.0, 2: 300.0, 3: 3_000_000_000.0}
    for member, load in loads.items():
        levels.set(member, load)
    assert [levels.least(members) for members in (0b1111, 0b1101, 0b1001, 0b1000)] == [1, 2, 0, 3]
    levels.set(1, 400.0)
    assert levels.least(0b1111) == 2
    levels.remove(2)
    assert levels.least(0b1011) == 1
    assert levels.load(1) == 400.0
    with pytest.raises(ValueError, match="no member"):
        levels.least(0b100)


def test_members_with_about_equal_loads_come_in_rotation_from_a_random_one_on() -> None:
    firsts = set()
    for seed in range(20):
        levels = LoadLevels(random.Random(seed))
        for member in range(8):
            levels.set(member, 1000.0 + member)
        found = [levels.least(0b11011011) for _ in range(12)]
        assert Counter(found) == dict.fromkeys((0, 1, 3, 4, 6, 7), 2)
        firsts.add(found[0])
    assert len(firsts) > 2
