"""The words of the probes fit together: every template can be filled, and filler cannot answer."""

from __future__ import annotations

import re
import string

import pytest

from kvblend.engine.evaluation.vocabulary import (
    ALIAS_COLOURS,
    ALIAS_THINGS,
    DOMAINS,
    FILLER,
    FILLER_SLOTS,
    PLACES,
    Domain,
)


def slots(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def test_every_slot_of_the_filler_has_words() -> None:
    assert set().union(*map(slots, FILLER)) == set(FILLER_SLOTS)


def test_filler_and_places_hold_no_digit() -> None:
    words = " ".join([*FILLER, *PLACES, *(word for choices in FILLER_SLOTS.values() for word in choices)])
    assert re.search(r"\d", words) is None


def test_no_name_is_listed_twice() -> None:
    for names in (ALIAS_COLOURS, ALIAS_THINGS, PLACES, FILLER, *FILLER_SLOTS.values()):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.prefix)
def test_a_domain_states_names_and_values_completely(domain: Domain) -> None:
    assert all(slots(template) == {"noun", "code", "alias"} for template in domain.aliases)
    assert all(slots(template) == {"name", "value"} for template in domain.values)
    assert all(domain.ask.removeprefix("the ") in template for template in domain.values)
    assert 100 <= domain.low < domain.high
