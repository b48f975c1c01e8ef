"""Whether a configuration can be exported, asked before training starts."""

from megacore.config.run import RunConfig
from megacore.data.splits import parse_split
from megacore.errors import ConfigError, ConversionError

EXPORTED_AS = {"gpt": "GPT2LMHeadModel"}
"""The transformers class of each family that has one."""


def exportable(config: RunConfig) -> None:
    """Return when a model of this configuration can be converted and pass through the gate.

    Raises:
        ConversionError: the family has no counterpart in transformers, or its counterpart lacks an option.
        ConfigError: the gate would have no validation samples, or none long enough to continue.
    """
    if config.family not in EXPORTED_AS:
        raise ConversionError(
            f"family {config.family!r} has no counterpart in transformers: choose one of {', '.join(EXPORTED_AS)}"
        )
    model = config.model
    if model.query_groups != model.num_attention_heads:
        raise ConversionError(
            f"model.num_query_groups {model.num_query_groups} differs from model.num_attention_heads "
            f"{model.num_attention_heads} and {EXPORTED_AS[config.family]} has no grouped-query attention: "
            "remove model.num_query_groups, or train by megacore.launch.pretrain, which exports nothing"
        )
    if parse_split(config.data.split_weights)[1] == 0:
        raise ConfigError(
            f"data.split {config.data.split_weights!r} leaves no validation samples on which the export can be "
            "compared: "
            f"give its second weight a value above 0"
        )
    if config.data.seq_length < 2:
        raise ConfigError(
            f"data.seq_length {config.data.seq_length} leaves no token to predict from a prompt of one: "
            f"raise it to at least 2"
        )
