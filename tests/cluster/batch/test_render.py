import subprocess
from pathlib import Path

import pytest

from megacore.cluster.batch import scheduler as rendering
from megacore.cluster.batch.scheduler import TEMPLATES, render
from megacore.errors import ConfigError, LaunchError
from tests._limits import HANG

INJECTIONS = (
    "$(touch pwned)",
    "; touch pwned",
    "`touch pwned`",
    "' ; touch pwned ; '",
    '" ; touch pwned',
    "{{ 7*7 }}",
)


def filled(text: str, tmp_path: Path, **values: object) -> str:
    path = tmp_path / "mine.j2"
    path.write_text(text)
    return render(str(path), "train.sbatch.j2", "launch.slurm.template", values)


@pytest.mark.parametrize("injection", INJECTIONS)
def test_value_cannot_inject_shell_or_template_code(injection: str, tmp_path: Path) -> None:
    text = filled(
        "printf '%s\\n' {{ single | word }} {{ several | words }}\n",
        tmp_path,
        single=injection,
        several=[injection, "b c"],
    )
    result = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=True
    )
    assert result.stdout.splitlines() == [injection, injection, "b c"]
    assert not list(tmp_path.glob("pwned"))


@pytest.mark.parametrize("value", ["a\nb", "a\x00b", "\x1b[2J"])
def test_control_characters_in_a_value_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written into a batch script"):
        filled("{{ one | word }}", tmp_path, one=value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ nmae }}", "'nmae' is undefined"),
        ("a\n{% if %}\n", "line 2,"),
        ("{{ name | wrod }}", "No filter named 'wrod'"),
    ],
)
def test_error_in_a_template_is_reported_with_its_path(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        filled(text, tmp_path, name="x")
    assert "mine.j2" in str(raised.value)
    assert "see megacore/cluster/batch/templates/train.sbatch.j2" in str(raised.value)


def test_missing_template_of_the_user_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.slurm\.template is no/such, which cannot be read"
    ):
        render("no/such", "train.sbatch.j2", "launch.slurm.template", {})


def test_missing_built_in_template_is_reported_as_broken_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "TEMPLATES", tmp_path)
    with pytest.raises(LaunchError, match="is missing: install megacore again"):
        render(None, "train.sbatch.j2", "launch.slurm.template", {})


def test_templates_are_part_of_the_package_data() -> None:
    from tests.launch._processes import REPOSITORY

    assert sorted(path.name for path in TEMPLATES.iterdir()) == [
        "jobset.yaml.j2",
        "train.sbatch.j2",
    ]
    assert (
        '"megacore.cluster.batch" = ["templates/*.j2"]'
        in (REPOSITORY / "pyproject.toml").read_text()
    )
