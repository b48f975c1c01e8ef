"""Zero-shot scores, compared with transformers on the same weights, one sequence at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megacore.config.model import ModelConfig
from megacore.config.train import PasskeyConfig
from megacore.convert.model_source import find_model
from megacore.errors import ConfigError
from megacore.generate.weights import load_model
from megacore.models.gpt import GPTModel
from megacore.parallel.mesh import ProcessMesh
from megacore.tokenizer import Tokenizer
from megacore.zeroshot.score import PasskeyScore, ZeroshotScorer, _Read
from megacore.zeroshot.texts import Passage, WikiText, read_lambada, read_wikitext
from tests.generate import _tiny
from tests.zeroshot import _texts

VOCAB = 300
READS = ((60, 5), (40, 30), (9, 1), (33, 2))
"""Tokens and scored predictions of sequences that share batches."""


@dataclass(frozen=True)
class Setup:
    """One model in transformers and in megacore, and the texts."""

    theirs: Any
    ours: GPTModel
    tokenizer: Tokenizer
    wikitext: WikiText
    passages: list[Passage]

    def scorer(self, batch_size: int = 4) -> ZeroshotScorer:
        return ZeroshotScorer(
            self.ours,
            ProcessMesh.serial(),
            torch.device("cpu"),
            vocab_size=VOCAB,
            batch_size=batch_size,
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    root: Path = tmp_path_factory.mktemp("score")
    tokenizer = _tiny.write_tokenizer(root / "tokenizer", VOCAB)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": _tiny.POSITIONS,
    }
    config = GPTNeoXConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, bos_token_id=0, eos_token_id=0
    )
    theirs = GPTNeoXForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(root / "saved")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source = find_model(root / "saved")
    yield Setup(
        theirs,
        load_model(source, ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32),
        tokenizer,
        read_wikitext(_texts.write_wikitext(root / "wiki"), tokenizer),
        read_lambada(_texts.write_lambada(root / "lambada"), tokenizer),
    )
    torch.set_num_threads(threads)


def token_losses(theirs: Any, ids: list[int]) -> torch.Tensor:
    """Return the loss of every token but the first, by transformers."""
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        logits = theirs(tokens[:, :-1]).logits[0].double()
    return F.cross_entropy(logits, tokens[0, 1:], reduction="none")


@pytest.mark.parametrize("stride", [None, 64, 20, 1])
def test_perplexities_equal_transformers(setup: Setup, stride: int | None) -> None:
    ids, length = setup.wikitext.tokens.tolist(), _tiny.POSITIONS
    if stride == 1:
        ids = ids[:300]
    text = WikiText(setup.wikitext.tokens[: len(ids)], setup.wikitext.words)
    losses: list[torch.Tensor] = []
    counted = 0
    for start in range(0, len(ids), stride or length):
        window = ids[start : start + length + 1]
        losses.append(
            token_losses(setup.theirs, window)[counted - start :]
            if start
            else token_losses(setup.theirs, window)
        )
        counted = start + len(window) - 1
        if counted == len(ids) - 1:
            break
    nats = torch.cat(losses)
    assert len(nats) == len(ids) - 1
    score = setup.scorer().wikitext(text, length, stride)
    assert score.tokens == len(nats)
    assert score.loss == pytest.approx(float(nats.mean()), rel=1e-6)
    assert score.token_ppl == pytest.approx(math.exp(float(nats.mean())), rel=1e-6)
    assert score.word_ppl == pytest.approx(math.exp(float(nats.sum()) / (text.words - 1)), rel=1e-5)
    assert setup.scorer(3).wikitext(text, length, stride).loss == pytest.approx(
        score.loss, rel=1e-7
    )


def test_a_shorter_stride_scores_more_windows(setup: Setup) -> None:
    score = setup.scorer().wikitext(setup.wikitext, 32, 8)
    assert (score.seq_length, score.overlapping_eval) == (32, 8)
    assert score.windows == math.ceil((score.tokens - 32) / 8) + 1
    assert score.loss != setup.scorer().wikitext(setup.wikitext, 32).loss


def last_words(setup: Setup) -> list[tuple[float, bool]]:
    """Return the nats of each passage's last word, and True if greedy decoding would write it."""
    words = []
    for passage in setup.passages:
        ids = [*passage.context.tolist(), *passage.target.tolist()][-_tiny.POSITIONS - 1 :]
        losses = token_losses(setup.theirs, ids)[-len(passage.target) :]
        with torch.inference_mode():
            best = setup.theirs(torch.tensor([ids[:-1]])).logits[0].argmax(-1)
        words.append(
            (float(losses.sum()), best[-len(passage.target) :].tolist() == passage.target.tolist())
        )
    return words


