"""Translation of data paths and tokenizers, which several programs name alike."""

from typing import Any

from megacore.adopt.rules import (
    BadValueError,
    Draft,
    Setting,
    Settings,
    first,
    integer_of,
    number,
    number_of,
    word,
)

_ENDS = {"llama-3": "<|end_of_text|>", "llama-2": "</s>", "llama2": "</s>", "mistral": "</s>"}
"""End of a document by a part of the tokenizer's name; others have <|endoftext|>."""
WORDPIECE = {"bertwordpiecelowercase": True, "bertwordpiececase": False}
SENTENCEPIECE = frozenset(
    {"sentencepiecetokenizer", "gptsentencepiecetokenizer", "llama2tokenizer", "spmtokenizer"}
)
HUGGING_FACE = frozenset({"huggingfacetokenizer", "pretrainedfromhf"})
_TOKENIZERS = {
    "gpt": "GPT2BPETokenizer",
    "bert": "BertWordPieceLowerCase",
    "t5": "BertWordPieceLowerCase",
}
"""Tokenizer of each training program of Megatron-LM without --tokenizer-type."""
_MULTIPLE = 128
"""Multiple to which Megatron and NeoX pad the vocabulary if no setting gives one."""
MOST_ENTRIES = 2**30
"""Most entries of a vocabulary, as of `data.tokenizer.vocab_size`."""


def prefix_source(path: str) -> dict[str, Any]:
    """Return the source of token files."""
    return {"kind": "prefix", "prefix": path}


def put_unnamed(
    draft: Draft,
    origin: str = "no data is written",
    question: str | None = "which token files? see megacore tokenize",
) -> None:
    """Set a placeholder for token files that no setting names, and ask for them.

    Without a `question`, a setting that names them is refused.
    """
    draft.put("data.source.kind", "prefix", origin)
    draft.put("data.source.prefix", "<path and prefix of the token files>", origin)
    if question is not None:
        draft.ask("data.source.prefix", question)


def blend_of(words: list[str]) -> list[dict[str, Any]] | None:
    """Return the blend of `WEIGHT PATH …`; None if paths have no weights."""
    if len(words) % 2:
        return None
    try:
        weights = [number(text) for text in words[::2]]
    except BadValueError:
        return None
    return [
        {"weight": weight, "source": prefix_source(path)}
        for weight, path in zip(weights, words[1::2], strict=True)
    ]


def put_data(settings: Settings, draft: Draft, family: str) -> None:
    """Set the data of Megatron's flags: one path, a blend, or one for each split."""
    path = settings.get("--data-path")
    parts = [settings.get(f"--{part}-data-path") for part in ("train", "valid", "test")]
    split = settings.get("--split")
    if path is not None:
        _put_path(draft, path)
    elif any(parts):
        _put_splits(draft, parts)
    elif "--mock-data" not in settings and (
        "--data-args-path" in settings or "--per-split-data-args-path" in settings
    ):
        put_unnamed(draft, question=None)
    else:
        put_unnamed(draft)
    if "data.split_blends.train" in draft.values:
        if split is not None:
            draft.ignore(split, "each split has its own data")
    else:
        text = "969,30,1" if split is None else "".join(split.words).strip("'\"").replace(" ", "")
        put_split(draft, text, split or settings.default)
    draft.put("data.shuffle_documents", False, "Megatron keeps the order of documents")
    if family != "gpt":
        draft.put("data.split_sentences", True, f"family {family} reads sentences")
        draft.put("data.append_eod", False, f"family {family} has tokens of its own")
    if family == "t5":
        draft.put("data.span_corruption.mean_span_length", None, "Megatron's whole words")
    fim, rate = settings.get("--fim-data"), settings.get("--fim-rate")
    spm = settings.get("--fim-spm-rate")
    if fim is not None:
        for setting, key in ((rate, "rate"), (spm, "spm_rate")):
            value = number_of(setting, draft, f"data.fim.{key}")
            origins = [] if setting is None or setting.unknown else [setting]
            draft.put(f"data.fim.{key}", 0.5 if value is None else value, *origins, fim)
    draft.ignore_rest("Megatron reads it with --fim-data only", rate, spm)


def put_split(draft: Draft, text: str, origin: Setting | str) -> None:
    """Set the split; an empty test split gets a twentieth of the validation documents."""
    parts = text.split(",")
    parts += ["0"] * (3 - len(parts))
    try:
        weights = [number(part) for part in parts]
    except BadValueError:
        weights = []
    if len(weights) != 3 or min(weights) < 0 or weights[0] <= 0 or weights[1] <= 0:
        draft.refuse(origin, "an empty split", "data.split 969,30,1: every split has documents")
        return
    if weights[2] == 0:
        shown = [f"{weights[0]:g}", f"{weights[1] * 0.95:g}", f"{weights[1] * 0.05:g}"]
        draft.put("data.split", ",".join(shown), origin, "the same training documents")
        draft.remarks.append(
            f"{origin} has no test documents; here each split has some, and a twentieth of the "
            "validation documents become those of the test"
        )
        return
    draft.put("data.split", text, origin)


def _put_path(draft: Draft, path: Setting) -> None:
    words = path.words
    if not words:
        draft.refuse(path, "no path is given", "--data-path PREFIX")
        return
    if len(words) == 1 or (path.unknown and len(words) % 2 and " " in " ".join(words[:1])):
        draft.put("data.source.kind", "prefix", path)
        draft.put("data.source.prefix", words[0], path)
        if path.unknown:
            draft.ask("data.source.prefix", f"{path} has no value: which token files?")
        return
    blend = blend_of(words)
    if blend is None:
        draft.refuse(path, "paths weighted by their size", "data.blend, with a weight for each")
        return
    draft.put("data.blend", blend, path)
    if path.unknown:
        draft.ask("data.blend", f"{path} has paths without a value: which token files?")


