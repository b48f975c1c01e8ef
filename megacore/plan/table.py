"""Predictions for a table of runs: `megacore plan --table FILE.csv --output OUT.csv`.

Each row names a model, a layout and GPUs, with the columns that published tables of runs have.
"""

import csv
import io
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megacore.artifact.files import read_bytes, replace_file, unreadable, workspace_errors
from megacore.config.run import RunConfig
from megacore.errors import ConfigError, DataFormatError, MegacoreError, WorkspaceError, one_line
from megacore.paths import is_dir
from megacore.plan.iteration import Iteration
from megacore.plan.layouts import layout_of
from megacore.plan.machine import Machine, load_machine
from megacore.plan.memory import GIB, estimate_stages
from megacore.plan.operations import BLOOM_2022, MEGACORE, MEGATRON_2021, Software

NEW_COLUMNS = ("predicted_iter_s", "predicted_mem_gib", "predicted_fits", "refused")
_REQUIRED = ("layers", "hidden", "heads", "seq", "gpu", "gpus", "micro_batch", "global_batch")
_MOST_BYTES = 1 << 28
"""Largest table that is read, in bytes."""
_POSITIVE = frozenset(
    {*_REQUIRED, "tp", "pp", "vpp", "cp", "ep", "kv_heads", "ffn", "vocab"} - {"gpu"}
)
"""Columns of sizes, which are at least 1."""
_VOCABULARY = 50_257
"""Entries of the vocabulary of a row that does not name them: GPT-2's."""
_HARDWARE = {
    "b200": "b200",
    "gh200": "h100",
    "h200": "h200",
    "h100": "h100",
    "l40s": "l40s",
    "a100": "a100",
}
"""Hardware files by a part of the column gpu, in lower case; A100's also need its memory."""
_OLD = ("a100",)
"""GPUs whose published runs are mostly of programs without fused attention."""
_MEGATRON_PASSES, _MEGATRON_FIXED = 1.26, 2.75 * GIB
"""Factor on the activations, and fixed bytes, of Megatron and its allocator; fitted on BLOOM's
runs."""
_FP32_GRADIENTS = 3.0
"""Bytes per parameter of the fp32 gradients of BLOOM's BF16 optimizer, which ZeRO-1 does not
divide: 4, less a part of the half-precision gradients that it frees."""
_BLOOM = ("bloom", "bigscience")
"""Names in the columns source and model of runs of BLOOM's preparation."""
_BLOOM_VOCABULARY = 250_880
"""Entries of BLOOM's vocabulary, by which its runs are known without a name."""
_LLAMA = ("llama", "mistral", "qwen")


def predict_table(source: Path, output: Path) -> tuple[int, int]:
    """Add the columns of NEW_COLUMNS to the rows of a CSV file; docs/planning.md lists the others.

    Returns the number of rows, and of those that cannot be modelled.

    Raises:
        DataFormatError: the file is missing, or no CSV file with the required columns.
        FileAccessError: the file cannot be read.
        WorkspaceError: the output cannot be written; what it contained is unchanged.
    """
    columns, rows = _read(source)
    if not is_dir(output.parent):
        raise WorkspaceError(f"{output} cannot be written: {output.parent} is no directory")
    predictions = [predict_row(row) for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*columns, *NEW_COLUMNS])
    writer.writeheader()
    writer.writerows(row | prediction for row, prediction in zip(rows, predictions, strict=True))
    with workspace_errors(output, "write elsewhere (--output)"):
        replace_file(output, text.getvalue().encode("utf-8"))
    return len(rows), sum(bool(each["refused"]) for each in predictions)


