"""Detection of the program that files belong to, and their settings."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megacore.adopt.megatron_flags import MEGATRON
from megacore.adopt.neox import settings_of
from megacore.adopt.neox_keys import NEOX
from megacore.adopt.rules import On, Place, Setting, Settings, ranks_per_host
from megacore.adopt.shell import Script, flags_of, read_script
from megacore.adopt.words import Word
from megacore.artifact.files import parse_json, read_bytes
from megacore.errors import ConfigError
from megacore.foreign.files import YAML_BYTES, leaves, parse_yaml
from megacore.paths import is_file

_OF_SCRIPTS = ("megatron", "megatron-deepspeed")
"""Programs whose settings are flags in a shell script."""
PROGRAMS = (*_OF_SCRIPTS, "neox", "nanotron", "accelerate", "deepspeed")
TRAINING = re.compile(r"(pretrain_(?:gpt|bert|t5|hybrid|mamba))(?:\.py)?$")
"""Programs that train a language model."""
OTHER_PROGRAMS = (
    (
        r"preprocess|analyze_data|data_process|curate|build_|prepare",
        "data preparation: see megacore tokenize",
    ),
    (r"train_rl|grpo", "reinforcement learning, which is absent here"),
    (r"generat|inference|server|text_gen|sample", "generation or inference: see megacore generate"),
    (r"msdp", "the MSDP dialogue system (prompting and evaluation)"),
    (r"multimodal|vlm|mimo|vision", "training of a multimodal model, which is absent here"),
    (r"retriev|ict|orqa|nq\b", "training or evaluation of a retriever, which is absent here"),
    (r"eval|mmlu|zeroshot|tb_analysis|validate", "evaluation: see docs/evaluation.md"),
    (
        r"quantize|prune|export|modelopt|offline_feature|convert|merge|combine|checkpoint",
        "conversion or compression of a checkpoint: see megacore import and export",
    ),
    (r"finetun|tasks/main|glue|race|mnli|qqp|sft", "fine-tuning: see the flow finetune"),
)
"""Descriptions of other programs, by a part of the program's path or of the script's."""
_MULTIPLE = frozenset(
    [
        "--data-path",
        "--train-data-path",
        "--valid-data-path",
        "--test-data-path",
        "--rampup-batch-size",
        "--num-experts",
        "--num-experts-teacher",
        "--cp-comm-type",
        "--recompute-modules",
    ]
)
"""Flags with several values."""
_BOOLEANS = frozenset(
    [
        "--bf16",
        "--fp16",
        "--deepspeed",
        "--swiglu",
        "--sequence-parallel",
        "--checkpoint-activations",
        "--finetune",
        "--no-load-optim",
        "--no-load-rng",
        "--mock-data",
        "--group-query-attention",
        "--recompute-activations",
        "--deepspeed-activation-checkpointing",
        "--no-pipeline-parallel",
        "--use-rotary-position-embeddings",
        "--no-position-embedding",
        "--apply-layernorm-1p",
        "--profile",
        "--reset-iteration",
        "--no-load-lr-state",
        "--squared-relu",
        "--quick-geglu",
        "--openai-gelu",
        "--no-bias-gelu-fusion",
        "--sft",
        "--use-mcore-models",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--log-throughput",
        "--use-flash-attn",
        "--cpu-optimizer",
        "--kd",
        "--mos",
        "--manual-gc",
        "--use-rope-scaling",
        "--add-qkv-bias",
    ]
)
BOOLEANS = _BOOLEANS | {name for name, rule in MEGATRON.exact.items() if isinstance(rule, On)}
_DEEPSPEED_KEYS = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "fp16",
        "bf16",
        "optimizer",
        "gradient_clipping",
        "steps_per_print",
    ]
)
_NEOX_SIGNS = frozenset(
    [
        "pipe_parallel_size",
        "model_parallel_size",
        "data_path",
        "train_data_paths",
        "attention_config",
        "launcher",
        "checkpoint_factor",
        "use_wandb",
        "global_num_gpus",
    ]
)


def read_settings(
    paths: Sequence[Path],
    given: Mapping[str, str] | None = None,
    program: str | None = None,
    ranks: int | None = None,
) -> Settings | str:
    """Return the settings of a run, or a description of files that train no language model.

    Args:
        paths: a script with its DeepSpeed JSON; one or several YAML files of GPT-NeoX; a YAML of
            nanotron or Accelerate; or DeepSpeed's JSON.
        given: values of a script's variables.
        program: program that the files are for; None to detect it.
        ranks: number of ranks, if it is not written.

    Raises:
        ConfigError: a file cannot be read, or the files do not belong together.
    """
    scripts = [path for path in paths if _is_script(path)]
    others = [path for path in paths if path not in scripts]
    if len(scripts) > 1:
        raise ConfigError(
            f"{scripts[0]} and {scripts[1]} are two scripts: give one, with its DeepSpeed JSON"
        )
    if given and not scripts:
        raise ConfigError("--set gives values to the variables of a script, and there is none")
    if program is not None and (program in _OF_SCRIPTS) is not bool(scripts):
        raise ConfigError(
            f"--program is {program}, whose settings are in "
            + ("a shell script, and there is none: " if not scripts else "YAML or JSON files: ")
            + "give its files, or leave --program out"
        )
    contents = [(path, _content(path)) for path in others]
    settings = (
        _of_script(scripts[0], contents, given, program)
        if scripts
        else _of_files(contents, program)
    )
    if isinstance(settings, Settings) and ranks is not None:
        settings.ranks_per_host = ranks_per_host(ranks)
        settings.hosts = ranks // settings.ranks_per_host
        settings.launcher = [Setting("--ranks", [str(ranks)], Place("the command line", 0))]
    return settings


def _is_script(path: Path) -> bool:
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return True
    if path.suffix in (".json", ".yml", ".yaml"):
        return False
    return is_file(path) and path.read_bytes()[:2] == b"#!"


def _content(path: Path) -> tuple[Any, dict[str, int]]:
    """Return the content of a YAML or JSON file, and the line of each key."""
    try:
        text = read_bytes(path, YAML_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}: give another file") from error
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}: give another file") from error
    lines: dict[str, int] = {}
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):
            content = parse_json(text.encode("utf-8"))
            if not isinstance(content, dict) or kind_of(content) is None:
                return content, lines
    try:
        content = parse_yaml(text.replace("\t", "  "), str(path))
    except ConfigError:
        if path.suffix in (".json", ".yml", ".yaml"):
            raise
        return None, lines
    _lines(yaml.compose(text.replace("\t", "  "), Loader=yaml.SafeLoader), "", lines)
    return content, lines


def _lines(node: Any, prefix: str, lines: dict[str, int]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[f"{prefix}{key.value}"] = key.start_mark.line + 1
                _lines(value, f"{prefix}{key.value}.", lines)


_Contents = list[tuple[Path, tuple[Any, dict[str, int]]]]


def _of_files(contents: _Contents, program: str | None) -> Settings | str:
    """Return the settings of YAML and JSON files without a script, or what they are instead."""
    kinds = [program or kind_of(content) for _, (content, _) in contents]
    for (path, _), kind in zip(contents, kinds, strict=True):
        if kind is None:
            return f"{path.name} holds settings of none of {', '.join(PROGRAMS)}"
    if len(set(kinds)) > 1:
        raise ConfigError(
            f"the files belong to {', '.join(map(str, dict.fromkeys(kinds)))}: give those of one "
            "program, or --program"
        )
    kind = kinds[0]
    if kind == "neox":
        settings = settings_of([(str(path), content, lines) for path, (content, lines) in contents])
        if "num_layers" not in settings:
            known = "generation" if "text_gen_type" in settings else "paths and options"
            return (
                f"{', '.join(p.name for p, _ in contents)}: a part of a GPT-NeoX "
                f"configuration ({known}) without a model: give it with the model's file"
            )
        return settings
    if len(contents) > 1:
        raise ConfigError(f"several files of {kind}: give one")
    path, (content, lines) = contents[0]
    if kind == "nanotron":
        return _nanotron(path, content, lines)
    if kind == "deepspeed":
        items = [Setting("--deepspeed_config", [path.name], Place(str(path), 1))]
        return Settings("deepspeed", path.name, items, json=content)
    return Settings("accelerate", path.name, [], accelerate=content)


def kind_of(content: Any) -> str | None:
    """Return the program of a settings file by its keys; None if it is unknown."""
    if not isinstance(content, dict):
        return None
    keys = {str(key).replace("-", "_") for key in content}
    if {"model", "tokens", "parallelism"} <= keys:
        return "nanotron"
    if keys & {"compute_environment", "distributed_type"}:
        return "accelerate"
    known = [key for key in keys if NEOX.rule(key) is not None]
    if keys & {"num_layers", *_NEOX_SIGNS}:
        return "neox"
    signs = {key for key in keys & _DEEPSPEED_KEYS if _in_deepspeeds_form(key, content.get(key))}
    if (signs and len(known) < len(keys)) or keys <= signs:
        return "deepspeed"
    return "neox" if known and len(known) * 2 > len(keys) else None


def _in_deepspeeds_form(key: str, value: Any) -> bool:
    """Return True if a key that other programs have too has a value of DeepSpeed's JSON."""
    if key in ("fp16", "bf16"):
        return isinstance(value, dict)
    return key != "optimizer" or (isinstance(value, dict) and "type" in value)


