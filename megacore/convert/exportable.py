"""Whether a configuration can be exported, asked before training starts."""

from typing import Literal

from megacore.config.run import RunConfig
from megacore.convert.counterparts import counterpart
from megacore.data.splits import parse_split
from megacore.errors import ConfigError

Dtype = Literal["float32", "bfloat16"]
"""Types of exported weights."""


def exportable(config: RunConfig) -> None:
    """Return when a model of this configuration can be converted and pass through the gate.

    Raises:
        ConversionError: no class of transformers is a model of this configuration; what to set is named.
        ConfigError: the gate would have no validation samples, or none long enough to continue.
    """
    counterpart(config.family, config.model)
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