def _read(source: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns of a CSV file without those to add, and its rows."""
    try:
        content = read_bytes(source, _MOST_BYTES).decode("utf-8-sig")
        header, *records = [
            record for record in csv.reader(io.StringIO(content, newline=""), strict=True) if record
        ] or [[]]
    except OSError as error:
        raise unreadable(error, source) or DataFormatError(
            f"{source} cannot be read ({error.strerror}): give a CSV file with a header"
        ) from error
    except (ValueError, csv.Error) as error:
        raise DataFormatError(
            f"{source} is no CSV file in UTF-8 ({error}): export the table again"
        ) from error
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise DataFormatError(
            f"{source} has no column {', '.join(missing)}: add it, as docs/planning.md says"
        )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataFormatError(f"{source} has the column {twice[0]!r} twice: remove one of them")
    for number, record in enumerate(records, 1):
        if len(record) != len(header):
            raise DataFormatError(
                f"{source} has {len(record)} values in row {number} and {len(header)} columns: "
                "add or remove commas, or quote a value that contains one"
            )
    rows = [dict(zip(header, record, strict=True)) for record in records]
    columns = [name for name in header if name not in NEW_COLUMNS]
    return columns, [{name: row[name] for name in columns} for row in rows]


def predict_row(row: Mapping[str, str]) -> dict[str, str]:
    """Return the new columns of a row; empty, with a reason in `refused`, if it is not modelled."""
    try:
        iteration = iteration_of(row)
        seconds = iteration.predict().seconds
        memory = memory_of(iteration)
    except (MegacoreError, ValueError) as error:
        return dict.fromkeys(NEW_COLUMNS, "") | {"refused": one_line(error)}
    fits = memory <= iteration.machine.memory_gib * GIB
    return {
        "predicted_iter_s": f"{seconds:.6g}",
        "predicted_mem_gib": f"{memory / GIB:.4g}",
        "predicted_fits": "yes" if fits else "no",
        "refused": "",
    }


def memory_of(iteration: Iteration) -> float:
    """Return the predicted bytes of the rank that needs most."""
    stages = estimate_stages(
        iteration.config,
        iteration.vocab_size,
        iteration.precision,
        iteration.machine.device,
        iteration.layout.data,
    )
    software = iteration.software.state_bytes
    divided = iteration.layout.copies
    if software is None:
        return max(stage.total for stage in stages)
    kept, shared = software
    if _has_slots_for_embeddings(iteration):
        kept += _FP32_GRADIENTS
    if iteration.config.parallel.data_parallel_sharding == "none":
        divided = 1
    return max(
        stage.parameters * (kept + shared / divided)
        + _MEGATRON_PASSES * stage.passes
        + _MEGATRON_FIXED
        for stage in stages
    )


def _has_slots_for_embeddings(iteration: Iteration) -> bool:
    """Return True if embedding and head take the place of a layer each in the pipeline.

    BLOOM's preparation began to divide its models so when it began to use its BF16 optimizer; no
    column tells the optimizer.
    """
    layers, stages = iteration.config.model.num_layers, iteration.layout.pipeline
    return stages > 1 and layers % stages != 0 and (layers + 2) % stages == 0


def iteration_of(row: Mapping[str, str]) -> Iteration:
    """Return the iteration that a row describes.

    Raises:
        ConfigError: a value is missing or wrong, or no configuration has such a run.
        ParallelLayoutError: the layout cannot be divided.
    """
    machine, gpus = _machine(row["gpu"]), _number(row, "gpus")
    old = _is_old(row)
    values, vocab_size = _values(row, old)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{where}: {problem['msg']}" if where else problem["msg"]) from error
    return Iteration(
        config,
        vocab_size,
        machine,
        layout_of(config, gpus, vocab_size),
        config.train.precision,
        software=software_of(row),
    )


def software_of(row: Mapping[str, str]) -> Software:
    """Return the properties of the program of a published run."""
    if not _is_old(row):
        return MEGACORE
    names = f"{row.get('source', '')} {row.get('model', '')}".lower()
    bloom = any(name in names for name in _BLOOM) or _number(row, "vocab", 0) == _BLOOM_VOCABULARY
    return BLOOM_2022 if bloom else MEGATRON_2021


@lru_cache
def _machine(gpu: str) -> Machine:
    text = gpu.lower()
    name = next((file for word, file in _HARDWARE.items() if word in text), None)
    if name is None:
        raise ConfigError(f"gpu is {gpu!r}: no hardware file describes it")
    if name == "a100":
        name = "a100-40gb" if re.search(r"(?<!\d)40", text) else "a100-80gb"
    return load_machine(name)


def _is_old(row: Mapping[str, str]) -> bool:
    """Return True for a run of a program without fused attention, as far as a row tells.

    None of these programs divides sequences.
    """
    on_old = any(name in row["gpu"].lower() for name in _OLD)
    newer = _number(row, "zero", 0) >= 2 or _number(row, "cp", 1) > 1 or _is_llama(row)
    return on_old and not newer


def _recompute(row: Mapping[str, str], old: bool) -> str:
    """Return the recomputation; without one, old programs recompute all layers."""
    text = (row.get("recompute") or "").strip().lower()
    if not text:
        return "full" if old else "none"
    if text not in ("none", "selective", "full"):
        raise ConfigError(f"recompute is {text!r}: give none, selective or full")
    return text


def _precision(row: Mapping[str, str]) -> str:
    """Return the data type; a text that names none means bf16."""
    text = (row.get("precision") or "").lower()
    if "8" in text:
        raise ConfigError(f"precision is {text!r}: FP8 is not modelled")
    if "bf16" in text:
        return "bf16"
    return next((name for name in ("fp16", "fp32") if name in text), "bf16")


def _values(row: Mapping[str, str], old: bool) -> tuple[dict[str, Any], int]:
    """Return the values of the configuration of a row, and the size of its vocabulary."""
    if _number(row, "ep", 1) > 1:
        raise ConfigError(f"ep is {row['ep']}: expert parallelism is not modelled")
    tensor, pipeline = _number(row, "tp", 1), _number(row, "pp", 1)
    heads, zero = _heads(row, tensor), _number(row, "zero", 0)
    llama = _is_llama(row)
    values: dict[str, Any] = {
        "name": "row",
        "data": {"seq_length": _number(row, "seq"), "source": {"kind": "jsonl", "files": ["-"]}},
        "model": {
            "num_layers": _number(row, "layers"),
            "hidden_size": _number(row, "hidden"),
            "num_attention_heads": heads,
            "num_query_groups": _number(row, "kv_heads", heads),
            "make_vocab_size_divisible_by": 128 * tensor,
            "ffn_hidden_size": _number(row, "ffn", 4 * _number(row, "hidden")),
        },
        "parallel": {
            "tensor_model_parallel_size": tensor,
            "context_parallel_size": _number(row, "cp", 1),
            "pipeline_model_parallel_size": pipeline,
            "virtual_pipeline_model_parallel_size": _number(row, "vpp", 1),
            "sequence_parallel": (row.get("seq_parallel") or "").lower() in ("1", "true", "yes")
            and tensor > 1,
            "data_parallel_sharding": "optimizer" if zero == 1 else "none",
        },
        "train": {
            "micro_batch_size": _number(row, "micro_batch"),
            "global_batch_size": _number(row, "global_batch"),
            "recompute": _recompute(row, old),
            "precision": _precision(row),
        },
    }
    if llama:
        values["model"] |= _LLAMA_MODEL
    if zero >= 2:
        values |= {"engine": "deepspeed", "deepspeed": {"zero_stage": zero}}
    return values, _number(row, "vocab", _VOCABULARY)


def _heads(row: Mapping[str, str], tensor: int) -> int:
    """Return the heads: the largest number up to the row's that divides the hidden size.

    No program trains with another: the row has the heads of a different model of its source.
    """
    hidden, heads = _number(row, "hidden"), _number(row, "heads")
    possible = (count for count in range(tensor, heads + 1, tensor) if hidden % count == 0)
    return max(possible, default=heads) if hidden % heads else heads


_LLAMA_MODEL = {
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _is_llama(row: Mapping[str, str]) -> bool:
    return any(name in row.get("model", "").lower() for name in _LLAMA)


def _number(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    """Return a column's integer. Raises ConfigError if there is none and no default."""
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        value = float(text)
        if value != int(value) or value < (column in _POSITIVE):
            raise ValueError
    except (ValueError, OverflowError):
        least = "a positive integer" if column in _POSITIVE else "an integer of 0 or more"
        raise ConfigError(f"{column} is {text!r}: give {least}") from None
    return int(value)
