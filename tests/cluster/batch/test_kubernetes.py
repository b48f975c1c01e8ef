"""Translation of a configuration into a JobSet, pod states, and the work pool of the flows."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from prefect.server.schemas.actions import WorkPoolCreate

from megacore.cluster.batch import kubernetes
from megacore.cluster.batch.kubernetes import KubernetesJob, waits_for
from megacore.cluster.batch.node import kubernetes_node
from megacore.cluster.batch.scheduler import End, Look, Submission
from megacore.cluster.batch.spec import BatchSpec
from megacore.cluster.batch.start import check_batch, show_batch
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    ConfigError,
    HostLostError,
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
)
from megacore.jobs.run import RankJob
from tests.cluster.batch._jobset_schema import JOBSET
from tests.launch._processes import REPOSITORY

DEPLOY = REPOSITORY / "deploy" / "kubernetes"
INJECTION = "x\"\n  evil: {{ 7*7 }} ' $(touch pwned) #"


@pytest.fixture(autouse=True)
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text("#!/bin/sh\nexit 1\n")
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))


def launch(options: dict[str, Any] | None = None, **values: Any) -> LaunchConfig:
    kubernetes = {"image": "megacore:1", "workspace_claim": "workspace", **(options or {})}
    return LaunchConfig.model_validate(
        {"kind": "kubernetes", "nproc_per_node": 8, "kubernetes": kubernetes, **values}
    )


def manifest(settings: LaunchConfig, run: Path) -> dict[str, Any]:
    job = RankJob(exit_directory=str(run / "exit"), ranks=8, threads_per_rank=1)
    command, text = show_batch(settings, "megacore.ranks.pretrain", job, run / "run.json")
    assert command[:2] == ["kubectl", "apply"]
    assert command[-1] == f"--filename={run / 'batch' / 'jobset.yaml'}"
    document: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(document, JOBSET)
    return document


def spec(settings: LaunchConfig, directory: Path) -> BatchSpec:
    paths = {"job_file": str(directory / "run.json"), "exit_directory": str(directory / "exit")}
    values = {
        "module": "m",
        "environment": {},
        "directory": "/",
        "python": "python",
        "follower_limit": 300.0,
    }
    return BatchSpec(**paths, **values, launch=settings, workspace=str(directory))


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]
    return pod


def test_options_are_written_into_the_jobset(tmp_path: Path) -> None:
    options = {
        "namespace": "research",
        "service_account": "trainer",
        "queue": "gpus",
        "memory": "900Gi",
        "cpus": 96,
        "shared_memory": "64Gi",
        "node_selector": {"cloud/accelerator": "h200"},
        "gpu_resource": "amd.com/gpu",
    }
    document = manifest(
        launch(options, nnodes=4, stop_grace=25.0), tmp_path / "runs" / "Gpt_2 345m"
    )
    assert document["metadata"]["name"] == "megacore-gpt-2-345m-00000000"
    assert document["metadata"]["namespace"] == "research"
    assert document["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert document["spec"]["failurePolicy"] == {"maxRestarts": 0}
    assert document["spec"]["network"] == {
        "enableDNSHostnames": True,
        "subdomain": document["metadata"]["name"],
    }
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == (
        "Indexed",
        4,
        4,
        0,
    )
    pod = pod_of(document)
    assert (pod["restartPolicy"], pod["serviceAccountName"]) == ("Never", "trainer")
    assert pod["terminationGracePeriodSeconds"] == 35
    assert pod["nodeSelector"] == {"cloud/accelerator": "h200"}
    container = pod["containers"][0]
    assert container["command"][:4] == [
        "/app/.venv/bin/python",
        "-m",
        "megacore.cluster.batch.node",
        "kubernetes",
    ]
    assert container["resources"] == {
        "requests": {"cpu": 96, "memory": "900Gi", "amd.com/gpu": 8},
        "limits": {"memory": "900Gi", "amd.com/gpu": 8},
    }
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]} == {
        "workspace": str(tmp_path),
        "shared-memory": "/dev/shm",
    }
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in pod[
        "volumes"
    ]


def test_unset_options_are_absent_from_the_jobset(tmp_path: Path) -> None:
    document = manifest(
        launch(allow_cpu=True, threads_per_rank=3, nproc_per_node=2), tmp_path / "run"
    )
    assert document["metadata"]["labels"] == {"app.kubernetes.io/name": "megacore"}
    pod = pod_of(document)
    assert not {"serviceAccountName", "nodeSelector"} & {*pod}
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 6}}


def test_values_cannot_inject_yaml_or_template_code(tmp_path: Path) -> None:
    options = dict.fromkeys(("image", "python", "gpu_resource"), INJECTION) | {
        "node_selector": {INJECTION: INJECTION}
    }
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=8, threads_per_rank=1)
    document = yaml.safe_load(show_batch(launch(options), "module", job, tmp_path / "run.json")[1])
    pod = pod_of(document)
    assert pod["containers"][0]["image"] == pod["containers"][0]["command"][0] == INJECTION
    assert pod["nodeSelector"] == {INJECTION: INJECTION}
    assert "evil" not in document["metadata"] | pod | pod["containers"][0]


def test_template_of_the_user_is_rendered(tmp_path: Path) -> None:
    template = tmp_path / "mine.j2"
    template.write_text("name: {{ name | json }}\nnodes: {{ nodes }}\n")
    job = RankJob(exit_directory=str(tmp_path / "exit"), ranks=8, threads_per_rank=1)
    text = show_batch(launch({"template": str(template)}), "module", job, tmp_path / "run.json")[1]
    assert yaml.safe_load(text)["nodes"] == 1
    template.write_text("name: {{ nmae }}\n")
    with pytest.raises(ConfigError, match=r"mine\.j2 cannot be filled: 'nmae' is undefined"):
        show_batch(launch({"template": str(template)}), "module", job, tmp_path / "run.json")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (launch({"image": None}), "without launch.kubernetes.image"),
        (launch({"workspace_claim": None}), "without launch.kubernetes.workspace_claim"),
        (launch(nnodes="2:4"), "launch.nnodes is 2:4, and a JobSet has a fixed number of pods"),
        (launch(nproc_per_node="auto"), "launch.nproc_per_node is auto"),
        (
            launch({"template": "no/such"}),
            "launch.kubernetes.template is 'no/such', and there is no such file",
        ),
    ],
)
def test_incomplete_configuration_is_refused(settings: LaunchConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_batch(settings)


def test_missing_kubectl_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="kubectl is not installed here"):
        check_batch(launch())


def test_job_file_outside_the_workspace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path / "elsewhere"))
    with pytest.raises(
        ConfigError, match=r"is not in the workspace .*elsewhere, the only directory that pods see"
    ):
        manifest(launch(), tmp_path / "run")


def test_pod_derives_its_rank_and_hosts_from_its_index(tmp_path: Path) -> None:
    batch_spec = spec(launch(nnodes=2), tmp_path)
    node = kubernetes_node(batch_spec, "set", {"JOB_COMPLETION_INDEX": "1"})
    assert (node.rank, node.names) == (1, ["set-node-0-0.set", "set-node-0-1.set"])
    assert kubernetes_node(batch_spec, "set", {"JOB_COMPLETION_INDEX": "0"}).port == 29500
    with pytest.raises(
        LaunchError, match=r"JOB_COMPLETION_INDEX is '2' in this pod, and launch\.nnodes is 2"
    ):
        kubernetes_node(batch_spec, "set", {"JOB_COMPLETION_INDEX": "2"})


def terminated(reason: str) -> dict[str, Any]:
    ended = {"exitCode": 137, "reason": reason, "finishedAt": "1"}
    return {
        "phase": "Failed",
        "containerStatuses": [{"name": "ranks", "state": {"terminated": ended}}],
    }


def disrupted(reason: str) -> dict[str, Any]:
    return {
        **terminated("Error"),
        "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}],
    }


def waiting(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "Back-off pulling\n image"}}
    return {"phase": "Pending", "containerStatuses": [{"name": "ranks", "state": state}]}


def look_at(
    jobset: dict[str, Any],
    pods: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Look:
    """Return the follower's view of the job for these answers of kubectl."""
    job = KubernetesJob(spec(launch(nnodes=2), tmp_path))
    items = [
        {"metadata": {"name": f"pod-{n}"}, "spec": {"nodeName": f"w{n}"}, "status": pod}
        for n, pod in enumerate(pods)
    ]

    def answer(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        reply = {"items": items} if "pods" in command else jobset
        return subprocess.CompletedProcess(command, 0, json.dumps(reply), "")

    monkeypatch.setattr("megacore.cluster.batch.kubernetes.run", answer)
    monkeypatch.setattr(KubernetesJob, "_follow_logs", lambda self, pods: None)
    look = job.look()
    assert look is not None
    return look


FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "FailedJobs"}]}}


