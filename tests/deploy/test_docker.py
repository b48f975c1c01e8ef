"""Dockerfile and docker-compose.yml: no open ports, no secrets in images, existing files."""

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
TRAINERS = ("trainer-1", "trainer-2")
SERVERS = ("postgres", "prefect", "mlflow")
TARGETS = ("cpu", "cuda", "servers")


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return values


SERVICES: dict[str, dict[str, Any]] = compose()["services"]


def instructions() -> list[tuple[str, str, str]]:
    """Return (stage, instruction, rest) of each line of the Dockerfile.

    Continued lines are joined and comments removed.
    """
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    parsed, stage = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if word == "FROM":
                stage = rest.rpartition(" AS ")[2]
            parsed.append((stage, word, " ".join(rest.split())))
    return parsed


def of_stage(stage: str, word: str) -> list[str]:
    return [rest for name, keyword, rest in instructions() if (name, keyword) == (stage, word)]


def base_of(stage: str) -> str:
    (rest,) = of_stage(stage, "FROM")
    return rest.partition(" AS ")[0]


def test_all_targets_exist_and_all_stages_are_used() -> None:
    stages = [stage for stage, word, _ in instructions() if word == "FROM"]
    assert len(set(stages)) == len(stages)
    copied = {match for _, _, rest in instructions() for match in re.findall(r"--from=(\S+)", rest)}
    assert set(stages) == {*TARGETS, *copied, *(base_of(target) for target in ("cpu", "cuda"))}
    built = {service["build"]["target"] for name, service in SERVICES.items() if "build" in service}
    assert built == {"cpu", "servers"}
    assert {
        service["build"]["target"]
        for service in compose("deploy/docker/gpu.yml")["services"].values()
    } == {"cuda"}


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for _, word, rest in instructions():
        words = [part for part in rest.split() if not part.startswith("--")]
        if word != "COPY" or "--from=" in rest:
            continue
        for source in words[:-1]:
            matches = list(ROOT.glob(source)) if source != "." else [ROOT]
            assert matches, f"COPY {source}: there is no such file"
            for path in matches:
                name = str(path.relative_to(ROOT))
                assert not any(fnmatch(name, pattern.removeprefix("**/")) for pattern in ignored), (
                    name
                )


def test_code_is_copied_after_the_installation() -> None:
    for target in ("cpu", "cuda"):
        words = [(word, rest) for stage, word, rest in instructions() if stage == target]
        install = next(
            number
            for number, (word, rest) in enumerate(words)
            if word == "RUN" and "make venv" in rest
        )
        copies = [rest for word, rest in words[:install] if word == "COPY"]
        assert copies == ["--from=inputs --chown=megacore:megacore / ./"]
    inputs = {source for rest in of_stage("inputs", "COPY") for source in rest.split()[:-1]}
    assert [source for source in inputs if source.endswith(".py") and "__init__" not in source] == [
        "setup.py"
    ]
    # The inputs include the sources that setup.py compiles.
    for path in [*ROOT.glob("megacore/**/*.cpp"), *ROOT.glob("megacore/**/*.h")]:
        assert any(fnmatch(str(path.relative_to(ROOT)), source) for source in inputs), path


def test_images_run_as_an_unprivileged_user() -> None:
    for target in TARGETS:
        assert of_stage(target, "USER") == ["megacore"]
        words = [word for stage, word, _ in instructions() if stage == target]
        assert "USER" in words[: words.index("VOLUME")]


