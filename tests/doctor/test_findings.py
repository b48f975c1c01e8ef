import io
import json

from rich.console import Console

from megacore.doctor.compare import compare
from megacore.doctor.findings import (
    REPORT_VERSION,
    Examination,
    Finding,
    PairMeasurement,
    show,
    worst,
)
from tests.doctor._made import facts, probe


def rendered(report: Examination, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def examination(*probes_changes: dict[str, object]) -> Examination:
    probes = [
        probe(name, **changes) for name, changes in zip("abcdef", probes_changes, strict=False)
    ]  # type: ignore[arg-type]
    host_facts = facts(
        *probes,
        pairs=(
            PairMeasurement("a", "b", "gloo", 1e-4, 1e-3, 0.064),
            PairMeasurement("a", "c", "gloo", problem="no [way]"),
        ),
    )
    return Examination(
        host_facts.hosts,
        compare(host_facts),
        "full",
        tuple(pair.as_json() for pair in host_facts.pairs),
        seconds=7.0,
    )


def test_report_shows_problems_first_with_their_advice() -> None:
    shown = rendered(examination({}, {"disk": {"free": 2**30}}, {}))
    lines = [line for line in shown.splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in lines if line.split()[1] != "│"][:2] == [
        "bandwidth",
        "disk",
    ]
    assert "→ /w on b has 1.0 GiB free: make room (megacore clean)" in shown
    assert "all: files 65,536" in shown
    assert "a, c: 500.0 of 900.0 GiB free, nfs4" in shown
    assert "no [way]" in shown  # brackets are not markup
    assert "3 hosts, 19 checks in 7.0 s: 1 error and 1 warning" in shown
    assert max(map(len, shown.splitlines())) <= 160


def test_report_without_problems_is_one_line() -> None:
    report = Examination({"a": 1}, (Finding("disk", "ok", {"a": "much"}),), "quick", seconds=1.0)
    assert "1 host, 1 checks in 1.0 s: all is well" in rendered(report)
    assert "a: much" not in rendered(report)


def test_narrow_terminal_shows_the_complete_advice() -> None:
    shown = "".join(rendered(examination({}, {"disk": {"free": 2**30}}, {}), width=70).split())
    assert "make" in shown
    assert "(megacore" in shown


def test_failed_pairs_are_shown_first() -> None:
    shown = rendered(examination({}, {}, {}))
    assert shown.index("a - c") < shown.index("a - b")
    assert "64.00 │ 1.00" in " ".join(shown.split())


def test_json_has_the_documented_keys() -> None:
    values = json.loads(json.dumps(examination({}, {}, {}).as_json()))
    assert set(values) == {
        "version", "mode", "verdict", "started", "seconds", "hosts", "checks", "pairs", "probes",
    }  # fmt: skip
    assert values["version"] == REPORT_VERSION
    assert values["verdict"] == "error"
    assert set(values["checks"][0]) == {"check", "verdict", "found", "advice", "hosts"}
    assert values["pairs"][0] == {
        "hosts": ["a", "b"],
        "backend": "gloo",
        "latency_us": 100.0,
        "mb_1_ms": 1.0,
        "mb_64_ms": 64.0,
        "mb_1_gb_s": 1.0,
        "mb_64_gb_s": 1.0,
        "problem": None,
    }


def test_worst_returns_the_most_severe_verdict() -> None:
    assert worst([]) == "ok"
    assert worst(["ok", "warning"]) == "warning"
    assert worst(["warning", "error", "ok"]) == "error"
