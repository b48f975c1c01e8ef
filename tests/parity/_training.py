"""Training of the same small model in one layout after another."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.config.load import parse_config
from megacore.config.model import Family
from megacore.config.run import RunConfig
from megacore.config.spec import SpecialTokens
from megacore.data.sampler import micro_batch_indices
from megacore.engine.base import Engine
from megacore.engine.build import build_engine
from megacore.models.base import LossTotals, SampleSources
from megacore.models.inputs import ModelInput, input_rules
from megacore.models.stage import Stage
from megacore.optim.param_schedule import LrSchedule
from megacore.parallel.mesh import ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.parallel.rng import micro_batch_seed
from megacore.pipeline_parallel.partition import shared_stages
from tests._dist import own_groups, still_alive

STEPS = 12
"""Steps of the schedule, and of the cases of a kind of layout or precision that run all of it."""
FEW = 5
"""Steps of other cases. Losses and norms are compared after each: an error in forward and backward
shows in the first step, one in the update in the second."""
SEQ_LENGTH = 32
VOCAB = 256
EOD_ID = 7
MASK_ID = 5
DECODER_LENGTH = 12
FIRST = 11
"""Tokens of the first document where leaks are looked for."""
TOKENS = SpecialTokens(eod=EOD_ID, pad=0, mask=MASK_ID)
SENTENCES = {"split_sentences": True, "append_eod": False}
DATA: dict[Family, dict[str, Any]] = {
    "gpt": {},
    "bert": SENTENCES,
    "t5": SENTENCES | {"span_corruption": {"decoder_seq_length": DECODER_LENGTH}},
}
GLOBAL_BATCH = 8
SOURCES = 3


@dataclass(frozen=True)
class Case:
    """One way to train; the values replace those of the serial run."""

    parallel: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    steps: int = FEW
    family: Family = "gpt"
    engine: str = "native"
    deepspeed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Values that a rank observed in a run."""

    losses: list[float]
    grad_norms: list[float]
    terms: dict[str, list[float]]
    """Losses of each step by name."""
    validation: list[float]
    """Sum of each loss over the first batch after the last step, on this stage and replica; then of
    `lm_loss` by position, and by source."""
    source_tokens: list[float]
    """Number of tokens of each source in the same."""
    differing: list[str]
    """Parameters whose initial values differ from the serial model's."""
    leaking: list[str]
    """Losses, gradients and weights of other documents that change with the first document; empty
    without separate documents."""


def config(case: Case) -> RunConfig:
    """Return the configuration of four layers of width 64 with 8 heads."""
    return parse_config(
        {
            "name": "parity",
            "family": case.family,
            "seed": 11,
            "data": {
                "source": {"kind": "source_tree"},
                "tokenizer": {"kind": "hf", "name": "any"},
                "seq_length": SEQ_LENGTH,
                **DATA[case.family],
                **case.data,
            },
            "model": {
                "num_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 8,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "make_vocab_size_divisible_by": 16,
                **case.model,
            },
            "optim": {
                "lr": 1e-3,
                "lr_warmup_iters": 3,
                "weight_decay": 0.1,
                "adam_eps": 1e-8,
                **case.optim,
            },
            "train": {
                "micro_batch_size": 4,
                "global_batch_size": GLOBAL_BATCH,
                "train_iters": STEPS,
                "precision": "fp32",
                **case.train,
            },
            "checkpoint": {"save_interval": STEPS},
            "engine": case.engine,
            "parallel": case.parallel,
            "deepspeed": case.deepspeed,
            "launch": {"nproc_per_node": dist.get_world_size() if dist.is_initialized() else 1},
        },
        origin="tests",
    )


