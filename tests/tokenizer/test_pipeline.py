import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from megacore.tokenizer.pipeline import _one_thread_per_call

NAME = "TOKENIZERS_PARALLELISM"


@pytest.mark.parametrize("before", [None, "true"])
def test_of_several_that_encode_the_last_one_restores_the_setting(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    barrier = Barrier(2)

    def encode(first_to_leave: bool) -> str | None:
        with _one_thread_per_call:
            barrier.wait(10)
            if first_to_leave:
                return os.environ.get(NAME)
            left.result(10)
            return os.environ.get(NAME)

    with ThreadPoolExecutor(2) as pool:
        left = pool.submit(encode, True)
        stays = pool.submit(encode, False)
        assert (left.result(10), stays.result(10)) == ("false", "false")
    assert os.environ.get(NAME) == before
