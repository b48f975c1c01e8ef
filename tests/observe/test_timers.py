"""Tests of the times by phase."""

import time

import torch

from megacore.observe.timers import Timers, exposed_communication


def test_phase_times_are_summed_and_divided_by_the_iterations() -> None:
    timers, began = Timers(torch.device("cpu")), time.perf_counter()
    for _ in range(2):
        with timers("sleep"):
            time.sleep(0.02)
    with timers("nothing"):
        pass
    times, passed = timers.take(2), 1000.0 * (time.perf_counter() - began)
    assert times["sleep"] > 19.0
    assert times["nothing"] >= 0.0
    assert times["sleep"] + times["nothing"] <= passed / 2
    assert timers.take(1) == {}


def test_phases_are_not_recorded_while_paused() -> None:
    timers = Timers(torch.device("cpu"))
    with timers.paused():
        with timers.paused(), timers("graph"):
            pass
        with timers("validation"):
            pass
    with timers("training"):
        pass
    assert timers.take(1).keys() == {"training"}


def test_exposed_communication_is_the_sum_of_the_waits() -> None:
    times = {"forward-compute": 10.0, "tensor-parallel wait": 1.0, "data-parallel wait": 0.5}
    assert exposed_communication(times) == 1.5
