"""The files in `deploy/` fit the code: options, extras, ports, addresses."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from retrieval_server.commands import serve_command
from retrieval_server.settings import GRACE_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def takes(words: list[str]) -> dict[str, Any]:
    """Return the values that `retrieval serve` reads from its arguments, which must be valid."""
    with serve_command.make_context("serve", words, resilient_parsing=False) as context:
        return dict(context.params)


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage of the Dockerfile, as (name, rest)."""
    text = re.sub(r"(?m)^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    instructions = [line.split(None, 1) for line in lines if line.strip()]
    groups: list[list[tuple[str, str]]] = [[]]
    for name, rest in instructions:
        if name == "FROM":
            groups.append([])
        groups[-1].append((name, rest))
    return groups[1:]


def test_the_image_is_built_in_two_stages_and_runs_without_root():
    build, final = stages()
    assert build[0][1].endswith(" AS build")
    final_stage = dict(final)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", final_stage["USER"])
    assert final_stage["COPY"].startswith("--from=build")
    assert "pip install" not in " ".join(rest for _, rest in final)
    assert json.loads(final_stage["ENTRYPOINT"]) == ["retrieval", "serve"]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True)


def test_the_image_installs_existing_extras_without_torch():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = config["options.extras_require"]
    (installs,) = [rest for name, rest in stages()[0] if name == "RUN"]
    (installed,) = re.findall(r'"\.\[([\w,-]+)\]"', installs)
    packages = " ".join(extras[extra] for extra in installed.split(","))
    assert {"cpu", "serve"} <= set(installed.split(",")) and "torch" not in packages
    copied = [word for name, rest in stages()[0] if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    roots = {root for root in config["options"]["package_dir"].split() if root.isidentifier()}
    assert roots <= set(copied)
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {f"!{word}" for word in copied} <= set(lines)


def test_the_image_serves_with_valid_options():
    final_stage = dict(stages()[1])
    values = takes(json.loads(final_stage["CMD"]))
    assert final_stage["EXPOSE"].split() == [str(values["port"]), str(values["health_port"])]
    assert values["host"] == "0.0.0.0" and values["log_format"] == "json"
    check = final_stage["HEALTHCHECK"]
    assert f"http://127.0.0.1:{values['health_port']}/readyz" in check
    (words,) = re.findall(r"CMD (\[.*\])", check)
    compile(json.loads(words)[2], "HEALTHCHECK", "exec")
    assert values["indexes"] == (final_stage["VOLUME"],)


def test_compose_mounts_existing_files_and_drops_all_rights():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    services = compose["services"]
    assert set(services) == {"proxy", "retrieval", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["mem_limit"] and service["pids_limit"]
        for port in service.get("ports", ()):
            assert name == "proxy" or port.startswith("127.0.0.1:")
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith("${") or (DEPLOY / source).is_file(), source
    server = services["retrieval"]
    assert server["read_only"] and services["prometheus"]["read_only"] and "ports" not in server
    # The containers that read the index and the keys run as the user who owns these files.
    assert server["user"] == "${OWNER}" and services["proxy"]["user"].startswith("${OWNER:")
    built = DEPLOY / server["build"]["context"] / server["build"]["dockerfile"]
    assert built.resolve() == DEPLOY / "Dockerfile"
    values = takes(server["command"])
    # The originals have the same path in the container, because the index keeps their paths.
    (images,) = values["images"]
    assert "${IMAGES}:${IMAGES}:ro" in server["volumes"] and str(images).startswith("${IMAGES:?")
    data = str(values["snapshots"])
    assert any(volume.endswith(f":{data}") for volume in server["volumes"])
    assert str(values["audit"].parent) == data and values["hosts"] == ("${HOST:-localhost}",)
    assert values["proxies"] == (compose["networks"]["front"]["ipam"]["config"][0]["subnet"],)
    scraped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = scraped["scrape_configs"][0]["static_configs"]
    mounted = dict(volume.split(":")[:2] for volume in services["prometheus"]["volumes"])
    for name in scraped["rule_files"]:
        assert mounted[f"./{name}"] == f"/etc/prometheus/{name}"
    assert job["targets"] == [f"retrieval:{values['health_port']}"]
    proxy = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    assert f"server retrieval:{values['port']};" in proxy
    assert services["proxy"]["ports"] == [f"443:{re.findall('listen (.*) ssl', proxy)[0]}"]


def test_the_unit_serves_with_valid_options(tmp_path):
    text = (DEPLOY / "retrieval.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)^ExecStart=(.*)$", text)
    command, verb, *words = shlex.split(line)
    assert Path(command).name == "retrieval" and verb == "serve" and words.pop() == "$OPTIONS"
    page = (ROOT / "docs" / "operator.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"OPTIONS=(--[^'\n]*)", page)
    values = takes([*words, *options.split()])
    assert values["hosts"] and values["images"] and values["proxies"]
    folders = {
        "/var/lib": re.findall(r"(?m)^StateDirectory=(.*)$", text)[0].split(),
        "/var/log": re.findall(r"(?m)^LogsDirectory=(.*)$", text)[0].split(),
    }
    made = {f"{top}/{name}" for top, names in folders.items() for name in names}
    index = Path(values["indexes"][0])
    assert {str(index.parent), str(values["snapshots"]), str(values["audit"].parent)} <= made
    assert values["log_format"] == "json" and values["host"] == "127.0.0.1"
    assert int(re.findall(r"(?m)^TimeoutStopSec=(\d+)$", text)[0]) > GRACE_SECONDS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_accepts_the_unit(tmp_path):
    unit = tmp_path / "retrieval.service"
    text = (DEPLOY / "retrieval.service").read_text(encoding="utf-8")
    unit.write_text(text.replace("/opt/retrieval/bin/retrieval", "/bin/true"), encoding="utf-8")
    done = run("systemd-analyze", "verify", unit)
    assert (done.returncode, done.stderr) == (0, "")
    rated = run("systemd-analyze", "security", "--offline=true", "--threshold=20", unit)
    assert rated.returncode == 0, rated.stdout[-500:]  # exposure is at most 2.0 of 10
