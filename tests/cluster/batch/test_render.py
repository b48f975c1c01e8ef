import subprocess
from pathlib import Path

import pytest

from megacore.cluster.batch import scheduler as rendering
from megacore.cluster.batch.scheduler import TEMPLATES, render
from megacore.errors import ConfigError, LaunchError

PLANTS = (
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


@pytest.mark.parametrize("plant", PLANTS)
def test_a_value_is_one_word_of_the_script(plant: str, tmp_path: Path) -> None:
    text = filled(
        "printf '%s\\n' {{ one | word }} {{ more | words }}\n",
        tmp_path,
        one=plant,
        more=[plant, "b c"],
    )
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.splitlines() == [plant, plant, "b c"]
    assert not list(tmp_path.glob("pwned"))


@pytest.mark.parametrize("value", ["a\nb", "a\x00b", "\x1b[2J"])
def test_what_could_begin_another_line_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot stand in a batch script"):
        filled("{{ one | word }}", tmp_path, one=value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{{ nmae }}", "'nmae' is undefined"),
        ("a\n{% if %}\n", "line 2,"),
        ("{{ name | wrod }}", "No filter named 'wrod'"),
    ],
)
def test_a_template_that_cannot_be_filled_is_named(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what) as raised:
        filled(text, tmp_path, name="x")
    assert "mine.j2" in str(raised.value)
    assert "see megacore/cluster/batch/templates/train.sbatch.j2" in str(raised.value)


def test_templates_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"launch\.slurm\.template is no/such, which cannot be read"
    ):
        render("no/such", "train.sbatch.j2", "launch.slurm.template", {})
    monkeypatch.setattr(rendering, "TEMPLATES", tmp_path)
    with pytest.raises(LaunchError, match="is missing: install megacore again"):
        render(None, "train.sbatch.j2", "launch.slurm.template", {})


def test_the_templates_are_installed_with_the_package() -> None:
    from tests.launch._processes import REPOSITORY

    assert sorted(path.name for path in TEMPLATES.iterdir()) == [
        "jobset.yaml.j2",
        "train.sbatch.j2",
    ]
    assert (
        '"megacore.cluster.batch" = ["templates/*.j2"]'
        in (REPOSITORY / "pyproject.toml").read_text()
    )
