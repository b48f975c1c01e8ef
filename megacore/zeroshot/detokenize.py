"""WikiText as it was before its words were divided: GPT-2 was measured on such text (Radford et al. 2019, section 3.1).

The rules are those of NVIDIA/Megatron-LM's zero-shot evaluation, in their order, so that perplexities can be compared.
"""

import re

_INSIDE = r"{open}\s*([^{close}]*?)\s*{close}"
_PAIRS = ((r"\(", r"\)", "()"), (r"\[", r"\]", "[]"), ("{", "}", "{}"), ('"', '"', '""'), ("'", "'", "''"))
_BEFORE_PAIRS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
_AFTER_PAIRS = (
    *(("= " * (count - 1) + "=", "=" * count) for count in (4, 3, 2)),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """Join what WikiText has divided: numbers, hyphens, punctuation, what is in brackets or quotes, headings."""
    for divided, joined in _BEFORE_PAIRS:
        text = text.replace(divided, joined)
    for opening, closing, signs in _PAIRS:
        inside = _INSIDE.format(open=opening, close=closing)
        text = re.sub(inside, rf"{signs[0]}\1{signs[1]}", text)
    for divided, joined in _AFTER_PAIRS:
        text = text.replace(divided, joined)
    return text


def count_words(text: str) -> int:
    """Words of WikiText as it comes: whatever spaces divide, the end of a line too."""
    return len(text.strip().split(" "))
