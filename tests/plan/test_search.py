"""The search for a layout: the best of all, what is refused and why, and its chart."""

import heapq
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megacore.config import RunConfig, load_config
from megacore.config.train import Recompute
from megacore.errors import ConfigError, ParallelLayoutError
from megacore.plan.draw import draw_search, search_figure
from megacore.plan.iteration import Iteration
from megacore.plan.layouts import layout_of
from megacore.plan.machine import Machine, load_machine
from megacore.plan.memory import GIB
from megacore.plan.search import (
    FILLED,
    _Group,
    _Space,
    launch_values,
    precision_on,
    search,
    search_around,
)
from megacore.plan.search_result import CHOSEN, Choice, Partition, SearchResult
from megacore.plan.table import memory_of

VOCAB = 2000
TINY = {
    "model.num_layers": 4,
    "model.hidden_size": 512,
    "data.seq_length": 4096,
    "train.global_batch_size": 8,
    "train.precision": "bf16",
    "launch.nproc_per_node": "auto",
}
PARTITIONS: tuple[Partition, ...] = ("balanced", "uniform")
RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
GPT_13B = {"engine": "native", "launch.nproc_per_node": "auto"}


def conf(**values: Any) -> RunConfig:
    return load_config("gpt2-tiny", TINY | {key.replace("__", "."): values[key] for key in values})


def small_machine(memory_gib: float, **values: Any) -> Machine:
    return load_machine("h100").model_copy(update={"memory_gib": memory_gib, **values})


@pytest.fixture(scope="module")
def result_13b() -> SearchResult:
    config = load_config("gpt2-13b-3d", GPT_13B)
    return search(config, 50_257, load_machine("h100"), 64)


def every_layout(config: RunConfig, machine: Machine, ranks: int) -> list[tuple[float, float]]:
    """Return time and memory of all layouts that work, without bounds or shortcuts.

    Parts of sequences and micro batches with a common factor are checked to be worse than without.
    """
    results, divisors = [], [size for size in range(1, ranks + 1) if ranks % size == 0]
    stages = (0, 1, 2, 3)
    best: dict[Choice, tuple[float, float]] = {}
    for tensor, pipeline, context in product(divisors, divisors, divisors):
        if ranks % (tensor * pipeline * context) or (config.engine != "native" and context > 1):
            continue
        data = ranks // (tensor * pipeline * context)
        for virtual, micro, zero, recompute, sequence, partition, delayed in product(
            (1, 2, 4), (1, 2, 4, 8), stages, RECOMPUTES, (False, True), PARTITIONS, (False, True)
        ):
            sizes = tensor, pipeline, virtual, data, micro, zero
            choice = Choice(*sizes, recompute, sequence, partition, context, delayed)
            changed = choice.applied(config)
            try:
                layout = layout_of(changed, ranks, VOCAB)
            except ParallelLayoutError:
                continue
            iteration = Iteration(changed, VOCAB, machine, layout, "bf16")
            memory = memory_of(iteration)
            predicted = iteration.predict().seconds, memory
            if (factor := gcd(context, micro)) > 1:
                sizes = tensor, pipeline, virtual, data * factor, micro // factor, zero
                names = recompute, sequence, partition, context // factor, delayed
                better = best[Choice(*sizes, *names)]
                assert better[0] <= predicted[0]
                assert better[1] <= predicted[1]
                continue
            best[choice] = predicted
            if memory <= FILLED * machine.memory_gib * GIB:
                results.append(predicted)
    return sorted(results)


@pytest.mark.parametrize(
    ("engine", "memory_gib", "devices_per_node"), [("native", 0.93, 2), ("deepspeed", 0.95, 8)]
)
def test_the_result_is_that_of_predicting_every_layout(
    engine: str, memory_gib: float, devices_per_node: int
) -> None:
    config = conf(engine=engine)
    machine = small_machine(memory_gib, devices_per_node=devices_per_node)
    expected = every_layout(config, machine, 4)
    result = search(config, VOCAB, machine, 4, top=12, front=True)
    assert any("more memory" in each.reason for each in result.refused)  # the limit matters
    times = dict.fromkeys(seconds for seconds, _ in expected)
    fastest = dict.fromkeys(each.seconds for each in result.best)
    assert list(fastest) == list(times)[: len(fastest)]
    limit = 1.4 * result.best[0].seconds
    front, least = [], float("inf")
    for seconds, memory in expected:
        if memory < least and seconds < limit:
            front.append((seconds, memory))
            least = memory
    found = [(each.seconds, each.memory) for each in result.front if each.seconds < limit]
    assert found == front
    assert len(found) > 1 or engine == "deepspeed"


@pytest.mark.parametrize("samples", [64, 1024])
def test_lower_bounds_are_not_above_the_predictions(samples: int) -> None:
    config = load_config("gpt2-13b-3d", GPT_13B | {"train.global_batch_size": samples})
    space = _Space(config, 50_257, load_machine("h100"), 64, "bf16")
    space.list_groups()
    delayed = 0
    while delayed < 100:
        bound, _, item = heapq.heappop(space.heap)
        if isinstance(item, _Group):
            space.expand(item)
        else:
            assert bound <= item.iteration.predict().seconds * (1 + 1e-9), item.choice.name
            delayed += item.choice.delayed


