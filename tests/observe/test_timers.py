"""Times by phase."""

import time

import torch

from megacore.observe.timers import Timers


def test_phases_are_added_up_and_divided_by_the_iterations() -> None:
    timers = Timers(torch.device("cpu"))
    for _ in range(2):
        with timers("sleep"):
            time.sleep(0.02)
    with timers("nothing"):
        pass
    times = timers.take(2)
    assert 19.0 < times["sleep"] < 500.0
    assert times["nothing"] < times["sleep"]
    assert timers.take(1) == {}
