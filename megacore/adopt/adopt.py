"""Adoption of other programs' files: a commented configuration, checked against their formulas.

Each line of the configuration names the setting that it comes from.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import ValidationError

from megacore.adopt import megatron, nanotron, neox
from megacore.adopt.check import Comparison, ForeignModel, compare
from megacore.adopt.data import put_unnamed
from megacore.adopt.read import read_settings
from megacore.adopt.rules import (
    Draft,
    Entry,
    Place,
    Refused,
    Setting,
    Settings,
    names,
    put_hostfile,
)
from megacore.adopt.zero import put_scale, put_stage, read_json
from megacore.config.load import name_of, parse_config
from megacore.config.validate import key_of
from megacore.errors import ConfigError
from megacore.foreign.files import leaves

if TYPE_CHECKING:
    from megacore.config.run import RunConfig


_PLACE = re.compile(r"\([^()]+:\d+\)")
"""File and line of a setting, in the origin of a value."""
Outcome = Literal["adopted", "refused", "incomplete", "other"]
"""Outcome: adopted whole; features refused; values missing; or no training of a language model."""

_Translation = Callable[[Settings, Draft], None]
_Sizes = Callable[[Settings, Draft], ForeignModel | None]


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
        ConfigError: a file cannot be read, a setting has a value that it cannot have, or the files
            do not belong together.
    """
    settings = read_settings(paths, given, program, ranks)
    name = name_of(paths[0])
    if isinstance(settings, str):
        return Adoption("other", name, other=settings)
    files, draft = ", ".join(path.name for path in paths), Draft()
    failure: Exception | None = None
    try:
        _PROGRAMS[settings.program][0](settings, draft)
    except (ValueError, TypeError, ArithmeticError, AttributeError, LookupError) as error:
        failure = error  # of a wrong value that the draft names, else of one that nothing checks
    if draft.wrong:
        raise ConfigError(f"{files}: {'; '.join(dict.fromkeys(draft.wrong))}") from failure
    if failure is not None:
        raise ConfigError(
            f"{files}: a value of the model, the batch or the schedule is of the wrong kind "
            f"({failure}): correct it"
        ) from failure
    title = f"Adopted from {files} ({settings.entry}) by megacore adopt."
    if draft.missing:
        unfinished: Outcome = "refused" if draft.refused else "incomplete"
        return Adoption(unfinished, name, draft=draft, settings=settings)
    config = None
    try:
        config = parse_config({"name": name, **values_of(draft)}, origin="the result")
    except ConfigError as error:
        if wrong := _wrong_values(draft, error):
            raise ConfigError(f"{files}: {'; '.join(wrong)}: correct it") from error
        if not draft.refused:
            draft.refuse("the whole", str(error), "correct these settings")
        else:
            draft.remarks.append(str(error))
    comparison = None if config is None else _compared(settings, draft, config)
    if comparison is not None and not comparison.agrees and not draft.refused:
        draft.refused.append(
            Refused("the whole", comparison.text.replace("\n", "; "), "report this difference")
        )
    outcome: Outcome = "refused" if draft.refused else "adopted"
    written = config is not None and (partial or outcome == "adopted")
    text = to_yaml(draft, settings, title, partial=partial) if written else ""
    return Adoption(outcome, name, "", draft, settings, text, comparison)


def _wrong_values(draft: Draft, error: ConfigError) -> list[str]:
    """Return a clause for each value of a setting that the configuration's field cannot have."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return []
    from megacore.config.run import RunConfig

    clauses = []
    for item in cause.errors():
        entry = draft.values.get(key_of(item, RunConfig))
        if entry is not None and item["type"] != "value_error" and _PLACE.search(entry.origin):
            clauses.append(f"{entry.origin}: {item['msg'][:1].lower()}{item['msg'][1:]}")
    return clauses


def _compared(settings: Settings, draft: Draft, config: "RunConfig") -> Comparison | None:
    """Compare the model with the program's formulas; None if the settings do not give its sizes."""
    foreign = _PROGRAMS[settings.program][1](settings, draft)
    return None if foreign is None else compare(foreign, config)