def _put_splits(draft: Draft, parts: list[Setting | None]) -> None:
    known = [part for part in parts if part is not None]
    if len(known) < 3:
        for part in known:
            draft.refuse(part, "data for some splits only", "data.split_blends with all three")
        return
    for part, name in zip(known, ("train", "valid", "test"), strict=True):
        words = part.words
        blend = (
            [{"weight": 1.0, "source": prefix_source(words[0])}]
            if len(words) == 1
            else blend_of(words)
        )
        if blend is None:
            draft.refuse(part, "paths weighted by their size", "data.split_blends with weights")
            continue
        draft.put(f"data.split_blends.{name}", blend, part)
        if part.unknown:
            draft.ask(f"data.split_blends.{name}", f"{part} has no value: which token files?")


def put_tokenizer(settings: Settings, draft: Draft, family: str) -> None:
    """Set the tokenizer of Megatron's flags."""
    kind = settings.get("--tokenizer-type")
    name = _TOKENIZERS[family] if kind is None else word(first(kind))
    vocab, merges = settings.get("--vocab-file"), settings.get("--merge-file")
    model = settings.get("--tokenizer-model") or settings.get("--tokenizer-name-or-path")
    choose_tokenizer(draft, name, kind, vocab=vocab, merges=merges, model=model)
    extra = settings.get("--vocab-extra-ids")
    count = integer_of(extra, draft, "data.tokenizer.vocab_extra_ids")
    if extra is not None and count is not None:
        if "data.tokenizer.kind" in draft.values:
            draft.put("data.tokenizer.vocab_extra_ids", count, extra)
        else:
            draft.ignore(extra, "its tokenizer is refused")
    size = settings.get("--vocab-size")
    if size is not None and not size.unknown:  # the formulas are compared with this vocabulary
        integer_of(size, draft, "data.tokenizer.vocab_size", least=1, most=MOST_ENTRIES)
    draft.ignore_rest("it follows from the tokenizer", size, settings.get("--tiktoken-pattern"))
    files = (vocab, merges, settings.get("--tokenizer-model"), model)
    draft.ignore_rest(f"the tokenizer {name} does not read it", *files)


def put_padding(settings: Settings, draft: Draft, name: str, program: str) -> None:
    """Set the multiple to which a program pads the vocabulary: its own times the tensor ranks."""
    setting = settings.get(name)
    multiple = integer_of(setting, draft, "model.make_vocab_size_divisible_by", least=1)
    tensor = draft.get("parallel.tensor_model_parallel_size", 1)
    if (setting is None and tensor == 1) or (setting is not None and multiple is None):
        return
    by = [f"x {tensor} tensor-parallel ranks, as {program} pads"] if tensor > 1 else []
    draft.put(
        "model.make_vocab_size_divisible_by",
        (multiple or _MULTIPLE) * tensor,
        setting or f"{settings.default} {_MULTIPLE}",
        *by,
    )


def choose_tokenizer(
    draft: Draft,
    name: str,
    kind: Setting | None,
    *,
    vocab: Setting | None,
    merges: Setting | None,
    model: Setting | None,
) -> None:
    """Set the tokenizer that Megatron and NeoX call `name`."""
    origin: Setting | str = kind or f"the default {name}"
    low = name.lower()
    if low == "gpt2bpetokenizer":
        draft.put("data.tokenizer.kind", "gpt2-bpe", origin)
        _file(draft, "vocab_file", vocab, "GPT-2's vocab.json")
        _file(draft, "merge_file", merges, "GPT-2's merges.txt")
    elif low in WORDPIECE:
        draft.put("data.tokenizer.kind", "bert-wordpiece", origin)
        _file(draft, "vocab_file", vocab, "BERT's vocab.txt")
        draft.put("data.tokenizer.lower_case", WORDPIECE[low], origin)
    elif low in SENTENCEPIECE:
        draft.put("data.tokenizer.kind", "sentencepiece", origin)
        _file(draft, "model_file", model or vocab, "the .model of SentencePiece")
    elif low in HUGGING_FACE or low == "hftokenizer":
        draft.put("data.tokenizer.kind", "hf", origin)
        source = model if model is not None or low in HUGGING_FACE else vocab
        _file(draft, "name", source, "the tokenizer.json or a repository of the hub")
        title = str(draft.get("data.tokenizer.name", "")).lower()
        end = next((token for part, token in _ENDS.items() if part in title), "<|endoftext|>")
        draft.put("data.tokenizer.eod_token", end, "its end of a document")
        draft.ask("data.tokenizer.eod_token", f"does the vocabulary end documents with {end}?")
    else:
        near = "data.tokenizer of kind hf, sentencepiece, gpt2-bpe or bert-wordpiece"
        draft.refuse(
            kind or f"the default {name}",
            "token files without a tokenizer" if low == "nulltokenizer" else "this tokenizer",
            near,
        )


def _file(draft: Draft, key: str, setting: Setting | None, title: str) -> None:
    name = f"data.tokenizer.{key}"
    if setting is None:
        draft.put(name, f"<path of {title}>", "no file is written")
        draft.ask(name, f"where is {title}?")
        return
    draft.put(name, word(first(setting)), setting)
    if setting.unknown:
        draft.ask(name, f"{setting} has no value: where is {title}?")
