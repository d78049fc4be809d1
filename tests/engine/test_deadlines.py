from llmctl.engine.deadlines import Deadlines

from .schedule.builders import request
from .schedule.test_simulation import with_wait


def test_requests_are_urgent_at_half_their_time_and_overdue_at_its_end_each_once():
    deadlines = Deadlines()
    for name, wait in (("a", 3.0), ("b", None), ("c", 1.0)):
        deadlines.add(with_wait(request(name, [1]), wait), 10.0)
    assert list(deadlines.urgent(10.4)) == []
    assert list(deadlines.urgent(11.5)) == [("c", 11.0), ("a", 13.0)]
    assert list(deadlines.overdue(10.9)) == []
    told = "its turn did not come within the 1 s that the request could wait"
    assert list(deadlines.overdue(11.0)) == [("c", told)]
    assert [name for name, _ in deadlines.overdue(99.0)] == ["a"]
    assert list(deadlines.overdue(99.0)) == list(deadlines.urgent(99.0)) == []


def test_requests_that_ended_long_before_their_time_are_forgotten_and_open_ones_are_not():
    deadlines = Deadlines()
    for number in range(5000):
        deadlines.add(with_wait(request(f"r{number}", [1]), 1e6 - number), 0.0)
        deadlines.prune(lambda name: name in ("r7", "r3"))
    kept = [name for name, _ in deadlines.overdue(2e6)]
    assert [name for name in kept if name in ("r7", "r3")] == ["r7", "r3"]
    assert len(kept) <= 1024 + 1
    assert kept == [name for name, _ in deadlines.urgent(2e6)]
