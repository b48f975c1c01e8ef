"""A tiny fine-tuning with a real model: GPT-2 learns to count in steps from random weights."""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.config.finetune import FinetuneConfig

WORDS = 32
LENGTH = 12


def config(**sections: Any) -> FinetuneConfig:
    """Return a complete configuration with `sections` merged into it, one level deep."""
    values: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "model": {"path": "tiny"},
        "data": {"source": {"kind": "files", "train": ["train.jsonl"]}},
        "task": {"kind": "causal_lm", "block_size": LENGTH},
        "optim": {"lr": 5e-3, "weight_decay": 0.1, "lr_scheduler": "linear", "warmup_steps": 1},
        "train": {
            "num_epochs": 2,
            "micro_batch_size": 4,
            "eval_batch_size": 4,
            "precision": "fp32",
            "log_interval": 1,
        },
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section if isinstance(section, dict) else section
    return FinetuneConfig.model_validate(values)


def write_model(directory: Path, *, dropout: float = 0.0) -> None:
    """Write a GPT-2 with random weights and a tokenizer of words as transformers does."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(11)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    model_config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **drops,
    )
    GPT2LMHeadModel(model_config).save_pretrained(directory)
    words = {"<pad>": 0, **{f"w{number}": number for number in range(1, WORDS)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(
        directory
    )


class TinyTask:
    """A task of counting, with the interface of `megacore.finetune.task.FinetuneTask`."""

    metric = "loss"
    larger_is_better = False

    def __init__(
        self,
        directory: Path,
        *,
        train: int = 22,
        valid: int = 7,
        test: int = 0,
        poison: int | None = None,
        signal_at: int | None = None,
        signal_in_evaluation: int | None = None,
    ) -> None:
        """Generate the samples from a formula.

        Args:
            directory: directory of the model.
            train: number of training samples.
            valid: number of validation samples.
            test: number of test samples.
            poison: forward pass of training, counted from 1, before which a weight becomes NaN.
            signal_at: forward pass of training before which this process gets SIGTERM.
            signal_in_evaluation: forward pass of evaluation before which it gets SIGTERM.
        """
        from transformers import AutoTokenizer

        self._directory, self._poison, self._signal_at, self._passes = (
            directory,
            poison,
            signal_at,
            0,
        )
        self._signal_in_evaluation, self._evaluated = signal_in_evaluation, 0
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._rows = {
            "train": _rows(0, train),
            "valid": _rows(1000, valid),
            "test": _rows(2000, test),
        }

    def split(self, name: str) -> Any:
        from datasets import Dataset

        return Dataset.from_list(self._rows[name]) if self._rows.get(name) else None

    def build_model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._directory, dtype=torch.float32)
        model.register_forward_pre_hook(self._disturb)
        return model

    def _disturb(self, module: Any, arguments: Any) -> None:
        self._passes += module.training
        self._evaluated += not module.training
        send_signal = (
            self._passes == self._signal_at
            if module.training
            else self._evaluated == self._signal_in_evaluation
        )
        if send_signal:
            os.kill(os.getpid(), signal.SIGTERM)
        if module.training and self._passes == self._poison:
            with torch.no_grad():
                module.transformer.ln_f.bias.fill_(float("nan"))

    def collate(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}

    def largest_rows(self, count: int) -> list[dict[str, Any]]:
        return _rows(0, count)

    def scorer(self, accelerator: Any, model: Any) -> "_Scorer":
        return _Scorer(accelerator, model)


class _Scorer:
    def __init__(self, accelerator: Any, model: Any) -> None:
        self._accelerator, self._model = accelerator, model
        self._losses: list[torch.Tensor] = []

    def add(self, batch: Mapping[str, torch.Tensor]) -> None:
        logits = self._model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
        ).mean(1)
        self._losses.append(self._accelerator.gather_for_metrics(losses))

    def metrics(self) -> dict[str, float]:
        losses = torch.cat(self._losses)
        return {"loss": float(losses.mean()), "samples": float(len(losses))}


def _rows(first: int, count: int) -> list[dict[str, Any]]:
    """Return rows of numbers that rise by one step per row, modulo the vocabulary."""
    generator = torch.Generator().manual_seed(first)
    starts = torch.randint(1, WORDS, (count,), generator=generator).tolist()
    steps = torch.randint(1, 3, (count,), generator=generator).tolist()
    return [
        {"input_ids": [1 + (start + step * place) % (WORDS - 1) for place in range(LENGTH)]}
        for start, step in zip(starts, steps, strict=True)
    ]


@dataclass
class Run:
    """Directory and events of a fine-tuning."""

    directory: Path
    events: list[dict[str, Any]]
    stopped: str | None
    """Error that ended the run early, or None."""

    @property
    def losses(self) -> list[float]:
        """Loss of each step."""
        return [event["loss"] for event in self.of("step")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.events if event["kind"] == kind]


def run(finetune_config: FinetuneConfig, task: Any, directory: Path, attempt: int = 1) -> Run:
    """Run the loop on this rank, like `megacore.ranks.finetune` once the ranks have joined."""
    from megacore.artifact.workspace import EVENTS_FILE
    from megacore.errors import TrainingStoppedError
    from megacore.finetune.run import Finetuner
    from megacore.finetune.trainer import prepare
    from megacore.observe.recorder import Recorder

    rank = int(os.environ.get("RANK", "0"))
    trainer = prepare(
        finetune_config,
        task,
        precision=finetune_config.train.precision,
        device=torch.device("cpu"),
        directory=directory,
    )
    stopped = None
    with Recorder(directory, attempt=attempt, rank=rank, tensorboard=False) as recorder:
        try:
            Finetuner(finetune_config, task, trainer, recorder, directory).run()
        except TrainingStoppedError as error:
            stopped = f"{type(error).__name__}: {error}"
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    lines = (directory / EVENTS_FILE).read_text(encoding="utf-8").splitlines()
    return Run(directory, [json.loads(line) for line in lines], stopped)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the best model of a run."""
    from safetensors.torch import load_file

    (path,) = (directory / "best").glob("iter_*")
    return load_file(path / "model" / "model.safetensors")
