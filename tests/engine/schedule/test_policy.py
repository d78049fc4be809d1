import random
from collections import Counter

import pytest

from llmctl.engine.config import POLICIES
from llmctl.engine.schedule.policy import SharedQueue, make_queue
from llmctl.engine.schedule.tickets import Ticket
from llmctl.kernels.errors import UsageError


def ticket(order, tenant="", priority=0, prompt=10, max_tokens=10, step=0, resumed=False):
    return Ticket(order, tenant, priority, prompt, max_tokens, step, resumed)


def drain(queue):
    order = []
    while queue.head() is not None:
        order.append(queue.pop().order)
    return order


def test_an_unknown_policy_is_an_error_that_names_the_choices():
    with pytest.raises(UsageError) as error:
        make_queue("lottery", 100, {})
    assert "lottery" in error.value.message and error.value.hint == f"choose one of: {', '.join(POLICIES)}"


def test_a_weight_of_nothing_is_an_error():
    with pytest.raises(UsageError, match="weight of tenant `a` is 0"):
        make_queue("hybrid", 100, {"a": 0})


def test_fcfs_is_the_order_of_arrival():
    queue = make_queue("fcfs", 100, {})
    for each in (ticket(0, prompt=90), ticket(1, prompt=1), ticket(2, prompt=50)):
        queue.push(each)
    assert drain(queue) == [0, 1, 2]


def test_fcfs_knows_no_priorities_and_puts_the_preempted_first():
    queue = make_queue("fcfs", 100, {})
    for each in (ticket(0, priority=5), ticket(1), ticket(2, priority=-1), ticket(3, resumed=True)):
        queue.push(each)
    assert drain(queue) == [3, 0, 1, 2]


