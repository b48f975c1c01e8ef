"""Program `python -m tests.hosts._flow DATABASE CONF OVERRIDES …`.

Runs the flow `pretrain` on a host, once for each set of overrides (JSON), with a Prefect server in
this process that has a copy of the database. Between two flows the trained run is moved away, so
that each flow trains.
"""

import json
import os
import sys
from pathlib import Path

from prefect.settings import (
    PREFECT_LOCAL_STORAGE_PATH,
    PREFECT_SERVER_ANALYTICS_ENABLED,
    temporary_settings,
)

from tests._prefect import prefect_harness


def main() -> None:
    workspace = Path(os.environ["MEGACORE_WORKSPACE"])
    database, conf, *overrides = sys.argv[1:]
    settings = {
        PREFECT_LOCAL_STORAGE_PATH: workspace / "prefect",
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    with temporary_settings(settings), prefect_harness(Path(database)):
        from flows.pretrain import pretrain

        for number, text in enumerate(overrides):
            pretrain(conf, json.loads(text))
            (run,) = (path for path in (workspace / "runs").glob("[0-9a-f]*") if path.is_dir())
            run.rename(workspace / f"trained-{number}")


if __name__ == "__main__":
    main()
