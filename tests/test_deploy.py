"""What is there to deploy with: right by its tools' schemas, and by the server's own settings."""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from conflux_jax.config import Config
from conflux_jax.serve.grpc_server import CLOSE_GRACE_S, LIVENESS, SERVICE

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
OLDEST, NEWEST = "1.28", "1.37"  # of Kubernetes


def resources() -> dict[str, dict[str, Any]]:
    """By kind."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    return resources()["Deployment"]["spec"]["template"]["spec"]


def container() -> dict[str, Any]:
    (only,) = pod()["containers"]
    return only


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of the container: its arguments, with the files that are mounted."""
    (mount,) = [mount for mount in container()["volumeMounts"] if mount["name"] == "config"]
    mounted = tmp_path / mount["subPath"]
    mounted.write_text(resources()["ConfigMap"]["data"][mount["subPath"]])
    arguments = container()["args"]
    assert mount["mountPath"] in arguments
    parser = argparse.ArgumentParser()
    Config.add_arguments(parser)
    arguments = [str(mounted) if a == mount["mountPath"] else a for a in arguments]
    return Config.from_arguments(parser.parse_args(arguments))


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifest_is_what_kubernetes_takes(version: str):
    found = resources()
    assert set(found) == {"ConfigMap", "Service", "Deployment"}
    for resource in found.values():
        assert kubernetes_validate.validate(resource, version, strict=True) == version


def test_the_schemas_would_find_a_wrong_field():
    deployment = resources()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="prot"):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_the_dockerfile_has_no_finding():
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    command = [str(hadolint), str(DEPLOY / "Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_pod_lives_as_long_as_its_drain(config: Config):
    sleep, seconds = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    needed_s = float(seconds) + config.server.drain_s + CLOSE_GRACE_S
    assert needed_s < pod()["terminationGracePeriodSeconds"]


def test_probes_ask_what_the_server_answers(config: Config):
    wanted = {"readinessProbe": ("", SERVICE), "livenessProbe": (LIVENESS,)}
    wanted["startupProbe"] = wanted["livenessProbe"]
    for probe, services in wanted.items():
        question = container()[probe]["grpc"]
        assert question["port"] == config.server.port
        assert question.get("service", "") in services
    # They speak no TLS and have no certificate.
    assert config.server.tls_cert_file is None


def test_ports_are_the_servers_and_the_services(config: Config):
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    assert ports == {"grpc": config.server.port, "http": config.server.http_port}
    service = resources()["Service"]["spec"]
    assert {port["targetPort"] for port in service["ports"]} == set(ports)
    labels = resources()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()


def test_every_group_has_its_gpus_and_every_path_its_mount(config: Config):
    gpus = int(container()["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == config.mesh.sp * config.mesh.tp
    mounts = [mount["mountPath"] for mount in container()["volumeMounts"]]
    for path in (
        config.model.model,
        config.cache.compilation_cache_dir,
        config.server.auth_token_file,
    ):
        assert path is not None and any(Path(path).is_relative_to(mount) for mount in mounts)
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in container()["volumeMounts"]} == volumes


def test_the_image_runs_as_the_pods_user_and_has_what_is_needed():
    text = (DEPLOY / "Dockerfile").read_text()
    assert f"\nUSER {pod()['securityContext']['runAsUser']}\n" in text
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
            if line.startswith("!")]  # fmt: skip
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    sources = [name for names in copied for name in names if not name.startswith(("--", "/"))]
    assert sorted(sources) == sorted(kept)
    assert all((DEPLOY.parent / name).exists() for name in sources)
