"""Steps of the stage curate: deduplication, rules on quality, languages, URLs and personal data.

Options have the names and defaults of datatrove's blocks, which carry out the steps. The executors
run the stage's tasks here or on a cluster.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from megacore.config.base import Section, keyed, unkeyed

_CALLABLE = re.compile(r"[^:]+:[A-Za-z_]\w*")


class _Words(Section):
    """Step that counts words or sentences."""

    language: str | None = keyed(None, min_length=1)
    """Language of datatrove's tokenizer of words, such as `en` or `zh`, which needs the libraries
    that datatrove names (for most languages spaCy). Null means words of letters and digits, and
    sentences that end with a mark, in any language that separates words."""


class DedupStep(Section):
    """Step that removes duplicates by comparing all shards."""

    across_sources: bool = keyed(False, omit_default=True)
    """True to also remove documents of which an earlier source of the blend keeps a duplicate. The
    earlier sources' documents are compared as they are after all steps."""


class ExactDedupStep(DedupStep):
    """Removal of documents whose text occurred earlier in the corpus."""

    step: Literal["exact_dedup"] = keyed()
    """Type of the step."""


class MinhashDedupStep(_Words, DedupStep):
    """Removal of near duplicates by MinHash and locality-sensitive hashing (Broder 1997).

    Two documents with a share s of common n-grams become candidates with probability
    1 - (1 - s^hashes_per_bucket)^num_buckets. One document of each cluster is kept.
    """

    step: Literal["minhash_dedup"] = keyed()
    """Type of the step."""
    n_grams: int = keyed(5, ge=1, le=100)
    """Number of words per n-gram."""
    num_buckets: int = keyed(14, ge=1, le=1000)
    """Number of buckets (bands)."""
    hashes_per_bucket: int = keyed(8, ge=1, le=1000)
    """Number of hashes per bucket (rows of a band)."""
    seed: int = keyed(1, ge=0, lt=2**32)
    """Seed of the hash functions."""


class ExtractTextStep(Section):
    """Extraction of the main text of web pages from HTML, with trafilatura (Barbaresi 2021).

    Comments are left out. Pages without a text are removed; texts of WET files stay as they are.
    """

    step: Literal["extract_text"] = keyed()
    """Type of the step."""
    favour_precision: bool = keyed(True)
    """True for less text, but hardly any menus and advertisements."""
    seconds: float = keyed(30.0, gt=0, le=3600)
    """Seconds of processor time after which a page is given up and removed."""


class GopherQualityStep(_Words):
    """Gopher's rules on words and symbols (Rae et al. 2021, arXiv:2112.11446). Null is no limit."""

    step: Literal["gopher_quality"] = keyed()
    """Type of the step."""
    min_doc_words: int | None = keyed(50, ge=0)
    """Least number of words of a document, without pure symbols."""
    max_doc_words: int | None = keyed(100_000, ge=1)
    """Largest number of words of a document."""
    min_avg_word_length: float | None = keyed(3, ge=0)
    """Least mean length of a word in characters."""
    max_avg_word_length: float | None = keyed(10, gt=0)
    """Largest mean length of a word in characters."""
    max_symbol_word_ratio: float | None = keyed(0.1, ge=0)
    """Largest number of `#`, and of ellipses, per word."""
    max_bullet_lines_ratio: float | None = keyed(0.9, ge=0, le=1)
    """Largest fraction of lines that begin with a bullet point."""
    max_ellipsis_lines_ratio: float | None = keyed(0.3, ge=0, le=1)
    """Largest fraction of lines that end with an ellipsis."""
    max_non_alpha_words_ratio: float | None = keyed(0.8, ge=0, le=1)
    """Least fraction of words with a letter; the name is datatrove's."""
    min_stop_words: int | None = keyed(2, ge=0)
    """Least number of different stop words."""
    stop_words: tuple[str, ...] | None = keyed(None)
    """Stop words; null means Gopher's eight English ones."""


NGrams = tuple[tuple[Annotated[int, Field(ge=1)], Annotated[float, Field(ge=0)]], ...]


class GopherRepetitionStep(_Words):
    """Gopher's rules on repetition (Rae et al. 2021, table A1). Null is no limit."""

    step: Literal["gopher_repetition"] = keyed()
    """Type of the step."""
    dup_line_frac: float | None = keyed(0.3, ge=0, le=1)
    """Largest fraction of lines that repeat an earlier one."""
    dup_para_frac: float | None = keyed(0.3, ge=0, le=1)
    """Largest fraction of paragraphs that repeat an earlier one."""
    dup_line_char_frac: float | None = keyed(0.2, ge=0, le=1)
    """Largest fraction of characters in repeated lines."""
    dup_para_char_frac: float | None = keyed(0.2, ge=0, le=1)
    """Largest fraction of characters in repeated paragraphs."""
    top_n_grams: NGrams = keyed(((2, 0.2), (3, 0.18), (4, 0.16)))
    """Pairs of n and the largest fraction of characters in the most frequent n-gram."""
    dup_n_grams: NGrams = keyed(((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)))
    """Pairs of n and the largest fraction of characters in n-grams that occur again."""


