"""Small runs of the engine deepspeed, for planning alone."""

from megacore.config import RunConfig
from tests.plan._models import tiny


def deepspeed(stage: int, **overrides: object) -> RunConfig:
    """A tiny GPT with a ZeRO stage; keys are dotted, those of the section `deepspeed` plain."""
    section = {f"deepspeed.{name}": value for name, value in overrides.items() if "." not in name}
    others = {name: value for name, value in overrides.items() if "." in name}
    values = {"engine": "deepspeed", "deepspeed.zero_stage": stage, "launch.nproc_per_node": "auto"}
    return tiny(**values | section | others)
