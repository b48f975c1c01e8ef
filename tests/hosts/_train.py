"""Program `python -m tests.hosts._train JOB OUTCOME`.

Trains on a host like the task, and writes the error and the time of the end.
"""

import json
import sys
import time
from pathlib import Path

from megacore.cluster.hosts.elastic import choose_hosts
from megacore.hardware import Hardware
from megacore.jobs.run import TrainJob
from megacore.plan.preflight import resolve_launch
from megacore.ranks import stages


def main() -> None:
    path, outcome = map(Path, sys.argv[1:])
    result = {"error": "", "message": ""}
    try:
        job = TrainJob.read(path)
        hosts = choose_hosts(job.config, job.vocab_size, attempt=job.attempt)
        ranks, _ = resolve_launch(job.config, Hardware.detect(), job.vocab_size, hosts=hosts)
        stages.train(job.model_copy(update={"hosts": hosts, "ranks": ranks}))
    except BaseException as error:
        result = {"error": type(error).__name__, "message": str(error)}
    temporary = outcome.with_suffix(".tmp")
    temporary.write_text(json.dumps(result | {"at": time.time()}))
    temporary.rename(outcome)


if __name__ == "__main__":
    main()