def _nanotron(path: Path, content: Mapping[str, Any], lines: Mapping[str, int]) -> Settings:
    items = []
    for key, value in leaves(content):
        line = next(
            (
                lines[name]
                for name in (key, key.rsplit(".", 1)[0], key.split(".")[0])
                if name in lines
            ),
            1,
        )
        items.append(Setting(key, value, Place(str(path), line)))
    return Settings("nanotron", path.name, items)


def _of_script(
    path: Path, contents: _Contents, given: Mapping[str, str] | None, program: str | None
) -> Settings | str:
    """Return the flags of the first training that a script starts, or what it does instead."""
    script = read_script(path, given)
    trainings = [launch for launch in script.launches if TRAINING.search(launch.program)]
    remarks = list(dict.fromkeys(script.remarks))
    if trainings:
        launch = trainings[0]
        words = launch.arguments
        match = TRAINING.search(launch.program)
        entry = match[1] if match else ""
        distinct = {tuple(word.text for word in each.arguments) for each in trainings}
        if len(distinct) > 1:
            remarks.append(f"the script starts {len(distinct)} trainings: this is the first")
        launcher = launch.launcher
    else:
        words, names = _fragment(script)
        entry, launcher = "pretrain_gpt", ()
        if script.launches or not words or _starts_something(script.text):
            return _other(path, script)
        remarks.append(
            f"no command trains here: the flags are those of the variables {', '.join(names)}"
        )
    items, stray = _flags(words)
    if stray:
        remarks.append(f"without a value, taken as empty: {', '.join(dict.fromkeys(stray))}")
    unknown = sorted({item.name for item in items if item.unknown and item.name})
    if unknown and script.variables.unset:
        names_ = ", ".join(f"{name} ({place})" for name, place in script.variables.unset.items())
        remarks.append(f"variables without a value: {names_}; --set NAME=VALUE gives one")
    flags = {item.name for item in items}
    deepspeed = bool(flags & {"--deepspeed", "--deepspeed_config", "--zero-stage"})
    kind = program or ("megatron-deepspeed" if deepspeed else "megatron")
    settings = Settings(kind, entry, [_hinted(item, script) for item in items], remarks)
    settings.json = _json(items, script, contents, path)
    _ranks(launcher, settings)
    return settings


