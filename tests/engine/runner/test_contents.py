"""What a follower's blocks hold: found again by their tokens, never taken for what they are not."""

import random

from llmctl.engine.runner.contents import Contents


def test_what_was_computed_is_found_as_far_as_the_tokens_agree():
    contents = Contents(4)
    contents.note([7, 2, 5], 0, list(range(10)))
    assert contents.found([7, 2, 5], list(range(12))) == 10
    assert contents.found([7, 2, 5], [0, 1, 2, 3, 4, 99, 6, 7]) == 5
    assert contents.found([7, 2, 9], list(range(12))) == 8


def test_a_block_does_not_count_after_other_tokens_than_it_was_computed_after():
    contents = Contents(4)
    contents.note([0, 1], 0, [1, 2, 3, 4, 5, 6, 7, 8])
    contents.note([2, 3], 0, [9, 2, 3, 4, 5, 6, 7, 8])
    assert contents.found([2, 1], [9, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_what_is_written_again_replaces_what_was_there():
    contents = Contents(4)
    contents.note([0, 1], 0, [1, 2, 3, 4, 5, 6])
    contents.note([0, 1], 5, [1, 2, 3, 4, 5, 9, 9])
    assert contents.found([0, 1], [1, 2, 3, 4, 5, 6]) == 5
    contents.note([1], 0, [4, 4])
    assert contents.found([0, 1], [1, 2, 3, 4, 5, 9, 9]) == 4


def test_found_agrees_with_an_arena_written_token_by_token():
    """Blocks change hands at random; each position of the arena remembers all the tokens up to its own."""
    rng, size = random.Random(2), 4
    contents, arena = Contents(size), {}
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        blocks = rng.sample(range(6), -(-len(tokens) // size))
        found = contents.found(blocks, tokens)
        for place in range(found):
            assert arena[blocks[place // size], place % size] == tokens[: place + 1]
        for place in range(found, len(tokens)):
            arena[blocks[place // size], place % size] = tokens[: place + 1]
        contents.note(blocks, found, tokens)
        assert contents.found(blocks, tokens) == len(tokens)
