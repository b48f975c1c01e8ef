"""Names of the predicted parts, which are compared with those of a run."""

import pytest

from megacore.parallel.collectives import wait_phase
from megacore.parallel.mesh import ParallelGroup
from megacore.parallel.rank_layout import AXES
from megacore.plan.prediction import Prediction


def test_phases_have_the_names_of_a_run() -> None:
    parts = {"compute": 1.0, "tensor": 2.0, "context": 4.0, "bubble": 8.0, "messages": 16.0}
    prediction = Prediction(**parts, data=32.0, embedding=64.0, optimizer=128.0, other=256.0)
    names = {axis: wait_phase(ParallelGroup(name=axis)) for axis in (*AXES, "embedding")}
    assert prediction.phase_ms == pytest.approx(
        {
            "compute": 129e3,
            names["tensor"]: 2e3,
            names["context"]: 4e3,
            names["pipeline"]: 24e3,
            names["data"]: 32e3,
            names["embedding"]: 64e3,
            "world wait": 256e3,
        }
    )
    assert sum(prediction.phase_ms.values()) == pytest.approx(1e3 * prediction.seconds)