def _flags(words: tuple[Word, ...]) -> tuple[list[Setting], list[str]]:
    """Return flags with their values, and unknown words that are no values."""
    items, stray = list[Setting](), list[str]()
    for item in flags_of(words, BOOLEANS):
        if not item.name:
            if item.unknown:
                stray += item.words
            else:
                items.append(Setting(" ".join(item.words) or "''", [], item.place))
            continue
        values = list(item.words)
        if item.name not in _MULTIPLE:
            while len(values) > 1 and re.fullmatch(r"\$\{?\w+\}?", values[-1]):
                stray.append(values.pop())
        unknown = item.unknown and any("$" in v or "<" in v or "`" in v for v in values)
        items.append(Setting(item.name, values, item.place, unknown))
    return items, stray


def _hinted(item: Setting, script: Script) -> Setting:
    """Return a setting whose unknown value is replaced by the comment at its variable."""
    if not item.unknown or not isinstance(item.value, list):
        return item
    for name, value in script.variables.values.items():
        hint = script.hints.get(name, "")
        if isinstance(value, Word) and hint.startswith("<") and item.value == [value.text]:
            return Setting(item.name, [hint], item.place, True)
    return item


def _fragment(script: Script) -> tuple[tuple[Word, ...], list[str]]:
    """Return the flags in the variables of a script that starts nothing, and their names."""
    candidates: dict[str, tuple[Word, ...]] = {}
    for name, value in script.variables.values.items():
        words = tuple(value) if isinstance(value, list) else tuple(value.fields())
        known = [word for word in words if MEGATRON.rule(word.text.partition("=")[0]) is not None]
        if len(known) > 2:
            candidates[name] = tuple(part for word in words for part in word.fields())
    texts = {name: " ".join(word.text for word in words) for name, words in candidates.items()}
    kept = [
        name
        for name in candidates
        if not any(texts[name] in texts[other] and other != name for other in candidates)
    ]
    return tuple(word for name in kept for word in candidates[name]), kept


