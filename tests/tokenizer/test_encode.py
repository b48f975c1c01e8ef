"""Tests of the thread setting during encoding."""

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from megacore.tokenizer.encode import _one_thread_per_call
from tests._limits import HANG

NAME = "TOKENIZERS_PARALLELISM"


@pytest.mark.parametrize("before", [None, "true"])
def test_the_last_of_several_encoders_restores_the_setting(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    barrier = Barrier(2)

    def encode(leaves_first: bool) -> str | None:
        with _one_thread_per_call:
            barrier.wait(HANG)
            if leaves_first:
                return os.environ.get(NAME)
            first.result(HANG)
            return os.environ.get(NAME)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(encode, True)
        second = pool.submit(encode, False)
        assert (first.result(HANG), second.result(HANG)) == ("false", "false")
    assert os.environ.get(NAME) == before
