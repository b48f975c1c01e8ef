"""The rules of GPT-2's evaluation, by example."""

from pathlib import Path

import pytest

from megacore.zeroshot.texts import count_words, detokenize_wikitext


@pytest.mark.parametrize(
    ("divided", "joined"),
    [
        ("a guest @-@ starring role", "a guest-starring role"),
        ("12 @,@ 345 @.@ 6 metres", "12,345.6 metres"),
        (
            "one , two ; three : four . Five ! Six ? Seven",
            "one, two; three: four. Five! Six? Seven",
        ),
        ("the ( first ) and [ the second ] { third }", "the (first) and [the second] {third}"),
        ('role as " Craig " in " Teddy "', 'role as "Craig" in "Teddy"'),
        ("the ' quoted ' words", "the 'quoted' words"),
        ("the film 's end", "the film's end"),
        ("the actors ' guild", "the actors' guild"),
        (" \n = = = Works = = = \n ", "\n=== Works ===\n"),
        (" \n = = Life = = \n ", "\n== Life ==\n"),
        ("= = = = Deep = = = =", "==== Deep ===="),
        ("at 5 ° C", "at 5°C"),
        ("paid N dollars", "paid 1 dollars"),
        ("the <unk> of x+y", "the <unk> of x+y"),
        ("größe , naïve", "größe, naïve"),
    ],
)
def test_what_was_divided_is_joined(divided: str, joined: str) -> None:
    assert detokenize_wikitext(divided) == joined


def test_words_are_what_spaces_divide_and_ends_of_lines() -> None:
    assert count_words(" \n = Robert <unk> = \n \n He had . \n ") == 9
    assert count_words("one") == 1


def test_the_real_split_has_the_words_of_the_literature(shared_data: Path) -> None:
    """245,569 of the test split of WikiText-2 (Merity et al. 2016, table 1), where the ends of the
    file count too."""
    text = (shared_data / "data/wikitext2-test.txt").read_text(encoding="utf-8")
    assert count_words(text) == 245_569 - 3
