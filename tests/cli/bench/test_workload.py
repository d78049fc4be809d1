"""Salts keep prompts apart without changing what else they are."""

from llmctl.cli.bench.workload import SALT_TOKENS, Item, Salter, Workload, form_of

POOL = tuple(range(100, 400))


def salted(salt, count=300, prompt=tuple(range(20))):
    salter = Salter(salt, POOL)
    return [salter.apply(Item(prompt, 5)).prompt for _ in range(count)]


def test_no_two_prompts_of_a_run_begin_alike():
    prompts = salted("a")
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == len(POOL)
    assert all(prompt[SALT_TOKENS:] == tuple(range(SALT_TOKENS, 20)) for prompt in prompts)
    assert all(token in POOL for prompt in prompts for token in prompt[:SALT_TOKENS])


def test_same_salt_repeats_and_another_one_does_not():
    assert salted("a") == salted("a")
    assert not set(salted("a")) & set(salted("b"))


def test_prompts_shorter_than_a_salt_keep_their_length():
    assert [len(prompt) for prompt in salted("a", 5, (1, 2))] == [2] * 5


def test_texts_and_conversations_get_a_number_in_front():
    salter = Salter("a", ())
    one, two = salter.apply(Item("hello", 5)).prompt, salter.apply(Item("hello", 5)).prompt
    assert one != two and one.endswith("] hello") and one.startswith("[")
    talk = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"})
    system, user = salter.apply(Item(talk, 5)).prompt
    assert system["role"] == "system" and system["content"].endswith("] be kind") and user == talk[1]
    assert talk[0]["content"] == "be kind", "the workload itself stays as it is"


def test_empty_salt_changes_nothing():
    item = Item((1, 2, 3), 5)
    assert Salter("", POOL).apply(item) is item


def test_digest_tells_workloads_apart_by_what_they_ask():
    def made(*items, ignore_eos=True, source="x"):
        return Workload("d", source, False, ignore_eos, items)

    one = made(Item((1, 2), 3))
    assert one.digest == made(Item((1, 2), 3), source="y").digest
    assert len({one.digest, made(Item((1, 2), 4)).digest, made(Item((1, 2), 3), ignore_eos=False).digest}) == 3


def test_form_and_ids_of_prompts():
    assert [form_of(p) for p in ("x", (1,), ({"role": "user", "content": "x"},))] == ["text", "ids", "chat"]
    items = (Item((5, 3), 1), Item("x", 1), Item((3, 9), 1))
    assert Workload("d", "", False, True, items).token_ids == (3, 5, 9)
