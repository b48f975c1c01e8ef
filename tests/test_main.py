"""The entry point of the command `megacore`."""

import sys
from types import SimpleNamespace

import pytest

from megacore.__main__ import main


class Interrupted:
    """Module whose import is stopped by Ctrl-C."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megacore.cli", Interrupted())  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    assert end.value.__suppress_context__
    assert capsys.readouterr() == ("", "")


def test_the_command_line_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    cli = SimpleNamespace(main=lambda: calls.append("main"))
    monkeypatch.setitem(sys.modules, "megacore.cli", cli)  # type: ignore[arg-type]
    main()
    assert calls == ["main"]
