import pytest

from megacore.cli._options import options_named, with_options
from megacore.config.data import DataConfig
from megacore.errors import DataFormatError


def test_configuration_keys_are_replaced_by_options() -> None:
    assert (
        with_options("set data.source.key, then check data.source")
        == "set --json-key, then check --input"
    )
    assert (
        with_options("data.tokenizer.vocab_file of data.tokenizer") == "--vocab-file of --tokenizer"
    )


def test_an_error_keeps_its_type() -> None:
    with pytest.raises(DataFormatError, match=r"^lower --seq-length$"), options_named():
        raise DataFormatError("lower data.seq_length")


def test_all_replaced_keys_exist() -> None:
    from megacore.cli import _options

    assert {key.split(".")[1] for key in _options._OPTIONS} <= set(DataConfig.model_fields)