class C4QualityStep(_Words):
    """C4's rules (Raffel et al. 2019, arXiv:1910.10683), which also remove lines of a document."""

    step: Literal["c4_quality"] = keyed()
    """Type of the step."""
    split_paragraph: bool = keyed(True)
    """True to apply the rules to lines, false to sentences."""
    remove_citations: bool = keyed(True)
    """True to remove Wikipedia's citation marks."""
    filter_no_terminal_punct: bool = keyed(True)
    """True to remove lines that do not end with a punctuation mark."""
    min_num_sentences: int = keyed(5, ge=-1)
    """Least number of sentences in the remaining lines; -1 is no limit."""
    min_words_per_line: int = keyed(3, ge=-1)
    """Lines with fewer words are removed; -1 is no limit."""
    max_word_length: int = keyed(1000, ge=-1)
    """Lines with a longer word, in characters, are removed; -1 is no limit."""
    filter_lorem_ipsum: bool = keyed(True)
    """True to remove documents with `lorem ipsum`."""
    filter_javascript: bool = keyed(True)
    """True to remove lines with `javascript`."""
    filter_curly_bracket: bool = keyed(True)
    """True to remove documents with `{`."""
    filter_policy: bool = keyed(True)
    """True to remove lines about cookies and terms of use."""


class FineWebQualityStep(_Words):
    """FineWeb's rules on lines (Penedo et al. 2024, arXiv:2406.17557)."""

    step: Literal["fineweb_quality"] = keyed()
    """Type of the step."""
    line_punct_thr: float = keyed(0.12, ge=0, le=1)
    """Least fraction of lines that end with a punctuation mark."""
    line_punct_exclude_zero: bool = keyed(False)
    """True to keep documents without such a line."""
    stop_chars: tuple[str, ...] | None = keyed(None, min_length=1)
    """Marks that end a line; null means those of all scripts."""
    short_line_thr: float = keyed(0.67, ge=0, le=1)
    """Largest fraction of short lines."""
    short_line_length: int = keyed(30, ge=0)
    """Length of a short line in characters, or less."""
    char_duplicates_ratio: float = keyed(0.01, ge=0)
    """Largest fraction of characters in repeated lines."""
    new_line_ratio: float = keyed(0.3, ge=0)
    """Largest number of line breaks per word."""


class LanguageStep(Section):
    """Language identification with a fastText model."""

    step: Literal["language_id"] = keyed()
    """Type of the step."""
    languages: tuple[str, ...] | None = keyed(None, min_length=1)
    """Labels of the model that are kept, such as `en` (ft176) or `eng_Latn` (glotlid); null keeps
    all."""
    language_threshold: float = keyed(0.65, ge=0, le=1)
    """Score above which a document is kept."""
    backend: Literal["ft176", "glotlid"] = keyed("ft176")
    """Form of the labels, and the model that is downloaded without `model`."""
    model: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a fastText model. The key contains its content. Null downloads the backend's model
    once."""
    label_only: bool = keyed(False)
    """True to remove nothing: languages are only counted for the report."""


class UrlStep(Section):
    """Removal of documents by lists of domains, addresses and words in addresses.

    A list is a text file with an entry per line; lines that begin with # are comments.
    """

    step: Literal["url"] = keyed()
    """Type of the step."""
    field: str = keyed("url", min_length=1)
    """Field or column with the document's URL."""
    extra_domains: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a list of domains, with or without subdomains."""
    extra_urls: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a list of complete URLs."""
    banned_words: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a list of words that no URL may have."""
    banned_subwords: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a list of words that no URL may have even inside of other words."""
    soft_banned_words: str | None = keyed(None, resolved="curate", min_length=1)
    """Path of a list of words of which a URL has fewer than `soft_word_threshold`."""
    soft_word_threshold: int = keyed(2, ge=1)
    """Number of soft banned words that removes a document."""
    use_integrated_lists: bool = keyed(True)
    """True to also apply the lists of datatrove, which are for adult and similar sites."""


