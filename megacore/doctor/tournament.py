"""Which pairs of hosts are measured when, so that no host is in two of them at the same time."""

import random
from collections.abc import Sequence

ALL_PAIRS = 16
"""Hosts up to which every two are measured; beyond, neighbours of a ring and RANDOM_ROUNDS random pairs of each."""
RANDOM_ROUNDS = 3
_SEED = 20

Round = list[tuple[str, str]]


def rounds_of(hosts: Sequence[str]) -> list[Round]:
    """Rounds of disjoint pairs: all pairs of a few hosts, of many a ring and random ones, each pair at most once.

    Of a pair the host that comes first in `hosts` is named first.
    """
    if len(hosts) < 2:
        return []
    found = _everyone(hosts) if len(hosts) <= ALL_PAIRS else _ring_and_random(hosts)
    place = {host: number for number, host in enumerate(hosts)}
    return [[(a, b) if place[a] < place[b] else (b, a) for a, b in pairs] for pairs in found]


def _everyone(hosts: Sequence[str]) -> list[Round]:
    """The circle method: one host stays, the others move on by one place in each round."""
    circle: list[str | None] = [*hosts, None] if len(hosts) % 2 else [*hosts]
    count = len(circle)
    rounds = []
    for _ in range(count - 1):
        pairs = zip(circle[: count // 2], reversed(circle[count // 2 :]), strict=True)
        rounds.append([(a, b) for a, b in pairs if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _ring_and_random(hosts: Sequence[str]) -> list[Round]:
    count = len(hosts)
    ring = [(hosts[number], hosts[(number + 1) % count]) for number in range(count)]
    odd = [ring.pop()] if count % 2 else []
    rounds = [ring[0::2], ring[1::2], odd]
    known = {frozenset(pair) for pairs in rounds for pair in pairs}
    draw = random.Random(_SEED)
    for _ in range(RANDOM_ROUNDS):
        order = list(hosts)
        draw.shuffle(order)
        pairs = [pair for pair in zip(order[0::2], order[1::2], strict=False) if frozenset(pair) not in known]
        known |= {frozenset(pair) for pair in pairs}
        rounds.append(pairs)
    return [pairs for pairs in rounds if pairs]
