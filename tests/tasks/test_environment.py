"""Settings of Prefect and MLflow in the environment."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx
import pytest

from megacore.errors import ConfigError, WorkspaceError
from tasks._environment import check_proxies, prepare_environment
from tests._limits import HANG

PROXY = "http://proxy.example.org:3128"
SERVER, ELSEWHERE = "http://127.0.0.1:4200/api", "http://models.example.org/"


@pytest.mark.parametrize(
    ("exceptions", "prepared"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": ".internal, localhost"}, ".internal,localhost,127.0.0.1"),
        ({"no_proxy": "a,", "NO_PROXY": "b"}, "a,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_servers_of_this_host_are_asked_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exceptions: dict[str, str], prepared: str
) -> None:
    environment = {**os.environ, "MEGACORE_WORKSPACE": str(tmp_path), "http_proxy": PROXY}
    for name in ("no_proxy", "NO_PROXY"):
        environment.pop(name, None)
    monkeypatch.setattr(os, "environ", environment | exceptions)
    prepare_environment()
    prepare_environment()
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == (prepared, prepared)
    assert getproxies()["http"] == PROXY
    assert proxy_bypass("127.0.0.1")
    with httpx.Client() as client:
        transports = [client._transport_for_url(httpx.URL(url)) for url in (SERVER, ELSEWHERE)]
    assert transports[0] is client._transport
    assert (transports[1] is client._transport) == (prepared == "*")


@pytest.mark.parametrize(
    ("proxies", "sentence"),
    [
        (
            {"ALL_PROXY": "socks5://me:secret@127.0.0.1:1", "http_proxy": PROXY},
            r"^all_proxy is socks5://\*\*\*@127\.0\.0\.1:1 in the environment, .*: install socksio",
        ),
        (
            {"https_proxy": "gopher://a"},
            r"^https_proxy is gopher://a in .*: correct it or unset it$",
        ),
    ],
)
def test_a_proxy_that_the_http_client_cannot_use_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, proxies: dict[str, str], sentence: str
) -> None:
    others = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    monkeypatch.setattr(os, "environ", others | proxies)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ConfigError, match=sentence):
        check_proxies()


def test_a_proxy_of_http_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"http_proxy": PROXY})
    check_proxies()


@pytest.mark.slow
@pytest.mark.parametrize("words", [("pretrain", "--dry-run"), ("compare", "a", "b")])
def test_a_flow_refuses_such_a_proxy_before_it_starts(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    name, *arguments = words
    result = subprocess.run(
        [sys.executable, "-m", f"flows.{name}", *arguments],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "MEGACORE_WORKSPACE": str(tmp_path), "https_proxy": "gopher://a"},
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: https_proxy is gopher://a in the")


def test_ctrl_c_while_a_flow_is_imported_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from flows import report_uncaught

    assert sys.excepthook is not report_uncaught  # which is only for the command line of a flow
    report_uncaught(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "stopped before the flow began\n"
    report_uncaught(ValueError, ValueError("broken"), None)
    assert capsys.readouterr().err == "ValueError: broken\n"


def test_ctrl_c_is_one_line_from_the_first_import_of_a_flow_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import flows

    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "megacore.errors", Interrupted())  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["-m"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    path = Path(flows.__file__)
    with pytest.raises(KeyboardInterrupt):
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), {"__name__": "flows"})
    assert sys.excepthook.__name__ == "report_uncaught"


def test_a_deleted_working_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(WorkspaceError, match=r"may have been deleted: change to another one"):
        prepare_environment()
