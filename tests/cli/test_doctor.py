"""`megacore doctor` on this host only."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacore.cli import app
from megacore.cli.doctor import EXIT_CODE, _launch
from megacore.doctor.subject import RunData, Subject, needs_of
from megacore.errors import ConfigError, MegacoreError
from tests._limits import HANG
from tests.config.test_load import CONF_DIR
from tests.doctor._made import write_tokens

_OTHER_EXIT_CODES = {error.exit_code for error in MegacoreError.__subclasses__()} | {0, 1}


def test_the_exit_code_differs_from_all_errors() -> None:
    assert EXIT_CODE not in _OTHER_EXIT_CODES


def test_an_unwritable_output_is_refused_before_any_check(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--output", str(tmp_path / "no" / "o.json")])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError)
    assert "no is no directory: make it first" in str(result.exception)


def test_json_is_printed_and_written_to_a_file(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "t", [1, 2, 300])
    arguments = [
        "doctor",
        "--quick",
        "--workspace",
        str(tmp_path),
        "--tokens",
        prefix,
        "--output",
        str(tmp_path / "o.json"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--vocab-size", "300", "--json"])
    assert result.exit_code == EXIT_CODE, result.output
    report = json.loads(result.stdout)
    assert json.loads((tmp_path / "o.json").read_text()) == report
    assert report["checks"][0]["check"] == "tokens"
    assert (
        "holds the id 300 (at token 2), and the vocabulary has 300 entries"
        in report["checks"][0]["advice"]
    )


def test_a_table_lists_all_checks(tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    result = CliRunner().invoke(
        app, ["doctor", "--workspace", str(tmp_path), "--output", str(output)]
    )
    assert result.exit_code == 0, result.output
    for name in ("packages", "storage", "toolchain", "operators", "kernels", "bandwidth"):
        assert name in result.output
    assert "1 host" in result.output
    report = json.loads(output.read_text())
    assert report["mode"] == "full"
    assert report["seconds"] < HANG
    (probe,) = report["probes"].values()
    assert probe["values"]["operators"]["cpu_adam"]["problem"] is None
    assert probe["values"]["toolchain"]["ninja"]
    for pair in report["pairs"]:  # none on a machine with a single GPU
        assert pair["hosts"][0] == pair["hosts"][1]
        assert pair["mb_64_gb_s"] > 0


def test_the_documented_commands_have_the_ranks_of_the_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = CONF_DIR.parent
    monkeypatch.chdir(root)
    text = (root / "docs" / "doctor.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ megacore doctor --hostfile hosts --conf (\S+)(.*)$", text, re.M)
    assert len(commands) > 1
    path = tmp_path / "hosts"
    path.write_text("".join(f"host-{number} slots=8\n" for number in range(4)), encoding="utf-8")
    for conf, rest in commands:
        launch, config = _launch(conf, re.findall(r"-o (\S+)", rest), {"hostfile": path})
        subject = Subject.of_launch(launch, tmp_path, config, RunData())
        assert set(subject.hosts.values()) == {8}
        assert needs_of(subject, "cpu", "fp32") is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssh-config", "c"], "--ssh-config is c, and no host is reached without --hostfile"),
        (["-o", "train.seed=1"], "give --conf"),
        (["--tokens", "t"], "give --vocab-size too"),
        (["--vocab-size", "5"], "--vocab-size is 5, and is only for --tokens"),
        (["--output", "/"], "--output is /, which is a directory: give a file"),
        (
            ["--output", "/proc/o.json"],
            "--output is /proc/o.json, which cannot be written (No such file or directory): give "
            "another file",
        ),
        (["--calibrate", "/proc/h.yaml"], "the hardware file is /proc/h.yaml, which cannot be"),
        (["--calibrate", "no/h.yaml"], "no is no directory: make it first"),
        (["--hostfile", "nowhere"], "hostfile nowhere cannot be read"),
    ],
)
def test_conflicting_options_are_refused(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["doctor", "--workspace", str(tmp_path), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