@pytest.mark.parametrize("batch_size", [1, 7])
def test_last_word_scores_equal_transformers(setup: Setup, batch_size: int) -> None:
    expected = last_words(setup)
    score = setup.scorer(batch_size).lambada(setup.passages, _tiny.POSITIONS)
    assert score.passages == len(expected) == 30
    assert score.correct == sum(correct for _, correct in expected)
    assert score.accuracy == score.correct / 30
    assert score.target_ppl == pytest.approx(
        math.exp(sum(nats for nats, _ in expected) / 30), rel=1e-5
    )
    assert score.shortened == 1


def test_a_word_counts_if_all_its_tokens_are_the_most_probable(setup: Setup) -> None:
    """Check targets that the model has generated: all are correct until one token is changed."""
    from megacore.generate.generate import generate
    from megacore.jobs.model import GenerateOptions

    prompts = [passage.context.tolist()[:40] for passage in setup.passages]
    written = generate(setup.ours, prompts, GenerateOptions(max_new_tokens=3), vocab_size=VOCAB)
    arrays = [torch.tensor(continuation.tokens).numpy() for continuation in written]
    passages = [
        Passage(torch.tensor(prompt).numpy(), target)
        for prompt, target in zip(prompts, arrays, strict=True)
    ]
    assert setup.scorer().lambada(passages, _tiny.POSITIONS).accuracy == 1
    for position in range(3):
        wrong = arrays[4].copy()
        wrong[position] = (wrong[position] + 1) % VOCAB
        changed = [*passages[:4], Passage(passages[4].context, wrong), *passages[5:]]
        assert setup.scorer().lambada(changed, _tiny.POSITIONS).correct == len(passages) - 1


def test_passages_without_a_target_are_left_out_and_counted(setup: Setup) -> None:
    empty = Passage(setup.passages[0].context, setup.passages[0].target[:0])
    score = setup.scorer().lambada([*setup.passages, empty], _tiny.POSITIONS)
    expected = setup.scorer().lambada(setup.passages, _tiny.POSITIONS)
    assert (expected.left_out, score.left_out) == (0, 1)
    assert replace(score, left_out=0) == expected


def test_the_padding_of_the_vocabulary_has_no_probability(setup: Setup) -> None:
    before = setup.scorer().wikitext(setup.wikitext, _tiny.POSITIONS)
    assert setup.ours.output_layer is not None
    weight = setup.ours.output_layer.weight
    assert weight.shape[0] > VOCAB
    with torch.no_grad():
        weight[VOCAB:] += 1
    assert setup.scorer().wikitext(setup.wikitext, _tiny.POSITIONS) == before


def test_windows_beyond_the_positions_are_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError, match="seq_length is 65 and the model has 64 positions"):
        setup.scorer().wikitext(setup.wikitext, 65)
    with pytest.raises(ConfigError, match="seq_length is 65 and the model has 64 positions"):
        setup.scorer().lambada(setup.passages, 65)
    with pytest.raises(ConfigError, match="length 500 and the model has 64 positions"):
        setup.scorer().passkey(setup.tokenizer, PasskeyConfig(lengths=(500,)))


