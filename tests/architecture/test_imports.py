"""Imports go one way: flows → tasks → megacore.

Each heavy package has one place, and light modules stay light.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture._source import ROOT, imports_of, python_files

LIGHT = (
    "megacore.artifact",
    "megacore.config",
    "megacore.corpus",
    "megacore.data.index_maps",
    "megacore.engine.deepspeed.operators",
    "megacore.foreign.accelerate",
    "megacore.foreign.deepspeed_claims",
    "megacore.cluster.hosts.agent",
    "megacore.cluster.hosts.fanout",
    "megacore.launch.guard",
    "megacore.config.hostfile",
    "megacore.launch.supervise",
    "megacore.observe.events",
    "megacore.pipeline_parallel.partition",
    "megacore.pipeline_parallel.schedules",
    "megacore.tokenizer",
)
"""Modules that a task imports only to look something up, or that run next to the training."""

ONLY_IN = {
    "transformers": ("megacore/convert/", "megacore/finetune/"),
    "deepspeed": ("megacore/engine/deepspeed", "megacore/foreign/"),
    "apex": ("megacore/kernels/",),
    "tree_sitter": ("megacore/adopt/",),
    "tree_sitter_bash": ("megacore/adopt/",),
    "accelerate": ("megacore/finetune/", "megacore/foreign/"),
    "sacrebleu": ("megacore/finetune/",),
    "rouge_score": ("megacore/finetune/",),
    "sklearn": ("megacore/finetune/",),
    "scipy": ("megacore/finetune/",),
    "wandb": ("tasks/_wandb.py",),
    "datasets": ("megacore/corpus/", "megacore/finetune/"),
}


def violations(
    packages: tuple[str, ...], forbidden: tuple[str, ...], *, at_import_only: bool = False
) -> list[str]:
    return [
        f"{path}:{item.line} imports {item.module}"
        for path in python_files(*packages)
        for item in imports_of(path, *forbidden)
        if item.at_import or not at_import_only
    ]


def test_megacore_does_not_import_prefect_mlflow_or_the_other_packages() -> None:
    assert python_files("megacore")
    assert (
        violations(("megacore",), ("prefect", "mlflow", "tasks", "flows", "scripts", "tests")) == []
    )


def test_tasks_do_not_import_flows() -> None:
    assert violations(("tasks",), ("flows", "scripts", "tests")) == []


def test_flows_do_not_import_mlflow_torch_or_transformers() -> None:
    assert violations(("flows",), ("mlflow", "torch", "transformers", "scripts", "tests")) == []


def test_tasks_and_flows_import_without_torch() -> None:
    assert violations(("tasks", "flows"), ("torch",), at_import_only=True) == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_optional_packages_have_one_place_and_are_imported_lazily(package: str) -> None:
    for path in python_files("megacore", "tasks", "flows"):
        for item in imports_of(path, package):
            assert str(path).startswith(ONLY_IN[package]), (
                f"{path}:{item.line} imports {item.module}"
            )
            assert not item.at_import, f"{path}:{item.line} imports {item.module} at module level"


def printed(script: str) -> list[str]:
    """Return the words that a script prints in a separate process."""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_import_torch(module: str) -> None:
    assert (ROOT / Path(*module.split("."))).is_dir() or (
        ROOT / f"{module.replace('.', '/')}.py"
    ).is_file()
    heavy = (
        "{'torch', 'transformers', 'datasets', 'prefect', 'mlflow', 'deepspeed', 'accelerate'} & "
        "set(sys.modules)"
    )
    script = f"import sys, {module}; print(*sorted({heavy}))"
    assert printed(script) == [], f"what import {module} also imports"


def test_a_cached_flow_imports_neither_prefects_server_nor_mlflow() -> None:
    """Prefect's clients take the class of the temporary server without the server's module."""
    script = (
        "import sys, flows.pretrain; from tasks import _temporary_server; "
        "_temporary_server._replace_server_module(); "
        "from prefect.server.api.server import SubprocessASGIServer as used; "
        "assert used is _temporary_server.TemporaryServer; "
        "print(*sorted({'mlflow', 'sqlalchemy', 'docket', 'torch', 'pandas'} & set(sys.modules)))"
    )
    assert printed(script) == [], "what a flow also imports"


def test_a_rank_starts_without_torchs_checkpoints() -> None:
    """The writer of checkpoints takes half as long to import as torch, and the first step waits."""
    script = (
        "import sys, megacore.ranks.pretrain, megacore.ranks.process, megacore.train.loop; "
        "print(*sorted({'torch.distributed.checkpoint', 'sympy', 'torch._dynamo'} & "
        "set(sys.modules)))"
    )
    assert printed(script) == [], "what the start of a training also imports"