def _settings_only(settings: Settings, draft: Draft) -> None:
    """Fill the draft of DeepSpeed's JSON or Accelerate's YAML, which have no model."""
    place = Place(settings.entry, 1)
    if settings.program == "deepspeed":
        read_json(draft, settings.json or {}, place, settings.entry)
        if draft.get("train.precision") == "fp16":
            put_scale(draft)
        stage = draft.values.get("deepspeed.zero_stage")
        put_stage(
            draft, int(stage.value) if stage else 0, [stage.origin if stage else settings.entry]
        )
    else:
        _accelerate(draft, settings.accelerate, settings.entry)
    total = draft.get("train.global_batch_size")
    ranks = draft.get("launch.nproc_per_node", 1) * draft.get("launch.nnodes", 1)
    if total is None:
        micro = draft.get("train.micro_batch_size", 1)
        if "train.micro_batch_size" not in draft.values:
            draft.put("train.micro_batch_size", micro, "not written")
        draft.put("train.global_batch_size", micro * ranks, "one micro batch for each rank")
        draft.ask("train.global_batch_size", "how many samples has a step of all replicas?")
    put_unnamed(draft, "the file has no data")
    draft.ask("model", "the file has no model: the sizes are those of megacore's defaults")


def _no_model(settings: Settings, draft: Draft) -> None:
    """Return no sizes: files of DeepSpeed and Accelerate have no model."""


_PROGRAMS: dict[str, tuple[_Translation, _Sizes]] = {
    "megatron": (megatron.translate, megatron.foreign_model),
    "megatron-deepspeed": (megatron.translate, megatron.foreign_model),
    "neox": (neox.translate, neox.foreign_model),
    "nanotron": (nanotron.translate, nanotron.foreign_model),
    "deepspeed": (_settings_only, _no_model),
    "accelerate": (_settings_only, _no_model),
}
"""Functions of each program: the first fills the draft of a run, the second returns its sizes."""


def _accelerate(draft: Draft, content: Mapping[str, Any], name: str) -> None:
    """Set the values of Accelerate's YAML, which megacore.foreign reads."""
    from megacore.foreign.accelerate import WITHOUT_EFFECT, named_json, read_accelerate

    place, path = Place(name, 1), named_json(content)
    launch: dict[str, Any] = (
        {} if path is None else {"deepspeed_config": {}}
    )  # the JSON is another file
    try:
        claims = list(read_accelerate(content, launch, name))
    except ValueError as error:
        draft.refuse(name, str(error), "the sections parallel and launch")
        return
    zero = {claim.field: claim for claim in claims if not claim.ours}
    for claim in claims:
        if not claim.ours:
            continue
        if claim.field == "launch.distributed":
            if claim.value == "fsdp":
                draft.refuse(
                    claim.clause,
                    "FSDP of Accelerate",
                    "parallel.data_parallel_sharding: parameters",
                )
        elif claim.field == "train.gradient_accumulation_steps":
            draft.remarks.append(f"{claim.clause}: it follows from the batch sizes")
        elif claim.field in _SHARED:
            draft.put(_SHARED[claim.field], claim.value, claim.clause)
        else:
            draft.refuse(claim.clause, f"{claim.field} of a fine-tuning", "the flow finetune")
    if path is not None:
        draft.refuse(
            f"deepspeed_config_file {path}", "settings in another file", f"megacore adopt {path}"
        )
    if draft.get("launch.nnodes", 1) > 1 and "launch.hostfile" not in draft.values:
        put_hostfile(draft)
    if (stage := zero.get("zero_optimization.stage")) is not None:
        for claim in zero.values():
            if claim is not stage and claim.value != "none":
                part = claim.field.split(".")[1]
                draft.put(f"deepspeed.{part}", claim.value, claim.clause)
        put_stage(draft, stage.value, [stage.clause])
    for key in WITHOUT_EFFECT & content.keys():
        draft.ignore(Setting(key, content[key], place), "hosts are reached through ssh")
    named = "\n".join([entry.origin for entry in draft.values.values()] + draft.remarks)
    named += "\n".join(refused.setting for refused in draft.refused)
    for key, value in leaves(content):
        if key not in draft.done and not names(named, key):
            draft.ignore(Setting(key, value, place), "no value of the configuration depends on it")


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


