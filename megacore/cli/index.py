"""`megacore index`: index maps of token files, in the sample order of Megatron core."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from megacore.cli._options import VariadicCommand, refuse_sealed
from megacore.errors import ConfigError
from megacore.observe.logging import counted

if TYPE_CHECKING:
    from megacore.data.index_options import Mixture, SentenceOptions

_PREFIX_OPTIONS = (
    "--data-prefix",
    "--train-data-prefix",
    "--valid-data-prefix",
    "--test-data-prefix",
)
_DEFAULT_SHORT = 0.1


class IndexCommand(VariadicCommand):
    """The command `megacore index`; each --data-prefix takes several weights and prefixes."""

    variadic: ClassVar[tuple[str, ...]] = _PREFIX_OPTIONS


def index(
    output: Annotated[
        Path, typer.Option(help="directory for the maps: a new one, or an empty one")
    ],
    seq_length: Annotated[int, typer.Option(min=1, help="tokens per sample")],
    data_prefix: Annotated[
        list[str] | None,
        typer.Option(help="token files without .bin/.idx: P, or P P …, or W P W P … (weights)"),
    ] = None,
    train_data_prefix: Annotated[
        list[str] | None, typer.Option(help="the same, for the train split only")
    ] = None,
    valid_data_prefix: Annotated[
        list[str] | None, typer.Option(help="the same, for the validation split only")
    ] = None,
    test_data_prefix: Annotated[
        list[str] | None, typer.Option(help="the same, for the test split only")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="weights of train, validation and test; default 969,30,1")
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the shuffles")] = 1234,
    train_samples: Annotated[
        int | None,
        typer.Option(min=0, help="samples of the train split; default: those of one epoch"),
    ] = None,
    valid_samples: Annotated[
        int | None,
        typer.Option(min=0, help="samples of the validation split; default: those of one epoch"),
    ] = None,
    test_samples: Annotated[
        int | None,
        typer.Option(min=0, help="samples of the test split; default: those of one epoch"),
    ] = None,
    kind: Annotated[
        Literal["gpt", "bert", "t5"],
        typer.Option(help="gpt: samples of tokens; bert, t5: of whole sentences"),
    ] = "gpt",
    index_style: Annotated[
        Literal["megatron", "neox"],
        typer.Option(help="gpt: program whose order of samples is used"),
    ] = "megatron",
    packing: Annotated[
        Literal["packed", "best_fit", "pack_until_overflow", "unpacked"],
        typer.Option(
            help="gpt: documents end to end; whole ones combined by best fit, or in order as long "
            "as they fit; or one per sample"
        ),
    ] = "packed",
    add_extra_token: Annotated[
        bool, typer.Option(help="gpt: read one token more, as the last label")
    ] = True,
    drop_last_partial: Annotated[
        bool, typer.Option(help="gpt: drop validation's last shorter sample")
    ] = True,
    short_seq_prob: Annotated[
        float | None, typer.Option(help=f"bert, t5: share of shorter samples ({_DEFAULT_SHORT})")
    ] = None,
) -> None:
    """Build the index maps of token files.

    They determine the samples, their order and the blend of data sets.
    """
    from megacore.artifact.files import staged
    from megacore.config.data import DEFAULT_SPLIT
    from megacore.data.index_maps import build_index_maps
    from megacore.data.index_options import IndexOptions
    from megacore.data.sentence_maps import build_sentence_maps

    mixture = _mixture(
        data_prefix,
        {"train": train_data_prefix, "valid": valid_data_prefix, "test": test_data_prefix},
    )
    if split is None and not mixture.whole:
        split = DEFAULT_SPLIT
    options = IndexOptions(
        split=split,
        seq_length=seq_length,
        seed=seed,
        style=index_style,
        packing=packing,
        add_extra_token=add_extra_token,
        drop_last_partial=drop_last_partial,
        sentences=_sentences(kind, short_seq_prob),
    )
    samples = _sample_counts(split, (train_samples, valid_samples, test_samples))
    _check_weights_count(mixture, samples)
    build = build_index_maps if kind == "gpt" else build_sentence_maps
    refuse_sealed(output, "--output")
    with staged(output) as directory:
        counts = build(mixture, directory, options, samples)
    for name, entry in counts.items():
        sys.stdout.write(f"{name}: {_summary(entry)}\n")
    sys.stdout.write(f"wrote {output}\n")


def _mixture(data: list[str] | None, by_split: Mapping[str, list[str] | None]) -> "Mixture":
    """Return the mixture that the prefix options describe. Raises ConfigError."""
    from megacore.data.index_options import Mixture, parse_members

    options = [f"--{name}-data-prefix" for name, values in by_split.items() if values]
    if data and options:
        raise ConfigError(
            f"--data-prefix and {options[0]} are given, but --data-prefix is for all splits: leave "
            "one out"
        )
    if data:
        return Mixture.blend(parse_members(data, "--data-prefix"))
    if not options:
        raise ConfigError(
            "no token files are named: give --data-prefix PREFIX, the path without .bin/.idx"
        )
    return Mixture.per_split(
        *(parse_members(values or [], f"--{name}-data-prefix") for name, values in by_split.items())
    )


def _sample_counts(split: str | None, samples: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Return the number of samples per split; a split of weight 0 defaults to none."""
    from megacore.data.index_options import parse_split

    weights = (1.0, 1.0, 1.0) if split is None else parse_split(split)
    return tuple(
        0 if count is None and weight == 0 else count
        for weight, count in zip(weights, samples, strict=True)
    )


def _check_weights_count(mixture: "Mixture", samples: tuple[int | None, ...]) -> None:
    """Raise ConfigError if a split has weights but no sample count.

    Without a count every sample is taken, so the weights would have no effect.
    """
    from megacore.data.index_options import SPLIT_NAMES

    for name, count in zip(SPLIT_NAMES, samples, strict=True):
        members = getattr(mixture, name)
        if count is None and len(members) > 1 and members[0].weight is not None:
            raise ConfigError(
                f"the {name} split has weights but no --{name}-samples, so that every sample of "
                "each data set would be taken whatever its weight: give a number (0 leaves the "
                "split empty), or leave the weights out"
            )


def _sentences(
    kind: Literal["gpt", "bert", "t5"], short_seq_prob: float | None
) -> "SentenceOptions | None":
    """Return the options of sentence samples, or None for gpt. Raises ConfigError."""
    from megacore.data.index_options import SentenceOptions

    if kind == "gpt":
        if short_seq_prob is not None:
            raise ConfigError(
                "--short-seq-prob is for samples of sentences: give it with --kind bert or t5"
            )
        return None
    short = _DEFAULT_SHORT if short_seq_prob is None else short_seq_prob
    return SentenceOptions(kind, minimum_sentences=2 if kind == "bert" else 1, short_seq_prob=short)


def _summary(entry: Mapping[str, Any]) -> str:
    text = f"{counted(entry['samples'], 'sample')} of "
    text += f"{counted(entry['documents'], 'document')}, " if "documents" in entry else ""
    text += f"{counted(entry['sequences'], 'sequence')} with {counted(entry['tokens'], 'token')}"
    padding = f", {100 * entry['padding']:.3g} % padding" if entry.get("padding") else ""
    if "members" in entry:
        return f"{text}{padding}" + "".join(
            f"\n  {member['prefix']}: {member['drawn']:,} drawn" for member in entry["members"]
        )
    epochs = f"{counted(entry['epochs'], 'epoch')}{padding}"
    return (
        f"{text}, {epochs}"
        f"{', the last one shuffled by itself' if entry.get('separate_final_epoch') else ''}"
    )
