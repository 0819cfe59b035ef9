from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.store.eviction import POLICIES, EvictionPolicy, LeastWorth, make_policy, round_worth


def fill(policy: EvictionPolicy, *items: tuple[bytes, int, float]) -> None:
    for digest, num_bytes, cost_s in items:
        policy.add(digest, num_bytes, cost_s)


def drain(policy: EvictionPolicy) -> list[bytes]:
    gone = []
    while (digest := policy.pop()) is not None:
        gone.append(digest)
    return gone


def test_lru_goes_by_the_last_use() -> None:
    policy = make_policy("lru")
    fill(policy, (b"a", 1, 9.0), (b"b", 100, 0.0), (b"c", 1, 0.0))
    policy.use(b"a")
    assert drain(policy) == [b"b", b"c", b"a"]


def test_cost_goes_by_cost_per_byte() -> None:
    policy = make_policy("cost")
    fill(policy, (b"dear", 10, 5.0), (b"large", 1000, 5.0), (b"cheap", 10, 1.0))
    assert drain(policy) == [b"large", b"cheap", b"dear"]


def test_cost_goes_by_the_number_of_uses() -> None:
    policy = make_policy("cost")
    fill(policy, (b"a", 10, 1.0), (b"b", 10, 1.5))
    policy.use(b"a")
    assert drain(policy) == [b"b", b"a"]


def test_cost_takes_past_uses_into_account() -> None:
    policy = make_policy("cost")
    policy.add(b"a", 10, 1.0, hits=5)
    policy.add(b"b", 10, 2.0)
    assert policy.pop() == b"b"


def test_among_equals_cost_is_lru() -> None:
    policy = make_policy("cost")
    fill(policy, (b"a", 10, 0.0), (b"b", 10, 0.0))
    policy.use(b"a")
    assert policy.pop() == b"b"


def test_what_was_dear_long_ago_gives_way_in_the_end() -> None:
    policy = make_policy("cost")
    policy.add(b"old", 1, 10.0)
    for number in range(1000):
        policy.add(b"%d" % number, 1, 1.0)
        if policy.pop() == b"old":
            return
    pytest.fail("the old item outlived a thousand newer ones")


@pytest.mark.parametrize("name", POLICIES)
def test_held_items_stay(name: str) -> None:
    policy = make_policy(name)
    fill(policy, (b"a", 3, 1.0), (b"b", 4, 1.0))
    policy.hold(b"a")
    policy.use(b"a")
    assert policy.free_bytes == 4
    assert drain(policy) == [b"b"]
    assert b"a" in policy
    policy.free(b"a")
    assert drain(policy) == [b"a"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_demoted_item_goes_first_unless_it_is_used(name: str) -> None:
    for used in (False, True):
        policy = make_policy(name)
        fill(policy, (b"a", 1, 1.0), (b"b", 1, 9.0), (b"c", 1, 9.0))
        policy.demote(b"c")
        if used:
            policy.use(b"c")
        assert drain(policy) == ([b"a", b"b", b"c"] if used else [b"c", b"a", b"b"])


@pytest.mark.parametrize("name", POLICIES)
def test_discarded_items_do_not_come_up(name: str) -> None:
    policy = make_policy(name)
    fill(policy, (b"a", 3, 1.0), (b"b", 4, 1.0))
    policy.discard(b"a")
    policy.discard(b"a")
    assert (len(policy), policy.free_bytes, b"a" in policy) == (1, 4, False)
    assert drain(policy) == [b"b"]


@pytest.mark.parametrize("name", POLICIES)
def test_unknown_items_do_not_matter(name: str) -> None:
    policy = make_policy(name)
    for method in (policy.use, policy.demote, policy.hold, policy.free, policy.discard):
        method(b"x")
    assert (len(policy), policy.free_bytes, policy.pop()) == (0, 0, None)


@pytest.mark.parametrize("name", POLICIES)
def test_filling_is_adding_one_after_another(name: str) -> None:
    items = [(b"%d" % number, 1 + number % 3, float(number % 5), number % 2) for number in range(50)]
    one, other = make_policy(name), make_policy(name)
    one.fill(items)
    for item in items:
        other.add(*item)
    assert (len(one), one.free_bytes) == (len(other), other.free_bytes)
    assert drain(one) == drain(other)


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="policy is 'fifo'; choose lru, cost"):
        make_policy("fifo")


