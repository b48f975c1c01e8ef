"""A stand-in for kubectl whose cluster is a directory and whose pods are processes of this host.

Usage: `_kubectl.py FOLDER ARGUMENTS…` with kubectl's arguments for apply, get, logs and delete.
`serve` is the cluster: it starts the pods until the file `stop` exists. Other files of the folder:
`pending` keeps pods from starting, `answer.json` is merged into the answer to `get jobsets`, and
`pods.json` is merged into the status of each pod.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(sys.argv[1])
_RUN = 'echo $$ > "$0.pid"; "$@" > "$0.log" 2>&1; echo $? > "$0.tmp"; mv "$0.tmp" "$0.code"'


def options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    named = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
    return named, [word for word in words if not word.startswith("--")]


def jobset() -> dict[str, Any] | None:
    path = FOLDER / "jobset.json"
    return json.loads(path.read_text()) if path.exists() else None


def apply(named: dict[str, str]) -> int:
    manifest = yaml.safe_load(Path(named["filename"]).read_text())
    (FOLDER / "applied.txt").open("a").write(f"{manifest['metadata']['name']}\n")
    (FOLDER / "jobset.tmp").write_text(json.dumps(manifest))
    (FOLDER / "jobset.tmp").rename(FOLDER / "jobset.json")
    return 0


def start() -> None:
    """Start the processes of the pods, unless the file `pending` exists."""
    manifest = jobset()
    if manifest is None or (FOLDER / "pending").exists() or list(FOLDER.glob("*.pid")):
        return
    group = manifest["spec"]["replicatedJobs"][0]
    job = group["template"]["spec"]
    command = job["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "/app/.venv/bin/python"
    for index in range(job["completions"]):
        name = f"{manifest['metadata']['name']}-{group['name']}-0-{index}-abcde"
        subprocess.Popen(
            ["sh", "-c", _RUN, str(FOLDER / name), sys.executable, *command[1:]],
            env={**os.environ, "JOB_COMPLETION_INDEX": str(index), "HOSTNAME": name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while not (FOLDER / f"{name}.pid").exists():
            time.sleep(0.01)


def serve() -> int:
    while not (FOLDER / "stop").exists():
        start()
        time.sleep(0.05)
    return 0


def pods() -> list[dict[str, Any]]:
    """Return the pods; those of a deleted JobSet until their processes have ended."""
    manifest, listed = jobset(), []
    names = sorted(path.stem for path in FOLDER.glob("*.pid"))
    pending = [] if manifest is None else [f"{manifest['metadata']['name']}-node-0-0-abcde"]
    extra = FOLDER / "pods.json"
    more = json.loads(extra.read_text()) if extra.exists() else {}
    for name in names or pending:
        code = FOLDER / f"{name}.code"
        status: dict[str, Any] = {"phase": "Running" if names else "Pending"}
        if code.exists():
            value = int(code.read_text())
            status["phase"] = "Succeeded" if value == 0 else "Failed"
            ended = {
                "exitCode": value,
                "reason": "Error",
                "finishedAt": f"{code.stat().st_mtime:.6f}",
            }
            status["containerStatuses"] = [{"name": "ranks", "state": {"terminated": ended}}]
        listed.append(
            {"metadata": {"name": name}, "spec": {"nodeName": "worker"}, "status": status | more}
        )
    return listed


def get(kind: str, name: str | None) -> int:
    if kind == "pods":
        sys.stdout.write(json.dumps({"items": pods()}))
        return 0
    manifest = jobset()
    if manifest is None or manifest["metadata"]["name"] != name:
        sys.stderr.write(
            f'Error from server (NotFound): jobsets.jobset.x-k8s.io "{name}" not found\n'
        )
        return 1
    phases = [pod["status"]["phase"] for pod in pods()]
    conditions = []
    if "Failed" in phases:
        conditions.append({"type": "Failed", "status": "True", "reason": "FailedJobs"})
    elif set(phases) == {"Succeeded"}:
        conditions.append({"type": "Completed", "status": "True", "reason": "AllJobsCompleted"})
    answer = {"spec": {}, "status": {"conditions": conditions}}
    extra = FOLDER / "answer.json"
    sys.stdout.write(json.dumps(answer | (json.loads(extra.read_text()) if extra.exists() else {})))
    return 0


def logs(name: str) -> int:
    shown = 0
    while True:
        ended = (FOLDER / f"{name}.code").exists()
        text = (FOLDER / f"{name}.log").read_text()
        sys.stdout.write(
            "".join(f"[pod/{name}/ranks] {line}" for line in text[shown:].splitlines(keepends=True))
        )
        sys.stdout.flush()
        shown = len(text)
        if ended:
            return 0
        time.sleep(0.1)


def delete() -> int:
    """Send SIGTERM to the processes of the pods, wait for their end and remove their files."""
    (FOLDER / "jobset.json").unlink(missing_ok=True)
    for path in FOLDER.glob("*.pid"):
        children = Path(
            f"/proc/{path.read_text().strip()}/task/{path.read_text().strip()}/children"
        )
        for child in children.read_text().split() if children.exists() else []:
            os.kill(int(child), signal.SIGTERM)
        while not path.with_suffix(".code").exists():
            time.sleep(0.05)
    for path in (*FOLDER.glob("*.pid"), *FOLDER.glob("*.code"), *FOLDER.glob("*.log")):
        path.unlink()
    return 0


def main() -> int:
    named, words = options(sys.argv[2:])
    (FOLDER / "calls.txt").open("a").write(f"{' '.join(sys.argv[2:])}\n")
    verb = words[0]
    if verb == "serve":
        return serve()
    if verb == "apply":
        return apply(named)
    if verb == "get":
        return get(words[1], words[2] if len(words) > 2 else None)
    if verb == "logs":
        return logs(words[1])
    return delete() if words[1].startswith("jobsets") else 0


if __name__ == "__main__":
    sys.exit(main())
