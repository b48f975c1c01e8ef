"""Batch jobs of Kubernetes: JobSets that kubectl applies and watches."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from megacore.artifact.files import replace_file, workspace_errors
from megacore.cluster.batch.scheduler import (
    TIMED_OUT,
    TIMEOUT,
    End,
    Look,
    Submission,
    check_template,
    one_line,
    pause,
    render,
    run,
    say,
)
from megacore.cluster.batch.spec import BatchSpec
from megacore.config.launch import LaunchConfig
from megacore.errors import (
    ConfigError,
    HostLostError,
    LaunchError,
    MegacoreError,
    MemoryExhaustedError,
    RankLostError,
)

_REMOVE_MARGIN = 10.0
"""Seconds, beyond their grace period, to wait for the pods of a deleted JobSet."""
PORT = 29500
"""Port of the ranks' rendezvous; it is always free, because a pod has all ports for itself."""
GROUP = "node"
"""Name of the JobSet's only group of pods."""

_KIND = "jobsets.jobset.x-k8s.io"
_ENDED = {"Succeeded", "Failed"}
_LABEL = "jobset.sigs.k8s.io/jobset-name"
_NO_IMAGE = {"ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_LOST_WITH_NODE = {
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "DeletionByTaintManager",
    "DeletionByPodGC",
}
_UNANSWERED = re.compile(
    "unable to connect to the server|was refused|connection (?:refused|reset by peer)|i/o timeout|"
    "handshake timeout|deadline exceeded|etcdserver:|"
    r"from server \((?:InternalError|ServiceUnavailable|Timeout|TooManyRequests)\)",
    re.IGNORECASE,
)
"""Messages of kubectl when the API server is restarted, overloaded or cannot be reached, or when
JobSet's controller, which it asks, is."""
_UNCONFIGURED = "localhost:8080"
"""Server that kubectl asks where no other is configured."""
_ANSWER_LIMIT = 180.0
"""Seconds to ask an API server that does not answer."""
_ANSWER_PAUSE = 10.0
"""Seconds before it is asked again."""
_LOG_LIMIT = 10.0
"""Seconds to wait for the end of the pods' output."""


