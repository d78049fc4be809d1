"""How long drafts are: what stands lengthens them, what costs shortens them, failures pause them."""

import random

from llmctl.engine.schedule.draft_length import MAX_PAUSE, DraftLength, best_length


def test_a_guess_that_never_fails_is_worth_the_longest_draft_unless_it_costs_a_step():
    assert best_length(1.0, 0.5, 5) == 5
    assert best_length(1.0, 1.1, 5) == 0


def test_the_best_length_gives_the_most_tokens_in_a_time():
    for rate, cost in ((0.7, 0.1), (0.7, 0.4), (0.9, 0.2), (0.3, 0.2), (0.1, 0.3)):
        gains = [sum(rate**place for place in range(length + 1)) / (1 + cost * length) for length in range(9)]
        assert gains[best_length(rate, cost, 8)] == max(gains)


def test_guesses_that_cost_nothing_double_while_all_stand():
    draft, lengths = DraftLength(8, 0.0), []
    for _ in range(4):
        lengths.append(draft.allowed)
        draft.learn(draft.allowed, draft.allowed)
    assert lengths == [2, 4, 8, 8]


def drafts_of(rate: float, cost: float, steps: int = 400) -> list[int]:
    """The lengths of the drafts of a sequence whose guesses stand with this chance, 0 for steps without."""
    draft, rng, lengths = DraftLength(6, cost), random.Random(3), []
    for _ in range(steps):
        length = draft.allowed
        lengths.append(length)
        if not length:
            draft.rest()
            continue
        accepted = next((place for place in range(length) if rng.random() >= rate), length)
        draft.learn(length, accepted)
    return lengths


def test_better_guesses_make_longer_drafts_and_dearer_ones_shorter():
    good, fair, dear = (drafts_of(*case)[100:] for case in ((0.95, 0.2), (0.6, 0.2), (0.6, 0.45)))
    assert sum(good) / len(good) > 4 > sum(fair) / len(fair) > sum(dear) / len(dear)


def test_guesses_that_rarely_stand_are_tried_ever_less_though_some_stand():
    lengths = drafts_of(0.1, 0.4)
    assert max(lengths) <= 2
    late = lengths[200:]
    assert 0 < sum(map(bool, late)) <= 3 * len(late) / MAX_PAUSE


def test_guesses_that_cost_nothing_and_rarely_stand_are_left_alone_too():
    late = drafts_of(0.06, 0.0, 2000)[1000:]
    assert 0 < sum(map(bool, late)) < 0.25 * len(late)


def test_guesses_of_which_half_stand_are_kept_up_though_some_drafts_fail():
    assert sum(map(bool, drafts_of(0.5, 0.1))) > 0.9 * 400


def test_guesses_that_become_good_are_found_out():
    draft = DraftLength(6, 0.3)
    for _ in range(100):
        if draft.allowed:
            draft.learn(draft.allowed, 0)
        else:
            draft.rest()
    tries = []
    for _ in range(100):
        tries.append(draft.allowed)
        if draft.allowed:
            draft.learn(draft.allowed, draft.allowed)
        else:
            draft.rest()
    assert tries[-1] == 6
