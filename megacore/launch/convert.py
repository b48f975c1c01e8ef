"""Entry point of the conversion: `python -m megacore.launch.convert --config job.json`."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megacore.errors import ConfigError
from megacore.launch.exit_reason import die_with_parent, reported_exit
from megacore.launch.job import ConvertJob

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""transformers reads these when it is imported: an export is compared without a network."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the checkpoint that the job file names; an error is left in the job's exit directory."""
    parser = argparse.ArgumentParser(description="Convert one checkpoint to a transformers directory.")
    parser.add_argument("--config", type=Path, required=True, help="job.json, a ConvertJob")
    job = ConvertJob.read(parser.parse_args(arguments).config)
    with reported_exit(job.exit_directory, int(os.environ.get("RANK", "0"))):
        if job.ranks != 1:
            raise ConfigError(f"a conversion was asked to run on {job.ranks} ranks: it takes 1")
        die_with_parent()
        os.environ.update(_OFFLINE)
        import torch

        from megacore.convert.export import export

        torch.set_num_threads(job.threads_per_rank)
        export(job)


if __name__ == "__main__":
    main()
