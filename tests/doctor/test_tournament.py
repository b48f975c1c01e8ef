from collections import Counter

import pytest

from megacore.doctor.between import ALL_PAIRS, RANDOM_ROUNDS, rounds_of


def hosts(count: int) -> list[str]:
    return [f"h{number:02d}" for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, ALL_PAIRS - 1, ALL_PAIRS, ALL_PAIRS + 1, 24, 65])
def test_no_host_is_in_two_pairs_of_a_round(count: int) -> None:
    rounds = rounds_of(hosts(count))
    for pairs in rounds:
        assert pairs
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    every = [pair for pairs in rounds for pair in pairs]
    assert len(set(every)) == len(every)
    assert all(first < second for first, second in every)  # the first one of a pair is where they meet


@pytest.mark.parametrize("count", [2, 3, 4, 7, ALL_PAIRS])
def test_a_few_hosts_all_meet_in_as_few_rounds_as_possible(count: int) -> None:
    rounds = rounds_of(hosts(count))
    assert sum(map(len, rounds)) == count * (count - 1) // 2
    assert len(rounds) == (count if count % 2 else count - 1)


@pytest.mark.parametrize("count", [ALL_PAIRS + 1, 40, 101])
def test_of_many_hosts_each_meets_its_neighbours_and_some_others(count: int) -> None:
    rounds = rounds_of(hosts(count))
    assert len(rounds) <= 3 + RANDOM_ROUNDS
    met = Counter(host for pairs in rounds for pair in pairs for host in pair)
    assert set(met) == set(hosts(count))
    assert min(met.values()) >= 3
    every = {pair for pairs in rounds for pair in pairs}
    assert {("h00", "h01"), (f"h{count - 2:02d}", f"h{count - 1:02d}"), ("h00", f"h{count - 1:02d}")} <= every
