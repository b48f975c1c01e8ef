"""Metrics of the curation of a run's data."""

from pathlib import Path

import pytest

from megacore.artifact import Artifact, StageKey, Workspace
from megacore.artifact.build import seal
from megacore.artifact.files import write_json
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.corpus.curate import REPORT_NAME
from megacore.token_files.indexed_dataset import TOKENS_NAMES
from tasks.curate import curation_metrics
from tests.data._files import write_tokens


def test_damaged_and_deleted_corpora_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))
    curated = Workspace.of().folder("curate")
    amounts = {"read": 4, "kept": 3}
    steps = [{"step": "1 exact_dedup", "removed": 1}]
    report = {"documents": amounts, "words": amounts, "bytes": amounts, "steps": steps}
    (curated / "used").mkdir(parents=True)
    write_json(curated / "used" / REPORT_NAME, report)
    corpus = seal(curated / "used", StageKey("curate", 1, {}, {}), {}, 1.0)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    write_tokens(tokens / TOKENS_NAMES[0], [3])
    seal(tokens, StageKey("tokenize", 1, {}, {"corpus": corpus.digest}), {}, 1.0)
    (curated / "damaged").mkdir()
    (curated / "damaged" / MANIFEST_NAME).write_bytes(b"")
    artifact = Artifact(stage="tokenize", key="k", path=str(tokens), digest="", counts={})
    metrics = curation_metrics(artifact)
    assert metrics["curate/documents_kept"] == 3
    assert metrics["curate/removed_1_exact_dedup"] == 1
    (curated / "used" / REPORT_NAME).write_bytes(b"")
    assert curation_metrics(artifact) == {}
    (curated / "used" / REPORT_NAME).unlink()
    assert curation_metrics(artifact) == {}