class Copying:
    """Model that continues as after the last place that ends as the tokens so far."""

    max_position_embeddings = 800
    model = ModelConfig()

    def __call__(self, tokens: torch.Tensor, position_ids: None, last: int) -> torch.Tensor:
        logits = torch.zeros(len(tokens), last, VOCAB)
        for row, ids in zip(logits, tokens.tolist(), strict=True):
            for place, end in enumerate(range(len(ids) - last + 1, len(ids) + 1)):
                row[place, self.next(ids[:end])] = 9.0
        return logits

    def next(self, ids: list[int]) -> int:
        """Return the token after the longest repetition of the end of `ids`."""
        best, following = 0, 0
        for stop in range(len(ids) - 1, 0, -1):
            length = 0
            while length < stop and ids[stop - 1 - length] == ids[-1 - length]:
                length += 1
            if length > best:
                best, following = length, ids[stop]
        return following


class Guessing(Copying):
    """Model whose logits are random."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)

    def __call__(self, tokens: torch.Tensor, position_ids: None, last: int) -> torch.Tensor:
        return torch.randn(len(tokens), last, VOCAB, generator=self._generator)


def passkey_score(setup: Setup, model: Any, config: PasskeyConfig) -> PasskeyScore:
    mesh, device = ProcessMesh.serial(), torch.device("cpu")
    scorer = ZeroshotScorer(model, mesh, device, vocab_size=VOCAB, batch_size=16)
    return scorer.passkey(setup.tokenizer, config)


def test_a_model_that_copies_finds_every_passkey(setup: Setup) -> None:
    config = PasskeyConfig(lengths=(600, 700), depths=(0.0, 0.6, 1.0), prompts=2, candidates=3)
    score = passkey_score(setup, Copying(), config)
    assert (score.accuracy, score.ranked_accuracy, score.prompts) == (1.0, 1.0, 12)
    assert [(cell.length, cell.depth) for cell in score.cells] == [
        (length, depth) for length in (600, 700) for depth in (0.0, 0.6, 1.0)
    ]


def test_a_model_that_guesses_ranks_passkeys_at_chance(setup: Setup) -> None:
    config = PasskeyConfig(lengths=(600,), depths=(0.5,), prompts=150, candidates=4)
    score = passkey_score(setup, Guessing(), config)
    deviation = math.sqrt(0.25 * 0.75 / 150)
    assert score.chance == 0.25
    assert abs(score.ranked_accuracy - 0.25) < 3 * deviation
    assert score.accuracy == 0


def test_scores_of_reads_of_unequal_length_equal_whole_logits(setup: Setup) -> None:
    reads = [_Read(torch.arange(3, 3 + length).numpy(), scored) for length, scored in READS]
    scores = setup.scorer(3)._scores(reads)
    for read, (loss, _) in zip(reads, scores.tolist(), strict=True):
        expected = token_losses(setup.theirs, read.tokens.tolist())[-read.scored :].sum()
        assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_those_of_each_read(kind: str) -> None:
    model = _tiny.random_model(_tiny.spec(**_tiny.KINDS[kind]))
    reads = [_Read(torch.arange(3, 3 + length).numpy(), scored) for length, scored in READS]
    batched, single = (
        ZeroshotScorer(
            model,
            ProcessMesh.serial(),
            torch.device("cpu"),
            vocab_size=_tiny.VOCAB,
            batch_size=size,
        )._scores(reads)
        for size in (4, 1)
    )
    for read, (loss, _), (alone, _) in zip(reads, batched.tolist(), single.tolist(), strict=True):
        ids = torch.from_numpy(read.tokens)
        with torch.inference_mode():
            logits = model(ids[None, :-1])[0, -read.scored :, : _tiny.VOCAB].double()
        expected = F.cross_entropy(logits, ids[-read.scored :], reduction="sum")
        assert loss == pytest.approx(float(expected), rel=1e-5)
        assert alone == pytest.approx(float(expected), rel=1e-5)