class KubernetesJob:
    """The JobSet of a specification."""

    programs: ClassVar[tuple[str, ...]] = ("kubectl",)

    def __init__(self, spec: BatchSpec) -> None:
        """Keep `spec`; nothing is applied yet.

        Raises:
            ConfigError: the job file is outside of the workspace that pods see.
        """
        self.silence = ""
        self._spec = spec
        self._name = ""
        self._logs: dict[str, subprocess.Popen[bytes]] = {}
        self._gone_since: float | None = None
        if not Path(spec.job_file).is_relative_to(spec.workspace):
            raise ConfigError(
                f"{spec.job_file} is not in the workspace {spec.workspace}, the only directory "
                "that pods see: set MEGACORE_WORKSPACE to the directory that "
                "launch.kubernetes.workspace_claim is mounted at"
            )

    @staticmethod
    def check(launch: LaunchConfig) -> None:
        """Raise ConfigError for an option that is missing or cannot be used."""
        options = launch.kubernetes
        if options.image is None:
            raise ConfigError(
                "launch.kind is kubernetes without launch.kubernetes.image: name the image that "
                "pods run"
            )
        if options.workspace_claim is None:
            raise ConfigError(
                "launch.kind is kubernetes without launch.kubernetes.workspace_claim: name the "
                "PersistentVolumeClaim with the workspace"
            )
        if launch.elastic:
            raise ConfigError(
                f"launch.nnodes is {launch.nnodes}, and a JobSet has a fixed number of pods: give "
                "one number"
            )
        check_template(options.template, "launch.kubernetes.template")

    @property
    def _again(self) -> str:
        return f"a retry applies it again and {self._spec.again}"

    @property
    def manifest(self) -> Path:
        """Path of the manifest, the filled template."""
        return self._spec.folder / "jobset.yaml"

    def name(self, token: str) -> str:
        """Return the JobSet's name, which is the beginning of its pods' names."""
        run = (
            re.sub(r"[^a-z0-9]+", "-", Path(self._spec.job_file).parent.name.lower())
            .strip("-")[:20]
            .strip("-")
        )
        return f"megacore-{run}-{token}" if run else f"megacore-{token}"

    def text(self, token: str) -> str:
        """Return the manifest. Raises ConfigError."""
        spec, options, name = self._spec, self._spec.launch.kubernetes, self.name(token)
        values = {
            "name": name,
            "namespace": options.namespace,
            "group": GROUP,
            "nodes": spec.nodes[1],
            "ranks_per_node": spec.ranks_per_node,
            "image": options.image,
            "service_account": options.service_account,
            "queue": options.queue,
            "node_selector": options.node_selector,
            "cpus": spec.cpus_per_node,
            "memory": options.memory,
            "gpus": spec.gpus_per_node,
            "gpu_resource": options.gpu_resource,
            "shared_memory": options.shared_memory,
            "workspace_claim": options.workspace_claim,
            "workspace": spec.workspace,
            "port": PORT,
            "grace": spec.grace,
            "node_command": [
                *(options.python, "-m", "megacore.cluster.batch.node", "kubernetes"),
                *(f"--spec={spec.path}", f"--token={token}", f"--jobset={name}"),
            ],
        }
        return render(options.template, "jobset.yaml.j2", "launch.kubernetes.template", values)

    def command(self) -> list[str]:
        """Return the command that applies the manifest."""
        return [*self._kubectl("apply"), f"--filename={self.manifest}"]

    def submit(self, submission: Submission, stopped: Callable[[], bool]) -> Submission:
        """Write the manifest, apply it, and return the submission with the JobSet's name.

        It is applied again, under the same name, if the API server does not answer.
        """
        self._name = self.name(submission.token)
        with workspace_errors(self.manifest):
            replace_file(self.manifest, self.text(submission.token).encode(), durable=False)
        done = _until_answered(self.command(), stopped)
        if done.returncode != 0:
            raise LaunchError(
                f"kubectl cannot apply {self.manifest}: {one_line(done)}: "
                "correct launch.kubernetes, or see whether JobSet is installed in the cluster"
            )
        return Submission(submission.token, self._name)

    def remove(self, earlier: Submission) -> None:
        """Delete the JobSet of an earlier follower, and wait until its pods are gone.

        A pod on a lost node is never gone. The wait ends when the pods must have ended themselves,
        because they have no follower.
        """
        name = self.name(earlier.token)
        limit = self._spec.follower_limit + self._spec.grace + _REMOVE_MARGIN
        done = _until_answered(
            [*self._delete(name), "--wait=true", f"--timeout={limit:g}s"],
            timeout=limit + TIMEOUT,
        )
        if done.returncode != 0:
            listed = self._get("pods", f"--selector={_LABEL}={name}")
            if listed is not None and all(
                pod["metadata"].get("deletionTimestamp") for pod in listed.get("items", [])
            ):
                say(
                    f"kubernetes: JobSet {name} is deleted but not gone after {limit:g} s, as with "
                    "a pod on a lost node: its pods have ended themselves by now"
                )
                return
            raise LaunchError(
                f"JobSet {name} of an earlier attempt cannot be deleted: {one_line(done)}: look at "
                "it with kubectl describe, and start again when it is gone"
            )

    def look(self) -> Look | None:
        """Return the current state of the JobSet; None if kubectl does not answer."""
        jobset = self._get(_KIND, self._name)
        if jobset is None:
            return None
        if not jobset:
            return self._deleted()
        self._gone_since = None  # kubectl's NotFound was of a server that had just started
        listed = self._get("pods", f"--selector={_LABEL}={self._name}")
        if listed is None:
            return None
        pods: list[dict[str, Any]] = sorted(
            listed.get("items", []), key=lambda pod: str(pod["metadata"]["name"])
        )
        self._follow_logs(pods)
        conditions = {item["type"]: item for item in jobset.get("status", {}).get("conditions", [])}
        if _holds(conditions, "Completed"):
            return Look("running", "Completed", End(0))
        if _holds(conditions, "Failed"):
            return Look(
                "running", f"Failed ({conditions['Failed'].get('reason', '')})", self._failure(pods)
            )
        if jobset.get("spec", {}).get("suspend") or _holds(conditions, "Suspended"):
            return Look("queued", "Suspended: it waits to be admitted")
        return self._pods(pods)

    def _deleted(self) -> Look | None:
        """Return the state of a deleted JobSet.

        It ends when its pods have ended, which may still be saving a checkpoint. A pod on a lost
        node never ends, so the wait is limited to the grace period of the pods and a margin.
        """
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        listed = self._get("pods", f"--selector={_LABEL}={self._name}")
        late = now - self._gone_since > self._spec.grace + _REMOVE_MARGIN
        if listed is None and not late:
            return None
        pods = [] if listed is None else listed.get("items", [])
        alive = [pod for pod in pods if pod["status"].get("phase") not in _ENDED]
        if alive and not late:
            return Look("running", f"deleted; {len(alive)} of its pods have not ended yet")
        error = LaunchError(
            f"JobSet {self._name} was deleted, not by this run: start the same command again, it "
            f"{self._spec.again}"
        )
        return Look("running", "deleted", End(1, error, outranks_stop=True))

    def _pods(self, pods: list[dict[str, Any]]) -> Look:
        """Return the state of a JobSet that has neither ended nor is suspended, from its pods."""
        running = [pod for pod in pods if pod["status"].get("phase") != "Pending"]
        if len(running) >= self._spec.nodes[1]:
            nodes = ",".join(str(pod["spec"].get("nodeName", "?")) for pod in running)
            return Look("running", f"Running on {nodes}")
        waits = sorted({why for pod in pods if (why := waits_for(pod))})
        detail = f"{len(running)} of {self._spec.nodes[1]} pods run" + "".join(
            f"; {why}" for why in waits
        )
        for why in waits:
            if why.split(":")[0] in _NO_IMAGE:
                image = self._spec.launch.kubernetes.image
                error = LaunchError(
                    f"pods cannot get the image {image} ({why}): correct launch.kubernetes.image"
                )
                return Look("queued", detail, End(1, error))
        return Look("queued", detail)

    def _failure(self, pods: list[dict[str, Any]]) -> End:
        """Return the end of a failed JobSet.

        The reason is the first one that Kubernetes gives for a pod; without one, the exit code is
        that of the pod that ended first.
        """
        failed = sorted((end for pod in pods if (end := _ended(pod))), key=lambda end: end[0])
        for _, pod, code, reason in failed:
            if error := self._error(pod, reason):
                return End(code or 1, error)
        return End(failed[0][2] or 1) if failed else End(1)

    def _error(self, pod: dict[str, Any], reason: str) -> MegacoreError | None:
        """Return the error for a pod that Kubernetes ended; None if the pod's own process did."""
        where = f"pod {pod['metadata']['name']} on {pod['spec'].get('nodeName', 'no node')}"
        disrupted = next(
            (c for c in pod["status"].get("conditions", []) if c["type"] == "DisruptionTarget"),
            None,
        )
        why = disrupted.get("reason", "") if disrupted and disrupted.get("status") == "True" else ""
        why = why or str(pod["status"].get("reason", ""))
        if reason == "OOMKilled":
            return MemoryExhaustedError(
                f"{where} needed more memory than its limit "
                f"({self._spec.launch.kubernetes.memory or 'that of the node'}): raise "
                "launch.kubernetes.memory"
            )
        if why in _LOST_WITH_NODE:
            return HostLostError(f"{where} was lost with its node ({why}); {self._again}")
        if why:
            return RankLostError(f"Kubernetes ended {where} ({why}); {self._again}")
        return None

    def _follow_logs(self, pods: list[dict[str, Any]]) -> None:
        """Start kubectl to copy each pod's output to stdout; restart it if it has ended early."""
        for pod in pods:
            name, phase = str(pod["metadata"]["name"]), pod["status"].get("phase")
            process = self._logs.get(name)
            if phase == "Pending" or (process is not None and process.poll() is None):
                continue
            if process is not None and phase != "Running":
                continue
            since = [] if process is None else ["--since=10s"]
            self._logs[name] = subprocess.Popen(
                [*self._kubectl("logs"), name, "--follow", "--prefix", *since],
                stdin=subprocess.DEVNULL,
            )

    def copy_output(self) -> None:
        """Do nothing: kubectl writes directly to the output of this process."""

    def cancel(self, *, at_once: bool) -> None:
        """Delete the JobSet.

        Its pods get SIGTERM and, after their grace period, SIGKILL. With `at_once` the grace period
        is one second.
        """
        run([*self._delete(self._name), "--wait=false"])
        if at_once:
            selector = f"--selector={_LABEL}={self._name}"
            run([*self._kubectl("delete"), "pods", selector, "--grace-period=1", "--wait=false"])

    def close(self) -> None:
        """Wait for the end of the output and delete the JobSet."""
        deadline = time.monotonic() + (_LOG_LIMIT if self._gone_since is None else 0.0)
        for process in self._logs.values():
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
        if self._name and self._gone_since is None:
            run([*self._delete(self._name), "--wait=false"])

    def _get(self, kind: str, which: str) -> dict[str, Any] | None:
        """Return objects from kubectl; empty if there is none, None if kubectl does not answer."""
        done = run([*self._kubectl("get"), kind, which, "--output=json"])
        if done.returncode != 0:
            self.silence = one_line(done)
            return {} if "NotFound" in done.stderr else None
        try:
            objects: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return None
        return objects

    def _delete(self, name: str) -> list[str]:
        return [*self._kubectl("delete"), _KIND, name, "--ignore-not-found", "--cascade=foreground"]

    def _kubectl(self, verb: str) -> list[str]:
        return ["kubectl", verb, f"--namespace={self._spec.launch.kubernetes.namespace}"]