class PiiStep(Section):
    """Replacement of email addresses and IP addresses in the text."""

    step: Literal["pii"] = keyed()
    """Type of the step."""
    remove_emails: bool = keyed(True)
    """True to replace email addresses."""
    remove_ips: bool = keyed(True)
    """True to replace IPv4 addresses."""
    only_remove_public_ips: bool = keyed(True)
    """True to keep addresses of private networks."""
    email_replacement: tuple[str, ...] | None = keyed(None, min_length=1)
    """Replacements, used in turn within a document; null means addresses at example.com."""
    ip_replacement: tuple[str, ...] | None = keyed(None, min_length=1)
    """Replacements, used in turn within a document; null means addresses that do not answer."""


class PythonStep(Section):
    """Function that keeps, removes or changes a document."""

    step: Literal["python"] = keyed()
    """Type of the step."""
    function: str = keyed(resolved="curate")
    """Function as `module:name` or `path/to/file.py:name`. It receives a dictionary with text,
    source and the document's other fields, and returns True to keep it, False to remove it, or a
    changed dictionary. The key contains the content of its file."""

    @field_validator("function")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not _CALLABLE.fullmatch(value):
            raise ValueError(
                f"{value!r} names no function: give module:name or path/to/file.py:name"
            )
        return value


CurateStep = Annotated[
    ExactDedupStep
    | MinhashDedupStep
    | ExtractTextStep
    | GopherQualityStep
    | GopherRepetitionStep
    | C4QualityStep
    | FineWebQualityStep
    | LanguageStep
    | UrlStep
    | PiiStep
    | PythonStep,
    Field(discriminator="step"),
]


def compares_sources(steps: Sequence[CurateStep]) -> bool:
    """Return True if a step removes duplicates of earlier sources."""
    return any(isinstance(step, DedupStep) and step.across_sources for step in steps)


def check_across_sources(steps: Sequence[CurateStep], sources: int | None = None) -> None:
    """Raise ValueError if steps compare sources of which there is one, or after which text changes.

    Earlier sources are compared after all steps, so that duplicates would be missed silently. With
    `sources` None their number is not checked.
    """
    if compares_sources(steps) and sources == 1:
        raise ValueError(
            "data.curate has a step with across_sources, but there is only one source: give "
            "data.blend several, or leave across_sources out"
        )
    compared = ""
    for step in steps:
        if isinstance(step, DedupStep) and step.across_sources:
            compared = step.step
        elif compared and isinstance(step, PiiStep | C4QualityStep | ExtractTextStep):
            raise ValueError(
                f"data.curate changes text by {step.step} after {compared} with across_sources, "
                f"which compares with changed text of earlier sources: put {step.step} before it"
            )


class CurateSteps(Section):
    """List of steps in a file of its own."""

    curate: tuple[CurateStep, ...] = keyed(key="curate", min_length=1)
    """Steps in order."""

    @field_validator("curate")
    @classmethod
    def _steps_agree(cls, value: tuple[CurateStep, ...]) -> tuple[CurateStep, ...]:
        check_across_sources(value)
        return value


class LocalExecutor(Section):
    """Processes of this host."""

    kind: Literal["local"] = unkeyed()
    """Type of the executor."""


class SlurmExecutor(Section):
    """Array jobs of Slurm, one for the tasks of each phase."""

    kind: Literal["slurm"] = unkeyed()
    """Type of the executor."""
    partition: str | None = unkeyed(None, min_length=1)
    """Partition (queue); null means the cluster's default."""
    account: str | None = unkeyed(None, min_length=1)
    """Account to charge; null means the user's default."""
    qos: str | None = unkeyed(None, min_length=1)
    """Quality of service (--qos); null means the user's default."""
    time_limit: str | None = unkeyed(None, min_length=1)
    """Wall-clock limit of an element of the array in sbatch's format (`12:00:00`); null means the
    limit of the partition."""
    memory: str | None = unkeyed(None, min_length=1)
    """Memory of an element in sbatch's format (--mem), such as `4G`; null means the partition's
    default."""
    arguments: tuple[str, ...] = unkeyed(())
    """Additional options of sbatch, one word each, such as `--constraint=cpu`."""
    retries: int = unkeyed(2, ge=0)
    """Number of times in a row that tasks are submitted again without one of them being done."""


class RayExecutor(Section):
    """Remote functions on a Ray cluster."""

    kind: Literal["ray"] = unkeyed()
    """Type of the executor."""
    address: str | None = unkeyed(None, min_length=1)
    """Address of the cluster, such as `auto` or `head:6379`; null starts one on this host."""
    retries: int = unkeyed(2, ge=0)
    """Number of retries of a task whose process or node was lost."""


CurateExecutor = Annotated[LocalExecutor | SlurmExecutor | RayExecutor, Field(discriminator="kind")]


class ChosenExecutor(Section):
    """Executor on a command line."""

    executor: CurateExecutor = unkeyed()
    """Executor of the tasks."""