def test_the_same_jobs_come_in_another_order_under_each_policy():
    orders = {}
    for policy in POLICIES:
        queue = make_queue(policy, 100, {})
        for order, (tenant, prompt, priority) in enumerate(
            [("a", 60, 0), ("a", 5, 1), ("a", 30, 0), ("b", 70, 0), ("b", 10, 0)]
        ):
            queue.push(ticket(order, tenant, priority, prompt))
        orders[policy] = []
        while (head := queue.head()) is not None:
            orders[policy].append(queue.pop().order)
            queue.served(head.tenant, head.prompt)
    assert orders == {
        "hybrid": [2, 4, 3, 0, 1],  # tenants in turn by what they were served, the short first
        "fcfs": [0, 1, 2, 3, 4],
        "sjf": [4, 2, 0, 3, 1],
        "fair": [0, 3, 2, 4, 1],
        "priority": [0, 2, 3, 4, 1],
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_urgent_goes_first_in_its_tenant_and_priority_but_under_fcfs(policy):
    queue = make_queue(policy, 100, {})
    tickets = [ticket(0), ticket(1, prompt=90), ticket(2, prompt=80), ticket(3, priority=1)]
    for each in tickets:
        queue.push(each)
    for order, due in ((1, 7.0), (2, 5.0), (3, 1.0)):
        queue.remove(tickets[order])
        queue.push(tickets[order]._replace(due=due))
    assert drain(queue) == ([0, 1, 2, 3] if policy == "fcfs" else [2, 1, 0, 3])


def test_hybrid_takes_the_shortest_expected_job_first():
    queue = make_queue("hybrid", 100, {})
    for each in (ticket(0, prompt=90), ticket(1, prompt=1), ticket(2, prompt=1, max_tokens=1)):
        queue.push(each)
    assert drain(queue) == [2, 1, 0]


def test_the_running_mean_of_outputs_is_part_of_what_a_job_is_expected_to_cost():
    queue = SharedQueue(1000, {})
    for _ in range(50):
        queue.finished("", 5)
    queue.push(ticket(0, prompt=20, max_tokens=1000))  # expected 25
    queue.push(ticket(1, prompt=24, max_tokens=2))  # expected 26
    queue.push(ticket(2, prompt=10, max_tokens=1000))  # expected 15
    assert drain(queue) == [2, 0, 1]


@pytest.mark.parametrize("queue", [make_queue(policy, 100, {}) for policy in POLICIES if policy != "fcfs"])
def test_priority_comes_first_and_the_preempted_before_the_new_of_their_priority(queue):
    queue.push(ticket(0, priority=1))
    queue.push(ticket(1))
    queue.push(ticket(2, prompt=50, resumed=True))
    queue.push(ticket(3, priority=1, resumed=True))
    assert drain(queue) == [2, 1, 3, 0]


@pytest.mark.parametrize("make", [lambda policy=policy: make_queue(policy, 100, {}) for policy in POLICIES])
def test_removed_tickets_never_come_up(make):
    queue, random_ = make(), random.Random(2)
    tickets = [
        ticket(i, tenant=random_.choice("ab"), priority=random_.randrange(2), resumed=random_.random() < 0.2)
        for i in range(500)
    ]
    for each in tickets:
        queue.push(each)
    gone = random_.sample(tickets, 400)
    for each in gone:
        queue.remove(each)
    assert len(queue) == 100
    assert sorted(drain(queue)) == sorted({t.order for t in tickets} - {t.order for t in gone})
    assert len(queue) == 0


def test_nobody_is_overtaken_by_a_job_that_came_more_than_the_bound_later():
    max_wait = 40
    queue = SharedQueue(1000, {}, max_wait=max_wait)
    queue.push(ticket(0, prompt=990, max_tokens=10, step=0))
    order = 1
    for step in range(200):  # a stream of short jobs, more than one server takes
        for _ in range(2):
            queue.push(ticket(order, prompt=1, max_tokens=1, step=step))
            order += 1
        served = queue.pop()
        if served.order == 0:
            break
        assert served.step <= max_wait
    else:
        raise AssertionError("the long job was never served")


def serve(queue, backlog, steps, seed):
    """Tokens served per tenant by a server of one job at a time; each tenant keeps `backlog[tenant]` jobs waiting."""
    random_ = random.Random(seed)
    waiting, served, order = Counter(), Counter(), 0
    for step in range(steps):
        for tenant, depth in backlog.items():
            while waiting[tenant] < depth:
                queue.push(ticket(order, tenant, prompt=random_.randrange(1, 200), max_tokens=50, step=step))
                order += 1
                waiting[tenant] += 1
        job = queue.pop()
        waiting[job.tenant] -= 1
        tokens = job.prompt + random_.randrange(1, 50)
        queue.served(job.tenant, tokens)
        queue.finished(job.tenant, tokens - job.prompt)
        served[job.tenant] += tokens
    return served


def test_a_tenant_with_ten_times_the_load_gets_no_more_than_its_share():
    served = serve(SharedQueue(250, {}), {"a": 100, "b": 10}, 3000, 1)
    assert abs(served["b"] / served.total() - 0.5) < 0.05


def test_shares_follow_the_weights():
    served = serve(SharedQueue(250, {"a": 3.0}), {"a": 20, "b": 20, "c": 20}, 5000, 2)
    assert abs(served["a"] / served.total() - 0.6) < 0.05


def test_a_tenant_cannot_save_up_credit_while_idle():
    queue = SharedQueue(250, {})
    serve(queue, {"a": 5}, 500, 3)
    while queue.head() is not None:
        queue.pop()
    served = serve(queue, {"a": 20, "b": 20}, 200, 4)
    assert abs(served["b"] / served.total() - 0.5) < 0.05


def test_records_of_idle_tenants_do_not_pile_up():
    queue = SharedQueue(100, {})
    for order in range(10_000):
        queue.push(ticket(order, tenant=f"t{order}"))
        queue.pop()
        queue.served(f"t{order}", 1)
        queue.push(ticket(order, tenant="steady"))
        queue.pop()
        queue.served("steady", 10)
    assert len(queue._tenants) < 3000