def _until_answered(
    command: list[str], stopped: Callable[[], bool] = lambda: False, *, timeout: float = TIMEOUT
) -> "subprocess.CompletedProcess[str]":
    """Run a command of kubectl, again while the API server does not answer; return the last result.

    It is not repeated after `_ANSWER_LIMIT` seconds, or if `stopped` returns True.
    """
    deadline = time.monotonic() + _ANSWER_LIMIT
    while True:
        done = run(command, timeout=timeout)
        message = one_line(done)
        unanswered = done.returncode == TIMED_OUT or bool(_UNANSWERED.search(message))
        if done.returncode == 0 or not unanswered or _UNCONFIGURED in message:
            return done
        if stopped() or time.monotonic() > deadline:
            return done
        sys.stdout.write(f"kubernetes: no answer to kubectl ({message}); it is asked again\n")
        sys.stdout.flush()
        pause(_ANSWER_PAUSE, stopped)


def waits_for(pod: dict[str, Any]) -> str:
    """Return the reason why a pod is pending, in Kubernetes' words; empty for another pod."""
    if pod["status"].get("phase") != "Pending":
        return ""
    for container in pod["status"].get("containerStatuses", []):
        if waiting := container.get("state", {}).get("waiting"):
            return _joined(waiting)
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            return _joined(condition)
    return "Pending"


def _joined(condition: dict[str, Any]) -> str:
    return ": ".join(
        filter(
            None,
            [str(condition.get("reason", "")), " ".join(str(condition.get("message", "")).split())],
        )
    )


def _ended(pod: dict[str, Any]) -> tuple[str, dict[str, Any], int, str] | None:
    """Return the end time of a failed pod, the pod, its exit code and the reason.

    The result is None for another pod.
    """
    if pod["status"].get("phase") != "Failed":
        return None
    for container in pod["status"].get("containerStatuses", []):
        if ended := container.get("state", {}).get("terminated"):
            return (
                str(ended.get("finishedAt", "")),
                pod,
                int(ended.get("exitCode", 1)),
                str(ended.get("reason", "")),
            )
    return "", pod, 1, ""


def _holds(conditions: dict[str, dict[str, Any]], name: str) -> bool:
    return conditions.get(name, {}).get("status") == "True"