def _starts_something(text: str) -> bool:
    """Return True if the text of a script names a Python program, which is none that trains."""
    return re.search(r"^[^#\n]*[\w}]\.py\b", text, re.MULTILINE) is not None


def _other(path: Path, script: Script) -> str:
    """Name the kind of a script that does not train a language model."""
    programs = " ".join(launch.program for launch in script.launches)
    by_name = (path.name, programs) if "tasks/main" in programs else (programs, path.name)
    for text in (*by_name, path.parent.name, " ".join(script.commands)):
        for pattern, what in OTHER_PROGRAMS:
            if text and re.search(pattern, text, re.IGNORECASE):
                return f"{path.name}: {what}"
    called = [name.split()[0] for name in script.commands if name.split()]
    starts = "it starts no Python program that trains a language model"
    if script.launches:
        starts = f"it starts {programs}, which is no pretrain_gpt.py, pretrain_bert.py or the like"
    names = ", ".join(dict.fromkeys(called[:6])) or "none"
    return f"{path.name}: {starts} (commands: {names})"


def _ranks(launcher: tuple[Word, ...], settings: Settings) -> None:
    """Set the numbers of ranks and hosts from the launcher's options."""
    per_host = (
        "--nproc_per_node",
        "--nproc-per-node",
        "--num_gpus",
        "--ntasks-per-node",
        "--gpus-per-node",
    )
    hosts = ("--nnodes", "--num_nodes", "--nodes", "-N")
    for option in flags_of(launcher):
        if option.unknown or not option.words or not option.words[0].isdecimal():
            continue
        if option.name in per_host:
            settings.ranks_per_host = int(option.words[0])
        elif option.name in hosts:
            settings.hosts = int(option.words[0])
        else:
            continue
        settings.launcher.append(option)
    names = {word.text.rpartition("/")[2] for word in launcher}
    if settings.ranks_per_host is None and not names & {
        "deepspeed",
        "srun",
        "torchrun",
        "-m",
        "mpirun",
    }:
        settings.ranks_per_host, settings.hosts = (1, 1) if launcher else (None, None)


def _json(
    items: list[Setting], script: Script, contents: _Contents, path: Path
) -> dict[str, Any] | None:
    """Return DeepSpeed's JSON: a given file, one that the script writes, or one next to it."""
    setting = next(
        (each for each in items if each.name in ("--deepspeed_config", "--deepspeed-config")), None
    )
    if contents:
        return _given_json(contents, setting, path)
    if setting is None or not setting.words:
        return None
    name = Path(setting.words[0]).name
    text = script.variables.files.get(name)
    if text is None:
        candidate = path.parent / name
        try:
            text = read_bytes(candidate, YAML_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError):
            return None
    try:
        content = parse_json(text.encode("utf-8"))
    except ValueError:
        try:
            content = parse_yaml(text, name)
        except ConfigError:
            return None
    return content if isinstance(content, dict) else None


def _given_json(contents: _Contents, setting: Setting | None, script: Path) -> dict[str, Any]:
    """Return the given file that `setting` of a script names. Raises ConfigError for others."""
    file, (content, _) = contents[0]
    if setting is None:
        problem = f"belongs to no flag of {script}, which has no --deepspeed_config"
    elif len(contents) > 1:
        problem = f"and {contents[1][0]} are two files for one {setting.name}"
    elif not isinstance(content, dict):
        problem = f"holds no settings, and {setting.name} names DeepSpeed's JSON"
    else:
        return content
    raise ConfigError(f"{file} {problem}: give the script with its DeepSpeed JSON only")