@pytest.mark.parametrize(
    ("status", "kind", "text"),
    [
        (terminated("OOMKilled"), MemoryExhaustedError, "raise launch.kubernetes.memory"),
        (
            disrupted("PreemptionByScheduler"),
            RankLostError,
            "Kubernetes ended pod pod-1 on w1 (PreemptionByScheduler)",
        ),
        (
            disrupted("DeletionByTaintManager"),
            HostLostError,
            "pod pod-1 on w1 was lost with its node",
        ),
        ({**terminated("Error"), "reason": "Evicted"}, RankLostError, "(Evicted)"),
    ],
)
def test_pod_ended_by_kubernetes_is_reported_with_its_cause(
    status: dict[str, Any],
    kind: type[MegacoreError],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = look_at(FAILED, [{"phase": "Running"}, status], tmp_path, monkeypatch).end
    assert end is not None
    assert type(end.error) is kind
    assert text in str(end.error)


def test_failed_pod_ends_the_job_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = look_at(FAILED, [terminated("Error"), {"phase": "Running"}], tmp_path, monkeypatch).end
    assert end == End(137)


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "InvalidImageName"])
def test_missing_image_ends_the_attempt(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = look_at({"status": {}}, [waiting(reason), {"phase": "Running"}], tmp_path, monkeypatch)
    assert look.end is not None
    assert type(look.end.error) is LaunchError
    assert f"cannot get the image megacore:1 ({reason}: Back-off pulling image)" in str(
        look.end.error
    )


REFUSED = "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?"


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        (REFUSED, 3),
        ('Error from server (InternalError): failed calling webhook "mjobset.kb.io"', 3),
        ("no answer within 60 s", 3),
        (REFUSED.replace("10.0.0.1:6443", "localhost:8080"), 1),  # kubectl is not configured
        ('error: no matches for kind "JobSet"', 1),
    ],
)
def test_a_jobset_is_applied_again_while_the_server_does_not_answer(
    message: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, asked = KubernetesJob(spec(launch(), tmp_path)), list[list[str]]()

    def answer(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        asked.append(command)
        code = 124 if "within" in message else 1
        return subprocess.CompletedProcess(command, code if len(asked) < 3 else 0, "", message)

    monkeypatch.setattr(kubernetes, "run", answer)
    monkeypatch.setattr(kubernetes, "_ANSWER_PAUSE", 0.0)
    job._spec.folder.mkdir(parents=True)
    if calls == 1:
        with pytest.raises(LaunchError, match="kubectl cannot apply"):
            job.submit(Submission("ab", None), lambda: False)
    else:
        assert job.submit(Submission("ab", None), lambda: False).job == job.name("ab")
        asked.clear()
        job.remove(Submission("ab", None))
    assert asked == asked[:1] * calls


@pytest.mark.parametrize("leaving", [True, False])
def test_pod_on_a_lost_node_does_not_prevent_the_next_jobset(
    leaving: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = KubernetesJob(spec(launch(), tmp_path))
    metadata = {"name": "p"} | ({"deletionTimestamp": "2026-11-28T15:00:03Z"} if leaving else {})
    pods = json.dumps({"items": [{"metadata": metadata, "status": {"phase": "Running"}}]})

    def answer(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        if command[1] == "get":
            return subprocess.CompletedProcess(command, 0, pods, "")
        assert "--timeout=340s" in command, "pods without a follower end after 300 s"
        message = "error: timed out waiting for the condition on jobsets/megacore-ab"
        return subprocess.CompletedProcess(command, 1, "", message)

    monkeypatch.setattr(kubernetes, "run", answer)
    if leaving:
        job.remove(Submission("ab", None))
    else:
        with pytest.raises(LaunchError, match="of an earlier attempt cannot be deleted: error: ti"):
            job.remove(Submission("ab", None))


def test_single_wrong_notfound_does_not_count_hours_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has just started does not know JobSet yet."""
    job, clock = KubernetesJob(spec(launch(), tmp_path)), [0.0]
    pod = {"metadata": {"name": "p"}, "spec": {}, "status": {"phase": "Running"}}
    known = [False]

    def get(kind: str, which: str) -> dict[str, Any]:
        jobset = {"spec": {}} if known[0] else {}
        return {"items": [pod]} if kind == "pods" else jobset

    monkeypatch.setattr(job, "_get", get)
    monkeypatch.setattr(job, "_follow_logs", lambda pods: None)
    monkeypatch.setattr(kubernetes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for moment in (0.0, 7200.0):
        clock[0], known[0] = moment, False
        assert job.look() == Look("running", "deleted; 1 of its pods have not ended yet")
        known[0] = True
        look = job.look()
        assert look is not None
        assert look.end is None
    assert job._gone_since is None


def test_waits_for_describes_a_pending_pod() -> None:
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes:\n no GPU",
    }
    assert (
        waits_for({"status": {"phase": "Pending", "conditions": [scheduled]}})
        == "Unschedulable: 0/3 nodes: no GPU"
    )
    assert waits_for({"status": {"phase": "Running"}}) == ""
    assert waits_for({"status": {"phase": "Pending"}}) == "Pending"


def test_prefect_accepts_the_work_pool() -> None:
    template = json.loads((DEPLOY / "work-pool.json").read_text(encoding="utf-8"))
    WorkPoolCreate(name="kubernetes", type="kubernetes", base_job_template=template)
    jsonschema.Draft202012Validator.check_schema(template["variables"])
    used_variables = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used_variables == set(template["variables"]["properties"]), (
        "the job configuration uses every variable"
    )
    for name, variable in template["variables"]["properties"].items():
        assert variable["description"], name
        if "default" in variable:
            jsonschema.validate(variable["default"], variable)


def test_work_pool_has_the_keys_of_prefects_kubernetes_worker() -> None:
    import prefect.server.api.collections_data.views as views

    worker_metadata = json.loads(
        (Path(views.__path__[0]) / "aggregate-worker-metadata.json").read_text(encoding="utf-8")
    )
    default = worker_metadata["prefect-kubernetes"]["kubernetes"]["default_base_job_configuration"]
    template = json.loads((DEPLOY / "work-pool.json").read_text(encoding="utf-8"))
    assert set(template["job_configuration"]) == set(default["job_configuration"])
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert not {"parallelism", "completions", "backoffLimit"} & set(pod), (
        "these are a Job's, and a pod has no such fields"
    )
    env = template["variables"]["properties"]["env"]["default"]
    assert env["MEGACORE_WORKSPACE"] == template["variables"]["properties"]["workspace"]["default"]


def test_role_of_the_flows_allows_the_kubectl_commands() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "rbac.yaml").read_text(encoding="utf-8")))
    rules = {rule["resources"][0]: set(rule["verbs"]) for rule in documents[1]["rules"]}
    # `kubectl apply` is get, then create or patch.
    assert rules["jobsets"] >= {"create", "get", "patch", "delete"}
    assert rules["pods"] >= {"get", "list", "delete"}
    assert rules["pods/log"] == {"get"}
    claim = yaml.safe_load((DEPLOY / "workspace.yaml").read_text(encoding="utf-8"))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    names = json.loads((DEPLOY / "work-pool.json").read_text(encoding="utf-8"))["variables"][
        "properties"
    ]
    assert names["workspace_claim"]["default"] == claim["metadata"]["name"]
    assert names["service_account_name"]["default"] == documents[0]["metadata"]["name"]
