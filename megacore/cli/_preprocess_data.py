"""Options of tools/preprocess_data.py of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX.

`megacore tokenize` also takes them: SPELLINGS says what becomes of each, and
TOKENIZER_TYPES of each value of --tokenizer-type. Names and meanings are those of
https://github.com/NVIDIA/Megatron-LM, https://github.com/microsoft/Megatron-DeepSpeed and
https://github.com/EleutherAI/gpt-neox.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megacore.cli._options import is_number
from megacore.errors import ConfigError


@dataclass(frozen=True)
class Spelling:
    """Treatment of an option: exactly one of `ours`, `unused` and `refused` is given."""

    values: Literal["none", "one", "several"] = "one"
    ours: str = ""
    """Name of the same option of megacore."""
    unused: str = ""
    """Reason why the option has no effect on the token files."""
    refused: str = ""
    """Nearest thing to do instead."""
    only: str = ""
    """The only value that has no effect; others are refused with `refused`."""


def _flag(**treatment: str) -> Spelling:
    return Spelling("none", **treatment)


_PADDED = "the vocabulary of a model is padded in training, not in token files"
_OTHER_TYPES = "it belongs to types of tokenizers that are refused"
_EXTRA_WHITESPACES = _flag(
    refused="give a model that was trained with remove_extra_whitespaces=false"
)
SPELLINGS: dict[str, Spelling] = {
    # Input and output
    "--json-keys": Spelling("several", ours="--json-key"),
    "--jsonl-keys": Spelling("several", ours="--json-key"),
    "--num-docs": Spelling(unused="the progress bar counts bytes"),
    "--ftfy": _flag(refused="clean the text before, such as with the program ftfy"),
    "--dataset-impl": Spelling(
        only="mmap", unused="it is the only format", refused="give mmap, which all programs read"
    ),
    # Tokenizer
    "--vocab": Spelling(ours="--vocab-file"),
    "--tokenizer-type": Spelling(ours="--tokenizer"),
    "--tokenizer-model": Spelling(ours="--tokenizer-file"),
    "--tokenizer-name-or-path": Spelling(ours="--tokenizer-file"),
    "--vocab-size": Spelling(unused="the vocabulary's file determines it"),
    "--padded-vocab-size": Spelling(unused=_PADDED),
    "--pad-vocab-size": _flag(unused=_PADDED),
    "--no-pad-vocab-size": _flag(unused=_PADDED),
    "--disable-pad-vocab-size": _flag(unused=_PADDED),
    "--make-vocab-size-divisible-by": Spelling(unused=_PADDED),
    "--vocab-extra-ids": Spelling(
        unused="preprocess_data.py sets it to 0; data.tokenizer.vocab_extra_ids adds sentinels"
    ),
    "--seq-length": Spelling(unused="documents are not cut; data.seq_length is that of samples"),
    "--trust-remote-code": _flag(unused="tokenizer.json is read, and no code is run"),
    "--use-gigatoken": _flag(unused="it is used where it gives the same tokens"),
    "--chat-template": Spelling(unused="documents are text, not conversations"),
    "--tokenizer-metadata": Spelling(refused="give --tokenizer-type and the tokenizer's files"),
    "--tokenizer-special-tokens": Spelling(
        "several", refused="add them to the tokenizer's files, and give these"
    ),
    "--special-tokens": Spelling(
        "several", refused="add them to the tokenizer's files, and give these"
    ),
    "--tokenizer-sentencepiece-legacy": _flag(
        refused="give a model that was trained with the special tokens"
    ),
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": _EXTRA_WHITESPACES,
    "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces": _EXTRA_WHITESPACES,
    "--tokenizer-hf-no-use-fast": _flag(
        refused="leave it out: the fast tokenizer, tokenizer.json, is read"
    ),
    "--tokenizer-hf-no-include-special-tokens": _flag(ours="--no-hf-special-tokens"),
    "--tiktoken-pattern": Spelling(unused=_OTHER_TYPES),
    "--tiktoken-num-special-tokens": Spelling(unused=_OTHER_TYPES),
    "--tiktoken-special-tokens": Spelling("several", unused=_OTHER_TYPES),
    "--null-tokenizer-eod-id": Spelling(unused=_OTHER_TYPES),
    "--null-tokenizer-pad-id": Spelling(unused=_OTHER_TYPES),
    "--tokenizer-prompt-format": Spelling(unused=_OTHER_TYPES),
    "--sft-tokenizer-prompt-format": Spelling(unused=_OTHER_TYPES),
    "--image-tag-type": Spelling(unused=_OTHER_TYPES),
    "--force-system-message": _flag(unused=_OTHER_TYPES),
    # Work
    "--chunk-size": Spelling(unused="threads take blocks of 2 MiB"),
    "--log-interval": Spelling(unused="a bar in the terminal shows the progress"),
    "--find-optimal-num-workers": _flag(
        refused="leave it out: without --workers there is one thread per core"
    ),
    "--workers-to-check": Spelling("several", unused="it belongs to --find-optimal-num-workers"),
    "--max-documents": Spelling(unused="it belongs to --find-optimal-num-workers"),
}

_SAME_VOCABULARY = "give a tokenizer.json of the same vocabulary: --tokenizer hf --tokenizer-file"
_HF = ("--tokenizer", "hf", "--hf-as-megatron")
TOKENIZER_TYPES: dict[str, Sequence[str] | str] = {
    "gpt2bpetokenizer": ("--tokenizer", "gpt2-bpe"),
    "bertwordpiecelowercase": ("--tokenizer", "bert-wordpiece", "--lower-case"),
    "bertwordpiececase": ("--tokenizer", "bert-wordpiece", "--no-lower-case"),
    "sentencepiecetokenizer": ("--tokenizer", "sentencepiece"),
    "gptsentencepiecetokenizer": ("--tokenizer", "sentencepiece"),
    "llama2tokenizer": ("--tokenizer", "sentencepiece"),
    "huggingfacetokenizer": _HF,
    "hftokenizer": _HF,
    "pretrainedfromhf": _HF,
    "hfgpt2tokenizer": _HF,
    "spmtokenizer": "give --tokenizer sentencepiece --tokenizer-file MODEL, with which the model's "
    "end of sentence ends a document",
    "tiktokenizer": _SAME_VOCABULARY,
    "tiktokentokenizer": _SAME_VOCABULARY,
    "charleveltokenizer": _SAME_VOCABULARY,
    "nulltokenizer": "write the token ids with megacore.token_files.indexed_dataset_writer",
    "nullmultimodaltokenizer": "only text is tokenized",
    "multimodaltokenizer": "only text is tokenized",
    "sfttokenizer": "conversations are data of the flow finetune",
}
"""Options of megacore, or the nearest thing to do, by the type in lower case."""


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments in megacore's spelling, and a note on each option without effect.

    Raises ConfigError for an option that is refused, or given in two spellings.
    """
    result: list[str] = []
    notes: dict[str, None] = {}
    names: dict[str, str] = {}
    files: dict[str, list[str]] = {}
    kind = ""
    for name, values in _options(arguments):
        spelling = SPELLINGS.get(name, Spelling(ours=name))
        first = names.setdefault(spelling.ours or name, name)
        if first != name:
            raise ConfigError(f"{first} and {name} are one option: give only {first}")
        if name in SPELLINGS:
            _check_count(name, values, spelling)
        if spelling.unused and spelling.only in ("", *values):
            notes[f"{' '.join([name, *values])} has no effect: {spelling.unused}"] = None
        elif spelling.refused:
            raise ConfigError(f"{' '.join([name, *values])} is not supported: {spelling.refused}")
        elif name == "--tokenizer-type":
            kind = values[0].lower()
            result += _of_type(values[0])
        elif spelling.values == "several":
            result += [part for value in values for part in (spelling.ours, value)]
        elif spelling.ours in ("--vocab-file", "--tokenizer-file"):
            files[spelling.ours] = values
        else:
            result += [part for part in (spelling.ours, *values) if part or name]
    if "--tokenizer-type" in names.values() and "--lower-case" in names:
        raise ConfigError("--tokenizer-type and --lower-case are one option: give only the first")
    # GPT-NeoX names the file of any tokenizer --vocab-file, and one of its types has a default.
    if kind in ("hftokenizer", "hfgpt2tokenizer") and "--tokenizer-file" not in files:
        default = ["gpt2"] if kind == "hfgpt2tokenizer" else []
        values = files.pop("--vocab-file", default)
        if values:
            files["--tokenizer-file"] = values
            if "--eod-token" not in names:
                result += ["--eod-token", "<|endoftext|>"]
    return [*result, *(part for name, values in files.items() for part in (name, *values))], [
        *notes
    ]


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the values of each option; values before the first have the name ""."""
    name, values = "", list[str]()
    for argument in arguments:
        if argument.startswith("-") and not is_number(argument):
            if name or values:
                yield name, values
            name, equals, value = argument.partition("=")
            values = [value] if equals else []
        else:
            values.append(argument)
    if name or values:
        yield name, values


def _check_count(name: str, values: Sequence[str], spelling: Spelling) -> None:
    """Raise ConfigError if an option has too few or too many values."""
    fits = {"none": not values, "one": len(values) == 1, "several": bool(values)}
    if not fits[spelling.values]:
        given = " ".join(values) or "nothing"
        needed = {"none": "no value", "one": "one value", "several": "at least one value"}
        raise ConfigError(f"{name} takes {needed[spelling.values]}, and {given} is given")


def _of_type(name: str) -> Sequence[str]:
    """Return megacore's options for a value of --tokenizer-type. Raises ConfigError."""
    treatment = TOKENIZER_TYPES.get(name.lower())
    if treatment is None:
        raise ConfigError(
            f"--tokenizer-type {name} is not known: give GPT2BPETokenizer, BertWordPieceLowerCase, "
            "BertWordPieceCase, SentencePieceTokenizer, GPTSentencePieceTokenizer, Llama2Tokenizer "
            "or HuggingFaceTokenizer"
        )
    if isinstance(treatment, str):
        raise ConfigError(f"--tokenizer-type {name} is not supported: {treatment}")
    return treatment
