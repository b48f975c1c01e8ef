"""backup.sh and restore.sh without a database: order of copies and refusals."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests._limits import HANG

ROOT = Path(__file__).resolve().parents[2]
DATABASES = ["prefect", "mlflow", "mlflow_users"]

PG_DUMP = """#!/usr/bin/env bash
[ "${!#}" != "${BROKEN:-}" ] || exit 1
while [ $# -gt 1 ]; do
    if [ "$1" = --file ]; then
        # Write an artifact while the databases are dumped.
        echo "${!#}" >"$2" && touch "$MLFLOW_ARTIFACTS_DESTINATION/during-${!#}"
    fi
    shift
done
"""


class Place:
    """Artifacts, a workspace, and a pg_dump that writes a word."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.artifacts, self.workspace = root / "artifacts", root / "workspace"
        self.artifacts.mkdir()
        (self.artifacts / "model").write_text("weights")
        (self.workspace / "runs").mkdir(parents=True)
        (self.workspace / "runs" / "events.jsonl").write_text("{}")
        for name in ("servers.json", "servers.password"):
            (self.workspace / name).write_text("of this machine")
        self.program("pg_dump", PG_DUMP)

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def call(
        self, script: str, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "MLFLOW_ARTIFACTS_DESTINATION": str(self.artifacts),
        }
        words = [str(ROOT / "deploy" / script), *arguments]
        return subprocess.run(
            words, env=env | variables, capture_output=True, text=True, timeout=HANG, check=False
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    if shutil.which("rsync") is None:
        pytest.skip("rsync is not installed: apt-get install rsync")
    return Place(tmp_path)


def test_files_are_copied_after_the_databases(place: Place) -> None:
    copy = place.root / "copy"
    result = place.call("backup.sh", str(copy), MEGACORE_WORKSPACE=str(place.workspace))
    assert result.returncode == 0, result.stderr
    assert {path.name for path in copy.iterdir()} == {
        *(f"{name}.dump" for name in DATABASES), "SHA256SUMS", "artifacts", "workspace"
    }  # fmt: skip
    assert {path.name for path in (copy / "artifacts").iterdir()} == {
        "model", *(f"during-{name}" for name in DATABASES)
    }  # fmt: skip
    assert (copy / "workspace" / "runs" / "events.jsonl").exists()
    assert not list((copy / "workspace").glob("servers*"))
    assert copy.stat().st_mode & 0o077 == 0, "it holds users' passwords as hashes"


def test_dated_copies_have_separate_names(place: Place) -> None:
    assert place.call("backup.sh", "--dated", str(place.root / "copies")).returncode == 0
    (copy,) = (place.root / "copies").iterdir()
    assert len(copy.name) == len("2026-01-31T235959Z")


def test_failed_backup_leaves_no_copy(place: Place) -> None:
    copy = place.root / "copy"
    failed = place.call("backup.sh", str(copy), BROKEN="mlflow")
    assert failed.returncode == 1
    assert "database mlflow was not copied" in failed.stderr
    assert not list(place.root.glob("copy*")), "what failed is not left to fill the disk"
    assert place.call("backup.sh", f"{copy}/").returncode == 0
    assert (copy / "SHA256SUMS").exists()
    assert place.call("restore.sh", f"{copy}.partial").returncode == 1


@pytest.mark.parametrize(("code", "complete"), [(24, True), (23, False)])
def test_files_removed_during_the_backup_are_tolerated(
    place: Place, code: int, complete: bool
) -> None:
    """Rsync exits with 24 if a listed file has disappeared."""
    rsync = shutil.which("rsync")
    place.program(
        "rsync",
        f'#!/usr/bin/env bash\n{rsync} "$@" || exit\n[[ "$*" != */workspace/* ]] || exit {code}\n',
    )
    copy = place.root / "copy"
    result = place.call("backup.sh", str(copy), MEGACORE_WORKSPACE=str(place.workspace))
    assert (result.returncode == 0, copy.exists()) == (complete, complete)
    assert (
        complete or f"{place.workspace}/ was not copied (rsync ended with code 23" in result.stderr
    )


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "message"),
    [
        ("backup.sh", (), {}, "give one argument"),
        ("backup.sh", ("--dated",), {}, "name a directory"),
        (
            "backup.sh",
            ("x",),
            {"MLFLOW_ARTIFACTS_DESTINATION": ""},
            "set MLFLOW_ARTIFACTS_DESTINATION",
        ),
        ("restore.sh", (), {}, "give one argument"),
        ("restore.sh", ("nowhere",), {}, "holds no SHA256SUMS"),
    ],
)
def test_missing_arguments_and_variables_are_named(
    place: Place, script: str, arguments: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    refused = place.call(script, *arguments, **variables)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_damaged_copy_is_not_restored(place: Place) -> None:
    copy = place.root / "copy"
    assert (
        place.call("backup.sh", str(copy), MEGACORE_WORKSPACE=str(place.workspace)).returncode == 0
    )
    assert "set MEGACORE_WORKSPACE" in place.call("restore.sh", str(copy)).stderr
    (copy / "mlflow.dump").write_text("other bytes")
    place.program("psql", "#!/usr/bin/env bash\necho touched >&2; exit 3\n")
    refused = place.call("restore.sh", str(copy), MEGACORE_WORKSPACE=str(place.workspace))
    assert refused.returncode == 1
    assert "is damaged" in refused.stderr
    assert "touched" not in refused.stderr


def test_files_are_not_restored_to_a_bucket(place: Place) -> None:
    copy = place.root / "copy"
    assert place.call("backup.sh", str(copy)).returncode == 0
    place.program("psql", "#!/usr/bin/env bash\necho touched >&2; exit 3\n")
    refused = place.call("restore.sh", str(copy), MLFLOW_ARTIFACTS_DESTINATION="s3://bucket/path")
    assert refused.returncode == 1
    assert "MLFLOW_ARTIFACTS_DESTINATION is no path" in refused.stderr
    assert "touched" not in refused.stderr


def test_artifacts_may_be_given_as_a_file_url(place: Place) -> None:
    copy = place.root / "copy"
    place.program("pg_dump", PG_DUMP.replace("$MLFLOW_ARTIFACTS_DESTINATION", str(place.artifacts)))
    result = place.call(
        "backup.sh", str(copy), MLFLOW_ARTIFACTS_DESTINATION=f"file://{place.artifacts}"
    )
    assert result.returncode == 0, result.stderr
    assert (copy / "artifacts" / "model").exists()


def test_artifacts_in_a_bucket_are_not_copied(place: Place) -> None:
    result = place.call(
        "backup.sh", str(place.root / "copy"), MLFLOW_ARTIFACTS_DESTINATION="s3://bucket/path"
    )
    assert "s3:// are not copied" in result.stdout
    assert not (place.root / "copy" / "artifacts").exists()
