"""Main weights sharded over replicas, and gradient sums over other axes.

Sharding gives the same weights for less memory.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.config.parallel import ParallelConfig
from megacore.data_parallel.grad_sync import GradSync
from megacore.optim.adam import MainWeightAdamW
from megacore.parallel.mesh import ProcessMesh
from tests.data_parallel import _ranks
from tests.data_parallel._modules import Mixed, batch

Results = list[dict[str, Any]]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sharded", "whole"),
    [("sharded", "whole"), ("sharded, one bucket", "one bucket"), ("sharded, bf16", "bf16")],
)
def test_sharded_training_of_two_replicas_is_bit_identical(
    two_replicas: Results, sharded: str, whole: str, dtype: torch.dtype
) -> None:
    for result in two_replicas:
        expected = two_replicas[0][f"training, {whole}, {dtype}"]["weights"]
        weights = result[f"training, {sharded}, {dtype}"]["weights"]
        for name, weight in expected.items():
            assert weight.dtype == dtype
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("case", ["training, {}, torch.float32", "clipped, {}"])
@pytest.mark.parametrize("ranks", ["two_replicas", "four_ranks"])
def test_sharded_weights_and_norms_agree_to_1e_6_if_clipped_or_on_four_replicas(
    request: pytest.FixtureRequest, ranks: str, case: str
) -> None:
    results: Results = request.getfixturevalue(ranks)
    expected = results[0][case.format("whole")]
    for result in results:
        sharded = result[case.format("sharded")]
        torch.testing.assert_close(sharded["norms"], expected["norms"], rtol=1e-6, atol=0)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(
                sharded["weights"][name], weight, rtol=1e-6, atol=1e-6, msg=name
            )


@pytest.mark.parametrize("ranks", ["two_replicas", "four_ranks"])
def test_the_gradient_norm_is_bit_identical_on_every_rank(
    request: pytest.FixtureRequest, ranks: str
) -> None:
    results: Results = request.getfixturevalue(ranks)
    cases = [name for name in results[0] if name.startswith(("training", "clipped"))]
    assert len(cases) == 3 * len(_ranks.WAYS)
    for case in cases:
        assert all(
            torch.equal(result[case]["norms"], results[0][case]["norms"]) for result in results
        ), case


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
@pytest.mark.parametrize("count", [2, 4])
def test_replicas_train_like_one_process(
    two_replicas: Results, four_ranks: Results, count: int, max_norm: float
) -> None:
    results = (two_replicas if count == 2 else four_ranks)[0]
    case = results["clipped, whole" if max_norm else "training, whole, torch.float32"]
    model = Mixed()
    sync = GradSync(dict(model.named_parameters()), ProcessMesh.serial(), ParallelConfig())
    optimizer = MainWeightAdamW([sync], _ranks.OPTIM, torch.float32)
    norms = []
    for iteration in range(_ranks.ITERATIONS):
        seeds = range(2 * count * iteration, 2 * count * (iteration + 1))
        _ranks.backward(model, sync, list(seeds), 1 / len(seeds))
        sync.finish()
        norms.append(optimizer.grad_norm())
        optimizer.step(1e-2, 0.1, norm=norms[-1], max_norm=max_norm)
    torch.testing.assert_close(case["norms"], torch.stack(norms), rtol=1e-5, atol=0)
    assert min(norms) > 0.5  # a maximum of 0.05 clips
    x = batch(99)
    trained = Mixed()
    trained.load_state_dict(case["weights"])
    torch.testing.assert_close(trained(x), model(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", ["two_replicas", "four_ranks"])
def test_each_replica_has_only_its_share_of_the_state(
    request: pytest.FixtureRequest, ranks: str, dtype: torch.dtype
) -> None:
    results: Results = request.getfixturevalue(ranks)
    elements = sum(parameter.numel() for parameter in Mixed().parameters())
    states = [result[f"training, sharded, one bucket, {dtype}"]["state"] for result in results]
    shares = [sum(weight.numel() for weight, *_ in state.values()) for state in states]
    assert sum(shares) == elements
    assert max(shares) <= -(-elements // len(results)) + 64
    # An fp32 model's own weights serve as the main weights.
    assert [result[f"training, sharded, {dtype}"]["own copy"] for result in results] == [
        dtype != torch.float32
    ] * len(results)


def test_loaded_main_weights_reach_every_replicas_model(two_replicas: Results) -> None:
    for result in two_replicas:
        for name, weight in result["reloaded"].items():
            assert torch.equal(weight.flatten(), torch.arange(weight.numel()).bfloat16()), name


def summed(name: str, shape: tuple[int, ...], tensor: int | None = None) -> Tensor:
    """Return the expected sum over replicas and over the other ranks that have a part of it."""
    others = {"norm": [[0], [1]], "embedding": [[0], [1]], "rows": [[tensor]]}.get(name, [[]])
    drawn = [_ranks.drawn(name, [data, *other], shape) for data in range(2) for other in others]
    return torch.stack(drawn).sum(0)


@pytest.mark.parametrize("way", ["whole", "sharded", "bf16"])
def test_parts_of_gradients_are_summed_over_tensor_parallel_ranks(
    four_ranks: Results, way: str
) -> None:
    total = 0.0
    for rank, result in enumerate(four_ranks):
        case = result[f"tensor, {way}"]
        for name, shape in _ranks.TENSOR.items():
            expected = summed(name, shape, rank % 2)
            assert_reduced(case, name, expected)
            # Data-parallel ranks agree. Every parameter counts once, `rows` on both tensor-parallel
            # ranks.
            if rank == 0 or (rank == 1 and name == "rows"):
                total += float((expected / 2).square().sum())
    assert all(
        float(result[f"tensor, {way}"]["norm"]) == pytest.approx(total**0.5, rel=1e-6)
        for result in four_ranks
    )


@pytest.mark.parametrize("way", ["whole", "sharded", "bf16"])
def test_shared_gradients_are_summed_over_first_and_last_stage(
    four_ranks: Results, way: str
) -> None:
    total = 0.0
    for rank, result in enumerate(four_ranks):
        case = result[f"pipeline, {way}"]
        for name, shape in {"embedding": (7, 9), "first" if rank < 2 else "last": (33,)}.items():
            expected = summed(name, shape)
            assert_reduced(case, name, expected)
            if rank == 0 or (rank == 2 and name == "last"):
                total += float((expected / 2).square().sum())
        assert torch.equal(
            case["weights"]["embedding"], four_ranks[0][f"pipeline, {way}"]["weights"]["embedding"]
        )
    norms = [float(result[f"pipeline, {way}"]["norm"]) for result in four_ranks]
    assert norms == [pytest.approx(total**0.5, rel=1e-6)] * 4
    assert len(set(norms)) == 1


def assert_reduced(case: dict[str, Any], name: str, expected: Tensor) -> None:
    """Assert that a rank's gradient is its part of `expected` and its weights moved against it."""
    assert not torch.equal(expected, torch.zeros_like(expected))
    if name in case["gradients"]:
        start, gradient = case["gradients"][name]
        assert torch.equal(gradient, expected.flatten()[start : start + gradient.numel()]), name
    # The first step of Adam without decay is lr in the direction of the sign.
    torch.testing.assert_close(case["weights"][name], 1 - 1e-2 * expected.sign(), rtol=0, atol=1e-6)
