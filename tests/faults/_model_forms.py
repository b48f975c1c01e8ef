"""Files of other programs' models, and their readers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megacore.convert.deepspeed.read import open_deepspeed
from megacore.convert.export import export
from megacore.convert.hf.directory import open_hf
from megacore.convert.megatron.checkpoint import open_megatron
from megacore.jobs.run import ConvertJob
from tests.convert._megatron import written
from tests.convert._megatron_deepspeed import written_universal, written_zero1
from tests.faults._mutations import Form, digest_of

# other programs' models


def make_hf(directory: Path) -> Sequence[Path]:
    from tests.convert._tiny import tiny_config, tiny_job

    job, _ = tiny_job(directory / "model", tiny_config(max_position_embeddings=64))
    export(ConvertJob.model_validate(job))
    shutil.copytree(Path(job.output_directory) / "model", directory / "hf")
    return [directory / "hf" / name for name in ("model.safetensors", "config.json")]


def read_hf(directory: Path) -> Any:
    opened = open_hf(directory / "hf")
    return repr(opened.spec), digest_of(opened.tensors)


def make_hf_index(directory: Path) -> Sequence[Path]:
    from safetensors.torch import load_file, save_file

    make_hf(directory)
    folder = directory / "hf"
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file)
    files = {name: file for file, half in halves.items() for name in half}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": files}), encoding="utf-8"
    )
    (folder / "model.safetensors").unlink()
    return [folder / "model.safetensors.index.json"]


def make_hf_pickle(directory: Path) -> Sequence[Path]:
    from safetensors.torch import load_file

    make_hf(directory)
    torch.save(
        load_file(directory / "hf" / "model.safetensors"), directory / "hf" / "pytorch_model.bin"
    )
    (directory / "hf" / "model.safetensors").unlink()
    return [directory / "hf" / "pytorch_model.bin"]


def make_megatron(directory: Path) -> Sequence[Path]:
    iteration, _ = written(directory / "megatron", tensor=2)
    ranks = sorted(iteration.glob("*/model_optim_rng.pt"))
    return [*ranks, directory / "megatron" / "latest_checkpointed_iteration.txt"]


def read_from_megatron(directory: Path) -> Any:
    opened = open_megatron(directory / "megatron")
    return repr(opened.spec), digest_of(opened.tensors), opened.iteration


def make_zero1(directory: Path) -> Sequence[Path]:
    (directory / "deepspeed").mkdir()
    written_zero1(directory / "deepspeed", tensor=1)
    return sorted((directory / "deepspeed").glob("*.pt"))


def make_universal(directory: Path) -> Sequence[Path]:
    (directory / "deepspeed").mkdir()
    written_universal(directory / "deepspeed")
    return sorted((directory / "deepspeed").rglob("*.pt"))


def read_from_deepspeed(directory: Path) -> Any:
    opened = open_deepspeed(directory / "deepspeed")
    moments = {kind: digest_of(tensors) for kind, tensors in opened.moments.items()}
    return repr(opened.spec), digest_of(opened.tensors), moments, opened.iteration


MODEL_FORMS = (
    Form("safetensors, config.json", make_hf, read_hf, 100, also=("/hf",)),
    Form("safetensors index", make_hf_index, read_hf, 40, also=("/hf",)),
    Form("pytorch_model.bin", make_hf_pickle, read_hf, 50, also=("/hf",)),
    Form("Megatron .pt", make_megatron, read_from_megatron, 100, also=("/iter_0001000",)),
    Form("DeepSpeed ZeRO files", make_zero1, read_from_deepspeed, 80, also=("/deepspeed",)),
    Form(
        "DeepSpeed universal files", make_universal, read_from_deepspeed, 60, also=("/deepspeed",)
    ),
)