def test_dockerfile_follows_common_practice() -> None:
    for stage, word, rest in instructions():
        assert word != "ADD"
        if "apt-get install" in rest:
            assert "apt-get update" in rest, stage
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists/*" in rest
            assert "pdsh" not in rest
            assert {"openssh-client", "openssh-server", "rsync"} <= set(rest.split())
            assert "/etc/ssh/ssh_host_*" in rest, (
                "the package makes host keys, which every image would share"
            )
        if "pip install" in rest:
            assert "-c constraints.txt" in rest
        if word in ("CMD", "ENTRYPOINT", "SHELL"):
            assert isinstance(json.loads(rest), list)
    bases = {
        rest.partition("=")[2]
        for _, word, rest in instructions()
        if word == "ARG" and "_BASE=" in rest
    }
    assert all(":" in base and not base.endswith(":latest") for base in bases)


def test_images_contain_no_secrets() -> None:
    secret_name = re.compile(r"passw|secret|token|api_key|auth", re.IGNORECASE)
    assert [
        rest
        for _, word, rest in instructions()
        if word in ("ENV", "ARG") and secret_name.search(rest)
    ] == []
    assert "deploy/docker/secrets" in (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert "/deploy/docker/secrets/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    # Images of the servers name their files, so that no others are copied.
    assert "." not in [rest.split()[-2] for rest in of_stage("servers", "COPY")]


def test_ports_are_published_only_on_loopback() -> None:
    published = {name: service.get("ports", []) for name, service in SERVICES.items()}
    assert {name for name, ports in published.items() if ports} == {"prefect", "mlflow"}
    for ports in published.values():
        assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)
    for name in TRAINERS:
        # Trainers use the host's network, where sshd would otherwise listen on all addresses.
        (address,) = re.findall(
            r"\$\{TRAINER_\d_ADDRESS:-([\d.]+)\}", SERVICES[name]["environment"]["SSHD_ADDRESS"]
        )
        assert address.startswith("127.")


def test_passwords_and_keys_are_mounted_files() -> None:
    declared = compose()["secrets"]
    assert all(set(source) == {"file"} for source in declared.values())
    assert all(
        source["file"] == f"./deploy/docker/secrets/{name}" for name, source in declared.items()
    )
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == set(declared)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert not re.search(r"PASSWORD(?!_FILE)|SECRET|TOKEN|AUTH_STRING", name)
            assert "@" not in str(value)
    for name in TRAINERS:
        assert set(SERVICES[name]["secrets"]) == {
            secret for secret in declared if secret.startswith("ssh_")
        }


def test_trainers_have_the_limits_of_training() -> None:
    for name in (*TRAINERS, "worker"):
        service = SERVICES[name]
        assert service["network_mode"] == "host"
        assert service["shm_size"] == "16gb"
        assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
        assert "${MEGACORE_SHARE:-workspace}:/app/workspace" in service["volumes"]
        assert "privileged" not in service
        assert service["cap_drop"] == ["ALL"]
    addresses = {SERVICES[name]["environment"]["SSHD_ADDRESS"] for name in TRAINERS}
    assert len(addresses) == 2, "two trainers on one host's network"
    assert set(TRAINERS) == {entry.partition(":")[0] for entry in SERVICES["worker"]["extra_hosts"]}


def test_services_have_health_checks_and_wait_for_each_other() -> None:
    for name in (*TRAINERS, *SERVERS):
        test = SERVICES[name]["healthcheck"]["test"]
        assert test[0] == "CMD", "a list of words"
    for name in ("prefect", "mlflow"):
        assert SERVICES[name]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    waits = SERVICES["worker"]["depends_on"]
    assert {name for name, wait in waits.items() if wait["condition"] == "service_healthy"} == {
        *TRAINERS, "prefect", "mlflow"
    }  # fmt: skip


def test_overrides_change_existing_services() -> None:
    for name in ("gpu.yml", "rdma.yml"):
        assert set(compose(f"deploy/docker/{name}")["services"]) <= set(SERVICES)
    for name in TRAINERS:
        reserved = compose("deploy/docker/gpu.yml")["services"][name]["deploy"]["resources"][
            "reservations"
        ]
        assert reserved["devices"][0]["capabilities"] == ["gpu"]


def test_named_programs_exist() -> None:
    servers = {
        Path(source).name: ROOT / source
        for rest in of_stage("servers", "COPY")
        for source in rest.split()[:-1]
    }
    words = [
        word
        for service in SERVICES.values()
        for key in ("entrypoint", "command")
        for word in service.get(key, [])
    ]
    for word in words:
        if word.startswith("/app/") and not word.startswith("/app/.venv/"):
            path = ROOT / word.removeprefix("/app/")
            assert path.is_file(), word
            assert path.stat().st_mode & 0o111, f"{word} is not executable"
    for rest in of_stage("servers", "ENTRYPOINT"):
        (program,) = json.loads(rest)
        assert servers[Path(program).name].stat().st_mode & 0o111
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (ROOT / volume.split(":")[0]).is_file(), volume
    targets = re.findall(
        r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for _, word, rest in instructions():
        if word in ("RUN", "CMD"):
            for target in re.findall(r"\bmake[\",\s]+([a-z-]+)", rest):
                assert target in targets or "apt-get" in rest, target


def test_hostfile_and_ssh_config_name_the_trainers() -> None:
    from megacore.config.hostfile import read_hostfile

    hosts = read_hostfile(DOCKER / "hostfile")
    assert hosts == dict.fromkeys(TRAINERS, 1)
    for name in TRAINERS:
        result = subprocess.run(
            ["ssh", "-F", str(DOCKER / "ssh_config"), "-G", name],
            capture_output=True,
            text=True,
            check=True,
        )
        settings = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
        assert settings["port"] == "2222"
        assert settings["stricthostkeychecking"] == "true"
        assert settings["hostname"] in SERVICES[name]["environment"]["SSHD_ADDRESS"]


def test_the_documented_training_has_a_rank_on_each_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megacore.config import load_config, parse_overrides
    from megacore.config.hostfile import hosts_of
    from megacore.plan.layouts import layout_of

    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8").replace("\\\n", "")
    (command,) = re.findall(r"-m flows\.pretrain (.*hostfile.*)", text)
    conf = re.findall(r"--conf (\S+)", command)
    config = load_config(*conf, parse_overrides(re.findall(r"-o (\S+)", command)))
    hosts = hosts_of(config.launch)
    assert hosts == dict.fromkeys(TRAINERS, 1)
    assert layout_of(config, sum(hosts.values()), 8192).data == len(TRAINERS)


@pytest.mark.parametrize("path", sorted(ROOT.glob("deploy/**/*.sh")), ids=lambda path: path.name)
def test_scripts_are_executable_and_valid(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    assert "set -euo pipefail" in path.read_text(encoding="utf-8")
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_secrets_are_created_once_and_protected(tmp_path: Path) -> None:
    shutil.copy(DOCKER / "make-secrets.sh", tmp_path)
    first = subprocess.run(
        [tmp_path / "make-secrets.sh"], capture_output=True, text=True, check=True
    )
    secrets = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    assert set(secrets) == set(compose()["secrets"])
    values = [secrets[name].decode() for name in secrets if not name.startswith("ssh_")]
    assert len(set(values)) == len(values)
    assert all(len(value) >= 24 for value in values)
    assert not [value for value in values if value in first.stdout + first.stderr]
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    # the mode that ssh-keygen sets, left by an interruption
    (tmp_path / "secrets" / "ssh_client_key").chmod(0o600)
    repeated = subprocess.run(
        [tmp_path / "make-secrets.sh"], capture_output=True, text=True, check=True
    )
    assert repeated.stdout == ""
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o644}
    assert {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()} == secrets


def test_sshd_accepts_only_keys(tmp_path: Path) -> None:
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
    if sshd is None:
        pytest.skip("sshd is not installed: apt-get install openssh-server")
    text = (
        (DOCKER / "sshd_config").read_text(encoding="utf-8").replace("/run/megacore", str(tmp_path))
    )
    (tmp_path / "sshd_config").write_text(text, encoding="utf-8")
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "host_key")],
        check=True,
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # created by the service, which is not started here
    result = subprocess.run(
        [sshd, "-T", "-f", str(tmp_path / "sshd_config")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    settings = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    for name in (
        "passwordauthentication",
        "kbdinteractiveauthentication",
        "permitrootlogin",
        "usepam",
    ):
        assert settings[name] == "no"
    for name in (
        "allowtcpforwarding",
        "allowstreamlocalforwarding",
        "allowagentforwarding",
        "x11forwarding",
    ):
        assert settings[name] == "no"
    assert settings["disableforwarding"] == "yes"
    assert settings["allowusers"] == "megacore"
