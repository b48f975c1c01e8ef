"""Settings of Prefect and MLflow in the environment."""

import os
from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx
import pytest

from tasks._environment import prepare_environment

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
