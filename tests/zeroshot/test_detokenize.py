"""Detokenization and word counts of GPT-2's evaluation, by example."""

from pathlib import Path

import pytest

from megacore.zeroshot.texts import count_words, detokenize_wikitext


@pytest.mark.parametrize(
    ("separated", "joined"),
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
def test_separated_punctuation_is_joined(separated: str, joined: str) -> None:
    assert detokenize_wikitext(separated) == joined


def test_ends_of_lines_count_as_words() -> None:
    assert count_words(" \n = Robert <unk> = \n \n He had . \n ") == 9
    assert count_words("one") == 1


def test_the_test_split_of_wikitext_2_has_the_words_of_the_literature(shared_data: Path) -> None:
    """Check the 245,569 words of Merity et al. 2016, table 1.

    They count the ends of the file too.
    """
    text = (shared_data / "data/wikitext2-test.txt").read_text(encoding="utf-8")
    assert count_words(text) == 245_569 - 3