def samples(family: Family = "gpt") -> Tensor:
    """Return samples of ids [steps x batch, width].

    They are arithmetic sequences with noise, which can be learned, and contain ends of documents.
    """
    generator = torch.Generator().manual_seed(3)
    count = STEPS * GLOBAL_BATCH
    start = torch.randint(VOCAB, (count, 1), generator=generator)
    step = torch.randint(1, 6, (count, 1), generator=generator)
    noise = torch.randint(0, 3, (count, SEQ_LENGTH + 1), generator=generator)
    sequences = (start + step * torch.arange(SEQ_LENGTH + 1) + noise) % VOCAB
    if family == "gpt":
        return sequences
    few = 8 + sequences[:, :SEQ_LENGTH] % 16  # fewer ids, so that the model learns faster
    return masked(few, generator) if family == "bert" else corrupted(few, generator)


def masked(sequences: Tensor, generator: torch.Generator) -> Tensor:
    """Return BERT's samples: two segments, and every sixth token masked.

    Some have padding at the end.
    """
    positions = torch.arange(SEQ_LENGTH)
    ends = torch.randint(SEQ_LENGTH // 2, SEQ_LENGTH + 1, (len(sequences), 1), generator=generator)
    predicted = (positions % 6 == 1) & (positions < ends)
    tokens = sequences.masked_fill(predicted, MASK_ID).masked_fill(positions >= ends, -1)
    labels = sequences.masked_fill(~predicted, -1)
    segments = (positions >= ends // 2).long().masked_fill(positions >= ends, -1)
    swapped = torch.randint(2, (len(sequences), 1), generator=generator)
    return torch.cat([tokens, labels, segments, swapped], 1)


def corrupted(sequences: Tensor, generator: torch.Generator) -> Tensor:
    """Return T5's samples: the decoder writes every other token of the beginning.

    Some have padding on both sides.
    """
    ends = torch.randint(SEQ_LENGTH // 2, SEQ_LENGTH + 1, (len(sequences), 1), generator=generator)
    labels = sequences[:, : 2 * DECODER_LENGTH : 2]
    padding = torch.arange(DECODER_LENGTH) >= ends // 2
    return torch.cat(
        [
            sequences.masked_fill(torch.arange(SEQ_LENGTH) >= ends, -1),
            labels.masked_fill(padding, -1),
        ],
        1,
    )


def _engine(run_config: RunConfig, mesh: ProcessMesh) -> Engine:
    return build_engine(
        run_config,
        VOCAB,
        mesh,
        special_tokens=TOKENS,
        device=torch.device("cpu"),
        precision=run_config.train.precision,
    )


def train(case: Case) -> Result:
    """Train as one rank of the default group, or as a single process."""
    run_config = config(case)
    mesh = mesh_of(run_config)
    engine = _engine(run_config, mesh)
    differing = _differing(engine, run_config)
    schedule, data = LrSchedule.of(run_config), samples(case.family)
    updates = []
    for step in range(case.steps):
        indices = _micro_batches(run_config, mesh, step)
        seeds = [micro_batch_seed(run_config.seed, micro_batch[0]) for micro_batch in indices]
        engine.forward_backward(_read(data, indices), seeds)
        updates.append(engine.update(schedule.at(step + 1), run_config.optim.weight_decay))
    indices = _micro_batches(run_config, mesh, 0)
    totals = LossTotals(len(engine.loss_names), sources_of(indices), engine.device)
    validation = engine.loss_sum(_read(data, indices), [len(each) for each in indices], totals)
    assert all(update.applied for update in updates)
    return Result(
        [update.loss for update in updates],
        [update.grad_norm for update in updates],
        {name: [update.terms[name] for update in updates] for name in engine.loss_names},
        validation[:, 0].tolist(),
        validation[-SOURCES:, 1].tolist(),
        differing,
        leaks(case) if run_config.data.reset_attention_mask else [],
    )


class _OtherDocuments:
    """Rules of a configuration, with which the labels of the first document do not count."""

    def __init__(self, *arguments: Any) -> None:
        self._rules = input_rules(*arguments)
        self.for_every_stage = self._rules.for_every_stage

    def read(self, batch: Tensor) -> ModelInput:
        fields = self._rules.read(batch)
        others = (torch.arange(SEQ_LENGTH) >= FIRST).expand(len(batch), -1)
        mask = others if fields.loss_mask is None else others & fields.loss_mask
        return replace(fields, loss_mask=mask)


def leaks(case: Case) -> list[str]:
    """Return what the first document of each sample changes of the others, in any bit.

    Compared are the losses of an iteration, its gradients as Adam's first moments have them, the
    weights after it, and the losses of the new weights by position.
    """
    before, after = (_observed(case, seed) for seed in (2, 3))
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def _observed(case: Case, seed: int) -> dict[str, Tensor]:
    """Return the results of one iteration, with first documents that are drawn with the seed."""
    run_config = config(case)
    mesh = mesh_of(run_config)
    with mock.patch("megacore.models.stage.input_rules", _OtherDocuments):
        engine = _engine(run_config, mesh)
    data = samples()[:GLOBAL_BATCH].masked_fill(samples()[:GLOBAL_BATCH] == EOD_ID, EOD_ID + 1)
    drawn = torch.Generator().manual_seed(seed)
    data[:, :FIRST] = torch.randint(EOD_ID + 1, VOCAB, (GLOBAL_BATCH, FIRST), generator=drawn)
    data[:, FIRST - 1] = data[::2, 2 * FIRST] = EOD_ID
    indices = _micro_batches(run_config, mesh, 0)
    engine.forward_backward(_read(data, indices), [1] * len(indices))
    update = engine.update(1e-3, 0.0)
    totals = LossTotals(len(engine.loss_names), None, engine.device)
    scored = engine.loss_sum(_read(data, indices), [len(each) for each in indices], totals)
    results = {"losses": torch.tensor(update.losses), "losses by position": scored}
    for name, tensor in engine.tensors().items():
        parts = {"": tensor} if isinstance(tensor, Tensor) else tensor.pieces
        results |= {f"{name} {place}": part.clone() for place, part in parts.items()}
    return results


def train_all(cases: dict[str, Case]) -> dict[str, Result]:
    """Train every case, in the same order on all ranks."""
    results = {}
    for name, case in cases.items():
        still_alive()
        with own_groups():
            results[name] = train(case)
    return results


def mesh_of(run_config: RunConfig) -> ProcessMesh:
    if not dist.is_initialized():
        return ProcessMesh.serial()
    parallel = run_config.parallel
    layout = RankLayout.of_world(
        dist.get_world_size(),
        pipeline=parallel.pipeline_model_parallel_size,
        tensor=parallel.tensor_model_parallel_size,
        context=parallel.context_parallel_size,
    )
    return ProcessMesh.build(layout, shared_stages=shared_stages(run_config, VOCAB))


def _micro_batches(run_config: RunConfig, mesh: ProcessMesh, step: int) -> list[list[int]]:
    """Return the samples of each of this rank's micro batches, in Megatron's order."""
    size, replicas = run_config.train.micro_batch_size, mesh.data_parallel
    count = run_config.train.global_batch_size // (size * replicas.size)
    start = step * run_config.train.global_batch_size
    return [
        micro_batch_indices(start, index, size, replicas.rank, replicas.size)
        for index in range(count)
    ]


def sources_of(indices: list[list[int]]) -> SampleSources:
    """Return the sources of the samples of micro batches: every third sample has the same."""
    return SampleSources(torch.tensor(indices).flatten() % SOURCES, SOURCES)


def _read(data: Tensor, indices: list[list[int]]) -> Iterator[Tensor]:
    return (data[each] for each in indices)


def _differing(engine: Engine, run_config: RunConfig) -> list[str]:
    """Return the names of initial weights that differ from the serial model's in any bit."""
    serial = dict(
        Stage(run_config, VOCAB, ProcessMesh.serial(), special_tokens=TOKENS).named_parameters
    )
    names = []
    for name, tensor in engine.tensors().items():
        if not name.startswith("model."):
            continue
        whole = serial[name.removeprefix("model.")].detach()
        pieces = (
            [((0,) * tensor.dim(), tensor)] if isinstance(tensor, Tensor) else tensor.pieces.items()
        )
        for offsets, part in pieces:
            place = tuple(
                slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True)
            )
            if not torch.equal(whole[place], part):
                names.append(name)
    return names
