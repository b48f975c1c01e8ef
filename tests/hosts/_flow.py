"""Program `python -m tests.hosts._flow DATABASE CONF OVERRIDES`.

Runs the flow `pretrain` on a host with overrides (JSON), and with a Prefect server in this process
that uses the database.
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
    database, conf, overrides = sys.argv[1:]
    settings = {
        PREFECT_LOCAL_STORAGE_PATH: workspace / "prefect",
        PREFECT_SERVER_ANALYTICS_ENABLED: False,
    }
    with temporary_settings(settings), prefect_harness(Path(database)):
        from flows.pretrain import pretrain

        pretrain(conf, json.loads(overrides))


if __name__ == "__main__":
    main()
