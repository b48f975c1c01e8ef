"""Small configurations of the engine deepspeed for tests of planning."""

from megacore.config import RunConfig
from tests.plan._models import tiny


def deepspeed(stage: int, **overrides: object) -> RunConfig:
    """Return a tiny GPT with a ZeRO stage.

    Keys with a dot are complete names; others belong to the section `deepspeed`.
    """
    section = {f"deepspeed.{name}": value for name, value in overrides.items() if "." not in name}
    others = {name: value for name, value in overrides.items() if "." in name}
    values = {"engine": "deepspeed", "deepspeed.zero_stage": stage, "launch.nproc_per_node": "auto"}
    return tiny(**values | section | others)
