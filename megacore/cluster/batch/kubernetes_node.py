"""The entry point of each pod of a Kubernetes job.

python -m megacore.cluster.batch.kubernetes_node --spec FILE --token TOKEN --jobset NAME
"""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from megacore.cluster.batch.kubernetes import GROUP, PORT
from megacore.cluster.batch.meeting import meeting_place
from megacore.cluster.batch.node import Place, run_node
from megacore.cluster.batch.spec import BatchSpec
from megacore.errors import LaunchError, MegacoreError


def main(arguments: list[str] | None = None) -> int:
    """Run this pod's part of the JobSet; what to exit with."""
    parser = argparse.ArgumentParser(
        prog="megacore.cluster.batch.kubernetes_node", description=main.__doc__
    )
    parser.add_argument("--spec", type=Path, required=True, help="the batch job, as JSON")
    parser.add_argument("--token", required=True, help="of the submission")
    parser.add_argument(
        "--jobset", required=True, help="name of the JobSet, and of its headless service"
    )
    options = parser.parse_args(arguments)
    try:
        spec = BatchSpec.read(options.spec)
        return run_node(spec, options.token, place_of(spec, options.jobset, os.environ))
    except MegacoreError as error:
        parser.exit(error.exit_code, f"{error}\n")


def place_of(spec: BatchSpec, jobset: str, environment: Mapping[str, str]) -> Place:
    """Where this pod stands: by the index that an indexed Job gives it. Raises LaunchError."""
    nodes = spec.nodes[1]
    index = environment.get("JOB_COMPLETION_INDEX", "")
    if not index.isdecimal() or int(index) >= nodes:
        raise LaunchError(
            f"JOB_COMPLETION_INDEX is {index!r} in this pod, and launch.nnodes is {nodes}: the "
            "template must make an indexed Job (completionMode: Indexed) of as many completions"
        )
    names = [f"{jobset}-{GROUP}-0-{number}.{jobset}" for number in range(nodes)]
    rank = int(index)
    address, port = (
        meeting_place(spec.launch.rdzv_endpoint, names[0], PORT) if rank == 0 else (names[rank], 0)
    )
    # A pod sees all cores of its node; what it asked for is what it should use.
    cpus = min(len(os.sched_getaffinity(0)), spec.cpus_per_node)
    return Place(rank, names, cpus, address, port)


if __name__ == "__main__":
    sys.exit(main())
