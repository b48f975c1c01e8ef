"""Adoption of other programs' files: a commented configuration, checked against their formulas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megacore.adopt import megatron, nanotron, neox
from megacore.adopt.check import Comparison, ForeignModel, compare, megatron_model
from megacore.adopt.data import UNNAMED
from megacore.adopt.read import Source, read_source
from megacore.adopt.rules import Draft, Refused
from megacore.adopt.settings import Place, Settings
from megacore.adopt.write import to_yaml, values_of
from megacore.adopt.zero import put_scale, put_stage, read_json
from megacore.config.load import name_of, parse_config
from megacore.errors import ConfigError

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

Outcome = Literal["adopted", "refused", "incomplete", "other"]
"""Outcome: adopted whole; features refused; values missing; or no training of a language model."""


@dataclass(frozen=True)
class Adoption:
    """Result of reading other programs' files."""

    outcome: Outcome
    name: str
    """Name for the configuration, from the file's."""
    other: str = ""
    """Description of files that train no language model."""
    draft: Draft | None = None
    settings: Settings | None = None
    text: str = ""
    """Configuration file; with refused features only on request; "" if there is none."""
    comparison: Comparison | None = None


def adopt(
    paths: Sequence[Path],
    given: Mapping[str, str] | None = None,
    *,
    program: str | None = None,
    ranks: int | None = None,
    partial: bool = False,
) -> Adoption:
    """Translate files of one run of another program.

    Args:
        paths: the files; of several scripts or programs, only one is read at a time.
        given: values of a script's variables; `1` is its first argument.
        program: program that the files are for; None to detect it.
        ranks: number of ranks, if it is not written.
        partial: True to return a configuration without refused features.

    Raises:
        ConfigError: a file cannot be read, or the files do not belong together.
    """
    source = read_source(paths, given, program, ranks)
    name = name_of(paths[0])
    if source.settings is None:
        return Adoption("other", name, other=source.other)
    settings = source.settings
    files = ", ".join(path.name for path in paths)
    try:
        draft, batch = _translate(source)
    except (ValueError, TypeError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{files}: a value of the model, the batch or the schedule is of the wrong kind "
            f"({error}): correct it"
        ) from error
    title = f"Adopted from {files} ({settings.entry}) by megacore adopt."
    if draft.missing:
        unfinished: Outcome = "refused" if draft.refused else "incomplete"
        return Adoption(unfinished, name, draft=draft, settings=settings)
    config = None
    try:
        config = parse_config({"name": name, **values_of(draft)}, origin="the result")
    except ConfigError as error:
        if not draft.refused:
            draft.refuse("the whole", str(error), "correct these settings")
        else:
            draft.remarks.append(str(error))
    comparison = _compared(source, draft, config, batch)
    if comparison is not None and not comparison.agrees and not draft.refused:
        draft.refused.append(
            Refused("the whole", comparison.text.replace("\n", "; "), "report this difference")
        )
    outcome: Outcome = "refused" if draft.refused else "adopted"
    written = config is not None and (partial or outcome == "adopted")
    text = to_yaml(draft, settings, title, partial=partial) if written else ""
    return Adoption(outcome, name, "", draft, settings, text, comparison)


def _translate(source: Source) -> tuple[Draft, int]:
    """Return the draft of a run, and the samples of its first step."""
    settings = source.settings
    assert settings is not None
    if settings.program in ("megatron", "megatron-deepspeed"):
        draft = megatron.translate(settings, source.json)
        if settings.entry in ("pretrain_hybrid", "pretrain_mamba"):
            draft.refuse(f"{settings.entry}.py", "state-space layers (Mamba)", "pretrain_gpt.py")
        if settings.entry == "pretrain_t5":
            draft.refuse("pretrain_t5.py", "a bias of T5's output layer", "conf/t5-220m.yaml")
    elif settings.program == "neox":
        draft = neox.translate(settings)
    elif settings.program == "nanotron":
        draft = nanotron.translate(settings)
    else:
        draft = _settings_only(source)
    start = draft.get("train.rampup_batch_size.start")
    batch = start or draft.get("train.global_batch_size", 0)
    return draft, batch if isinstance(batch, int) else 0


