"""Prompt lookup: which earlier place foretells what comes next."""

import random

import pytest

from llmctl.engine.schedule.ngram import NgramIndex


def proposed(tokens, count=3, longest=4, shortest=2):
    index = NgramIndex(longest, shortest)
    index.extend(tokens)
    return index.propose(tokens, count)


def test_what_followed_the_same_tokens_before_is_proposed():
    assert proposed([1, 2, 3, 4, 5, 6, 1, 2]) == (3, 4, 5)


def test_tokens_that_stand_nowhere_else_propose_nothing():
    assert proposed([1, 2, 3, 4]) == proposed([1, 2, 3, 9, 2, 4]) == proposed([]) == ()


def test_a_match_shorter_than_the_shortest_does_not_count():
    assert proposed([1, 2, 3, 9, 2], shortest=2) == ()
    assert proposed([1, 2, 3, 9, 2], shortest=1) == (3, 9, 2)


def test_a_longer_match_wins_over_a_more_recent_one():
    assert proposed([1, 2, 3, 7, 7, 2, 3, 8, 8, 1, 2, 3], count=2) == (7, 7)


def test_of_equal_matches_the_most_recent_wins():
    assert proposed([2, 3, 7, 7, 2, 3, 8, 8, 2, 3], count=2) == (8, 8)


def test_a_copy_stays_with_its_source_though_parts_of_it_stood_elsewhere_since():
    source = [10, 11, 12, 13, 14, 15]
    elsewhere = [12, 13, 14, 99, 98]
    tokens = [*source, 20, *elsewhere, 21, 10, 11, 12, 13, 14]
    assert proposed(tokens, count=1, longest=3) == (15,)


def test_a_match_that_reaches_its_own_continuation_goes_on_as_a_period():
    assert proposed([5, 6, 7, 5, 6, 7, 5], count=7, longest=1, shortest=1) == (6, 7, 5, 6, 7, 5, 6)
    assert proposed([4, 4, 4], count=5) == (4,) * 5


@pytest.mark.parametrize("bounds", [(4, 2), (3, 3), (2, 1), (5, 1)])
def test_tokens_taken_in_one_by_one_or_at_once_propose_the_same_and_match_a_plain_search(bounds):
    longest, shortest = bounds
    rng = random.Random(3)
    tokens = [rng.randrange(5) for _ in range(300)]
    growing = NgramIndex(longest, shortest)
    for end in range(1, len(tokens) + 1):
        known = tokens[:end]
        growing.extend(known)
        found = growing.propose(known, 1)
        assert found == proposed(known, 1, longest, shortest)
        best = longest_match(known, longest)
        assert bool(found) == (best >= shortest)
        if found:
            assert [*known[len(known) - best :], *found] in windows(known, best + 1)


def longest_match(tokens, longest):
    sizes = [n for n in range(1, min(longest, len(tokens) - 1) + 1) if tokens[-n:] in windows(tokens[:-1], n)]
    return max(sizes, default=0)


def windows(tokens, size):
    return [tokens[place : place + size] for place in range(len(tokens) - size + 1)]