def test_what_an_eviction_searches_does_not_grow_with_the_items() -> None:
    """The heap is all that is not constant time, and it is over worths: few, and as few for ten times the items."""
    sizes = []
    for count in (1_000, 10_000):
        policy, source = LeastWorth(), random.Random(1)
        for number in range(count):
            policy.add(b"%d" % number, 4096, source.uniform(0.1, 1.0))
            policy.use(b"%d" % source.randrange(number + 1))
        sizes.append(len(policy._calls))
    assert sizes[1] <= 2 * sizes[0] < 200


def test_uses_leave_nothing_behind() -> None:
    policy = LeastWorth()
    for number in range(20):
        policy.add(b"%d" % number, 1, 1.0)
    for _ in range(1_000):
        policy.use(b"0")
    drain(policy)
    assert not policy._lines
    assert not policy._calls


@given(st.floats(2.0**-64, 2.0**64, exclude_max=True))
def test_a_worth_loses_a_ninth_at_most(worth: float) -> None:
    assert 8 / 9 * worth < round_worth(worth) <= worth


def test_worths_are_few() -> None:
    assert len({round_worth(2.0 ** (number / 1000)) for number in range(-70_000, 70_000)}) == 1026


@pytest.mark.parametrize("worth", [0.0, -1.0, math.nan, 2.0**-65])
def test_what_is_worth_next_to_nothing_counts_as_nothing(worth: float) -> None:
    assert round_worth(worth) == 0.0


def test_there_is_a_highest_worth() -> None:
    assert round_worth(math.inf) == round_worth(2.0**64) == 2.0**64


def rounded(worth: float) -> float:
    """`round_worth` by its definition: the highest of an octave's eight steps that is not above."""
    if worth == 0:
        return 0.0
    octave = 2.0 ** math.floor(math.log2(worth))
    return max(octave * (1 + step / 8) for step in range(8) if octave * (1 + step / 8) <= worth)


class Naive:
    """Both policies as one looks for the victim among all items."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: dict[bytes, tuple[int, float, int]] = {}
        self.places: dict[bytes, tuple[float, int]] = {}
        self.age, self.time = 0.0, 0

    def place(self, digest: bytes) -> None:
        size, cost, uses = self.items[digest]
        self.time += 1
        worth = self.age + rounded(uses * cost / size) if self.name == "cost" else 0.0
        self.places[digest] = (worth, self.time)

    def do(self, step: str, digest: bytes, size: int, cost: float) -> bytes | None:
        if step == "add":
            self.items[digest] = (size, cost, 1)
            self.place(digest)
        elif step == "pop":
            if not self.places:
                return None
            victim = min(self.places, key=lambda one: self.places[one])
            self.age = max(self.age, self.places.pop(victim)[0])
            del self.items[victim]
            return victim
        elif digest in self.items:
            if step == "use":
                known = self.items[digest]
                self.items[digest] = (known[0], known[1], known[2] + 1)
                if digest in self.places:
                    self.place(digest)
            elif step == "demote" and digest in self.places:
                self.time += 1
                self.places[digest] = (-1.0, self.time if self.name == "cost" else -self.time)
            elif step == "hold":
                self.places.pop(digest, None)
            elif step == "free" and digest not in self.places:
                self.place(digest)
            elif step == "discard":
                self.places.pop(digest, None)
                del self.items[digest]
        return None


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "use", "demote", "hold", "free", "discard", "pop", "pop"]),
        st.integers(0, 9),
        st.integers(1, 8),
        st.integers(0, 4),
    ),
    max_size=80,
)


@pytest.mark.parametrize("name", POLICIES)
@given(steps=steps)
def test_each_policy_chooses_as_its_naive_form(name: str, steps: list[tuple[str, int, int, int]]) -> None:
    policy, naive = make_policy(name), Naive(name)
    for step, number, size, cost in steps:
        digest = b"%d" % number
        expected = naive.do(step, digest, size, float(cost))
        if step == "add":
            policy.add(digest, size, float(cost))
        elif step == "pop":
            assert policy.pop() == expected
        else:
            getattr(policy, step)(digest)
        assert len(policy) == len(naive.items)
        assert policy.free_bytes == sum(naive.items[one][0] for one in naive.places)