def _compared(
    source: Source, draft: Draft, config: "RunConfig | None", batch: int
) -> Comparison | None:
    settings = source.settings
    if settings is None or config is None:
        return None
    foreign: ForeignModel | None = None
    if settings.program in ("megatron", "megatron-deepspeed"):
        family = megatron.FAMILIES.get(settings.entry, "gpt")
        if family != "t5":
            replicas = megatron.data_parallel_size(settings, draft)
            foreign = megatron_model(settings, family, replicas)
    elif settings.program == "neox":
        foreign = neox.neox_model(settings, batch)
    elif settings.program == "nanotron":
        foreign = nanotron.nanotron_model(settings, batch)
    return None if foreign is None else compare(foreign, config)


def _settings_only(source: Source) -> Draft:
    """Return the draft of DeepSpeed's JSON or Accelerate's YAML, which have no model."""
    draft, settings = Draft(), source.settings
    assert settings is not None
    place = Place(settings.entry, 1)
    if settings.program == "deepspeed":
        read_json(draft, source.json or {}, place, settings.entry)
        if draft.get("train.precision") == "fp16":
            put_scale(draft)
        stage = draft.values.get("deepspeed.zero_stage")
        put_stage(
            draft, int(stage.value) if stage else 0, [stage.origin if stage else settings.entry]
        )
    else:
        _accelerate(draft, source.content, settings.entry)
    total, ranks = draft.get("train.global_batch_size"), draft.get("launch.nproc_per_node", 1)
    if total is None:
        micro = draft.get("train.micro_batch_size", 1)
        draft.put("train.micro_batch_size", micro, "the file, or 1")
        draft.put("train.global_batch_size", micro * ranks, "one micro batch for each rank")
        draft.ask("train.global_batch_size", "how many samples has a step of all replicas?")
    draft.put("data.source.kind", "prefix", "the file has no data")
    draft.put("data.source.prefix", UNNAMED, "the file has no data")
    draft.ask("data.source.prefix", "which token files? see megacore tokenize")
    draft.ask("model", "the file has no model: the sizes are those of megacore's defaults")
    return draft


def _accelerate(draft: Draft, content: Mapping[str, Any], name: str) -> None:
    """Set the values of Accelerate's YAML, which megacore.foreign reads."""
    from megacore.adopt.settings import Setting
    from megacore.foreign.accelerate import WITHOUT_EFFECT, named_json, read_accelerate

    place = Place(name, 1)
    try:
        claims = list(read_accelerate(content, {}, name))
    except ValueError as error:
        draft.refuse(name, str(error), "the sections parallel and launch")
        return
    divided = {"ddp": None, "zero2": 2, "zero3": 3, "zero3-offload": 3}
    for claim in claims:
        if claim.field == "launch.distributed":
            if claim.value not in divided:
                draft.refuse(claim.clause, "FSDP in pretraining", "engine deepspeed, zero_stage 3")
            elif divided[claim.value] is not None:
                offload = "cpu" if claim.value.endswith("offload") else None
                put_stage(draft, divided[claim.value] or 0, [claim.clause], offload)
        elif claim.field == "train.gradient_accumulation":
            draft.remarks.append(f"{claim.clause}: it follows from the batch sizes")
        elif claim.field in _SHARED:
            draft.put(_SHARED[claim.field], claim.value, claim.clause)
        else:
            draft.refuse(claim.clause, f"{claim.field} of a fine-tuning", "the flow finetune")
    path = named_json(content)
    if path is not None:
        draft.remarks.append(f"deepspeed_config_file is {path}: give that file to megacore adopt")
    for key in WITHOUT_EFFECT & content.keys():
        draft.ignore(Setting(key, content[key], place), "hosts are reached through ssh")


_SHARED = {
    "train.precision": "train.precision",
    "launch.nproc_per_node": "launch.nproc_per_node",
    "launch.nnodes": "launch.nnodes",
    "launch.allow_cpu": "launch.allow_cpu",
    "launch.hostfile": "launch.hostfile",
    "launch.rdzv_endpoint": "launch.rdzv_endpoint",
    "optim.max_grad_norm": "optim.clip_grad",
    "optim.clip_grad": "optim.clip_grad",
}
"""Fields of a fine-tuning that a pretraining has too, by its name for them."""