def test_every_candidate_is_counted_once(result_13b: SearchResult) -> None:
    result = result_13b
    assert len(result.best) == 10
    refused = sum(each.candidates for each in result.refused)
    assert refused + len(result.evaluated) == result.total
    reasons = "\n".join(each.reason for each in result.refused)
    assert "model.num_attention_heads 40 is not a multiple" in reasons
    assert "train.global_batch_size 1024 is not a multiple" in reasons
    assert "need more memory than 77.6 of 80 GiB" in reasons
    assert len(result.evaluated) < 100 < result.total


def test_chosen_values_give_the_same_layout_when_a_file_has_them(result_13b: SearchResult) -> None:
    result = result_13b
    config = load_config("gpt2-13b-3d", GPT_13B)
    for each in result.best[:3]:
        assert set(each.choice.values(config)) <= set(CHOSEN)
        values = each.choice.values(config) | launch_values(config, result.machine, 64)
        assert load_config("gpt2-13b-3d", GPT_13B | values) == each.iteration.config
    slurm = config.model_copy(update={"launch": config.launch.model_copy(update={"kind": "slurm"})})
    assert launch_values(slurm, result.machine, 64) == {
        "launch.nproc_per_node": 8,
        "launch.nnodes": 8,
    }


def test_no_listed_layout_is_one_that_a_cuda_graph_cannot_hold() -> None:
    graphs = TINY | {"train.cuda_graphs": True}
    config, machine = load_config("gpt2-tiny", graphs), load_machine("h100")
    result = search(config, VOCAB, machine, 4)
    for each in result.evaluated:
        assert load_config("gpt2-tiny", graphs | each.choice.values(config)).train.cuda_graphs
    assert {each.choice.zero for each in result.evaluated} <= {0, 1}
    reasons = "\n".join(each.reason for each in result.refused)
    for name in ("data_parallel_sharding", "tensor_model", "pipeline_model", "context_parallel"):
        assert f"train.cuda_graphs is true and parallel.{name}" in reasons
    assert sum(each.candidates for each in result.refused) + len(result.evaluated) == result.total


@pytest.mark.parametrize("cores", [0.5, 2.0])
def test_a_run_is_among_the_layouts_of_its_own_ranks(cores: float) -> None:
    values = {"train.precision": "auto", "train.micro_batch_size": 2, "data.seq_length": 256}
    config = load_config("gpt2-tiny", TINY | values)
    machine = load_machine("cpu").model_copy(update={"devices_per_node": 2})
    layout = layout_of(config, 2, VOCAB)
    result, own = search_around(Iteration(config, VOCAB, machine, layout, "bf16", cores))
    (found,) = [each for each in result.evaluated if each.choice == own.choice]
    assert found.seconds == own.seconds
    assert found.memory == own.memory
    assert result.machine.memory_gib == cores * machine.memory_gib
    assert own.seconds >= result.best[0].seconds


@pytest.mark.parametrize(
    ("name", "precision"), [("cpu", "fp32"), ("cpu-bf16", "bf16"), ("h100", "bf16")]
)
def test_auto_is_the_precision_of_the_machine(name: str, precision: str) -> None:
    config = load_config("gpt2-tiny", TINY | {"train.precision": "auto"})
    assert precision_on(config, load_machine(name)) == precision


def test_long_sequences_of_a_small_batch_are_divided() -> None:
    small = {"train__micro_batch_size": 1, "train__global_batch_size": 2}
    config = conf(data__seq_length=65536, **small)
    result = search(config, VOCAB, load_machine("h100"), 8, top=3)
    assert result.best[0].choice.context > 1
    first = next(each for each in result.best if each.choice.context == 4)
    assert first.iteration.config.parallel.context_parallel_size == 4
    assert first.prediction.context > 0
    assert first.choice.values(config)["parallel.context_parallel_size"] == 4
    assert "cp 4" in first.choice.name
    assert "cp" in [column.header for column in result.table().columns]
    for whole in (
        conf(data__seq_length=1024),
        conf(model__position_embedding_type="alibi"),
        conf(engine="deepspeed"),
    ):
        result = search(whole, VOCAB, load_machine("h100"), 8, top=3)
        assert all(each.choice.context == 1 for each in result.evaluated)
        assert "cp" not in [column.header for column in result.table().columns]


def test_no_layout_is_one_sentence_with_the_reasons() -> None:
    with pytest.raises(ParallelLayoutError, match=r"no layout of gpt2-tiny on 4 .* more memory"):
        search(conf(), VOCAB, small_machine(0.1), 4)
    with pytest.raises(ConfigError, match=r"12 devices .* use a multiple of 8"):
        search(conf(), VOCAB, load_machine("h100"), 12)


def test_the_chart_names_the_pareto_front(tmp_path: Path) -> None:
    result = search(conf(), VOCAB, load_machine("h100"), 4, front=True)
    picture = draw_search(result, tmp_path / "layouts.svg", "gpt2-tiny")
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    (axes,) = search_figure(result, "gpt2-tiny").axes
    assert len(result.front) > 1
    assert [text.get_text() for text in axes.texts] == [
        str(number) for number in range(1, len(result.front) + 1)
    ]
    assert all(each.choice.name in axes.get_xlabel() for each in result.front)
    with pytest.raises(ConfigError, match=r"--chart .*layouts\.pdf: pictures are written as"):
        draw_search(result, tmp_path / "layouts.pdf", "gpt2-tiny")