SECTIONS = (
    *("name", "family", "seed", "engine", "data", "model", "optim", "train", "checkpoint"),
    *("resume", "parallel", "deepspeed", "launch"),
)
"""Order of the sections in the file."""
_WIDTH = 100


def to_yaml(draft: Draft, settings: Settings, title: str, *, partial: bool = False) -> str:
    """Return the text of a configuration file.

    Args:
        draft: values with their origins, and what was refused or is without effect.
        settings: settings that it was made from.
        title: first line, without the sign of a comment.
        partial: True to list the refused settings at the top.
    """
    lines = [f"# {title}"]
    if partial and draft.refused:
        lines += ["#", "# Refused, and not in this file: the run differs in these points."]
        lines += _comments(refused.text for refused in draft.refused)
    if draft.questions:
        lines += ["#", "# Questions: values that were not written, marked with ? below."]
        lines += _comments(f"{name}: {question}" for name, question in draft.questions)
    remarks = [*settings.remarks, *draft.remarks]
    if remarks:
        lines += ["#", "# Remarks."]
        lines += _comments(remarks)
    if draft.without_effect:
        lines += ["#", "# Without effect here."]
        lines += _comments(f"{setting}: {reason}" for setting, reason in draft.without_effect)
    questions = {name for name, _ in draft.questions}
    lines += ["", *_block(_nested(draft.values), questions)]
    return "\n".join(lines) + "\n"


def values_of(draft: Draft) -> dict[str, Any]:
    """Return the values of a draft as nested mappings, as the YAML has them."""

    def plain(node: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: node_or_entry.value if isinstance(node_or_entry, Entry) else plain(node_or_entry)
            for key, node_or_entry in node.items()
        }

    return plain(_nested(draft.values))


def _nested(values: Mapping[str, Entry]) -> dict[str, Any]:
    def place(name: str) -> int:
        section = name.split(".")[0]
        return SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)

    tree: dict[str, Any] = {}
    for name in sorted(values, key=place):
        *blocks, leaf = name.split(".")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[leaf] = values[name]
    return tree


def _block(
    node: Mapping[str, Any], asked: set[str], prefix: str = "", depth: int = 0
) -> Iterator[str]:
    for key, value in node.items():
        name, indent = f"{prefix}{key}", "  " * depth
        if isinstance(value, Entry):
            mark = "? " if name in asked else ""
            yield f"{indent}{key}: {_scalar(value.value)}  # {mark}{_line(value.origin)}"
            continue
        if depth == 0:
            yield ""
        yield f"{indent}{key}:"
        yield from _block(value, asked, f"{name}.", depth + 1)


def _scalar(value: Any) -> str:
    """Return a value in YAML's flow style on one line."""
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e7:
        mantissa, _, exponent = repr(value).partition("e")
        if exponent:
            whole = mantissa if "." in mantissa else f"{mantissa}.0"
            return f"{whole}e{exponent}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.strip().removesuffix("\n...").strip()


def _line(text: str) -> str:
    return " ".join(text.split())


def _comments(items: Any) -> Iterator[str]:
    """Yield the lines of a list in comments, wrapped."""
    import textwrap

    for item in dict.fromkeys(items):
        yield from textwrap.wrap(
            _line(item),
            _WIDTH,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_long_words=False,
            break_on_hyphens=False,
        )
