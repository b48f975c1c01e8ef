import inspect
from collections.abc import Callable
from typing import get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from megacore import __version__
from megacore.cli import app
from megacore.cli._options import options_named, with_options
from megacore.cli.curate import curate
from megacore.cli.index import index
from megacore.cli.tokenize import tokenize
from megacore.config.data import DataConfig
from megacore.errors import ConfigError, DataFormatError


def test_configuration_keys_are_replaced_by_options() -> None:
    assert (
        with_options("set data.source.key, then check data.source")
        == "set --json-key, then check --input"
    )
    assert (
        with_options("data.tokenizer.vocab_file of data.tokenizer") == "--vocab-file of --tokenizer"
    )
    assert with_options("name data.tokenizer.eod_token") == "name --eod-token"


def test_a_remark_on_a_key_that_no_command_has_is_left_out() -> None:
    text = "cut the text (data.source.document_characters cuts text files), or data.source"
    assert with_options(text) == "cut the text, or --input"


def test_an_error_keeps_its_type() -> None:
    with pytest.raises(DataFormatError, match=r"^lower --seq-length$"), options_named():
        raise DataFormatError("lower data.seq_length")


def test_all_replaced_keys_exist() -> None:
    from megacore.cli import _options

    assert {key.split(".")[1] for key in _options._OPTIONS} <= set(DataConfig.model_fields)


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"megacore {__version__}\n")


@pytest.mark.parametrize("command", [[], *([name] for name in get_command(app).commands)])
def test_each_command_has_both_options_of_help(command: list[str]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert short.output == long.output
    assert "Usage:" in short.output


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_a_model_is_given_in_one_of_two_ways(command: str) -> None:
    output = ["--output", "new"] if command == "export" else []
    for model in (["no/model"], ["--checkpoint", "no/model"]):
        result = CliRunner().invoke(
            app, [command, *model, "--tokenizer", "t", *output, *_more(command)]
        )
        assert "no/model" in str(result.exception), result.output
    for model, words in (
        ([], "no model is named"),
        (["a", "--checkpoint", "b"], "MODEL and --checkpoint are both given"),
    ):
        result = CliRunner().invoke(app, [command, *model, *output, *_more(command)])
        assert isinstance(result.exception, ConfigError)
        assert f"{words}: name one, as in megacore {command} KEY" in str(result.exception)


def _more(command: str) -> list[str]:
    """Return the options without which a command is refused."""
    return {"generate": ["--prompt", "a"], "evaluate": ["--passkey", "64"], "export": []}[command]


@pytest.mark.parametrize(
    ("command", "option", "field"),
    [
        (curate, "shard_mb", "curate_shard_mb"),
        (curate, "max_document_mb", "max_document_mb"),
        (curate, "on_bad_line", "on_bad_line"),
        (tokenize, "on_bad_line", "on_bad_line"),
        (tokenize, "sentence_splitter", "sentence_splitter"),
        (tokenize, "language", "language"),
        (index, "index_style", "index_style"),
        (index, "packing", "packing"),
        (index, "add_extra_token", "add_extra_token"),
        (index, "drop_last_partial", "drop_last_partial"),
    ],
)
def test_an_option_has_the_default_and_the_values_of_its_field(
    command: Callable[..., None], option: str, field: str
) -> None:
    parameter = inspect.signature(command).parameters[option]
    kind, info = get_args(parameter.annotation)
    configured = DataConfig.model_fields[field]
    assert parameter.default == configured.default
    assert get_args(kind) == get_args(configured.annotation)
    assert info.max == next((each.le for each in configured.metadata if hasattr(each, "le")), None)
