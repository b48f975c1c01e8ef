"""Prefect's database for the servers of tests, migrated once: that takes many seconds."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

from tests._limits import HANG


def write_database(path: Path) -> None:
    """Write a database with tables and without content."""
    from prefect.server.database.dependencies import (
        provide_database_interface,
        temporary_database_interface,
    )
    from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL, temporary_settings

    settings = {PREFECT_SERVER_DATABASE_CONNECTION_URL: f"sqlite+aiosqlite:///{path}"}
    with temporary_database_interface(), temporary_settings(settings):
        asyncio.run(provide_database_interface().create_db())


@contextmanager
def prefect_harness(database: Path) -> Iterator[None]:
    """Run Prefect's server for tests with a copy of a database."""
    from prefect.testing import utilities

    def make_directory() -> str:
        directory = mkdtemp()
        shutil.copy(database, Path(directory, "prefect-test.db"))
        return directory

    with (
        patch.object(utilities, "mkdtemp", make_directory),
        utilities.prefect_test_harness(server_startup_timeout=int(HANG)),
    ):
        yield
