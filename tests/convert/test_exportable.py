"""Before training: what could not be exported afterwards."""

import subprocess
import sys

import pytest

from megacore.config.run import RunConfig
from megacore.convert import exportable
from megacore.errors import ConfigError, ConversionError
from tests.convert._tiny import tiny_config


def with_data(**data: object) -> RunConfig:
    config = tiny_config()
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def test_a_gpt2_is_exportable() -> None:
    exportable(tiny_config(ffn_hidden_size=40, hidden_dropout=0.3))


def test_a_family_without_counterpart_is_refused() -> None:
    with pytest.raises(ConversionError, match="family 'rwkv' has no counterpart"):
        exportable(tiny_config().model_copy(update={"family": "rwkv"}))


def test_grouped_query_attention_is_refused() -> None:
    with pytest.raises(
        ConversionError, match=r"model\.num_query_groups 2 differs .* 4 and GPT2LMHeadModel has no grouped"
    ):
        exportable(tiny_config(num_query_groups=2))
    exportable(tiny_config(num_query_groups=4))


@pytest.mark.parametrize("split", ["1", "95,0,5"])
def test_no_validation_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.split '{split}' leaves no validation samples"):
        exportable(with_data(split=split))


def test_sequences_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_length 1 .* at least 2"):
        exportable(with_data(seq_length=1))


def test_asking_is_cheap() -> None:
    code = "import sys, megacore.convert; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
