"""Sampled text of the exported model."""

from pathlib import Path

from megacore.convert.export import write_sample
from megacore.convert.parity import load_exported, load_exported_tokenizer
from tests.convert.conftest import Exported


def test_the_seed_determines_the_text(original: Exported, tmp_path: Path) -> None:
    loaded = load_exported(original.directory), load_exported_tokenizer(original.directory)
    path = tmp_path / "sample.txt"
    texts = [
        write_sample(path, "gpt", *loaded, prompt="def ", new_tokens=20, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert (tmp_path / "sample.txt").read_text(encoding="utf-8") == texts[2] + "\n"


def test_length_exceeds_the_positions_and_an_empty_prompt_starts_a_document(
    original: Exported, tmp_path: Path
) -> None:
    model, tokenizer = (
        load_exported(original.directory),
        load_exported_tokenizer(original.directory),
    )
    lengths = []

    class Counting:
        eos_token_id = tokenizer.eos_token_id

        def __call__(self, text: str, **options: object) -> object:
            return tokenizer(text, **options)

        def decode(self, ids: list[int], **options: object) -> str:
            lengths.append(len(ids))
            assert text or ids[0] == tokenizer.eos_token_id
            return str(tokenizer.decode(ids, **options))

    for text, new_tokens in (("", 3), ("", 80), ("x" * 200, 40)):
        prompt = max(1, len(tokenizer(text)["input_ids"]))
        write_sample(
            tmp_path / "sample.txt",
            "gpt",
            model,
            Counting(),
            prompt=text,
            new_tokens=new_tokens,
            seed=1,
        )
        assert lengths.pop() == prompt + new_tokens
