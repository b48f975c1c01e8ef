"""One definition of every value a run takes."""

from megacore.config.load import load_config, parse_overrides, read_config
from megacore.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "parse_overrides", "read_config"]
