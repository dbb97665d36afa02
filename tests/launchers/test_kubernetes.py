"""The manifests of `examples/kubernetes`: their fields, names and pods' programs, without Kubernetes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hosts import address, hosts, inside
from processes import HANGS

pytestmark = pytest.mark.deterministic

kubernetes_validate = pytest.importorskip("kubernetes_validate")
yaml = pytest.importorskip("yaml")

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
MANIFESTS = sorted(EXAMPLE.glob("*.yaml"))
VERSIONS = ["1.27", kubernetes_validate.latest_version()]
"""The oldest version of Kubernetes with the label batch.kubernetes.io/job-name, and the newest known version."""
NAME, SERVICE = "ranks-job", "ranks"
SECONDS = "2"
"""The seconds for which the pods run here."""


def documents(manifest: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest.read_text()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda it: it.stem)
def test_manifests_validate_against_the_kubernetes_schema(manifest: Path, version: str) -> None:
    for document in documents(manifest):
        kubernetes_validate.validate(document, version, strict=True)


def test_manifest_with_an_unknown_field_is_refused() -> None:
    _, job = documents(EXAMPLE / "job.yaml")
    job["spec"]["template"]["spec"]["subDomain"] = "ranks"
    with pytest.raises(kubernetes_validate.ValidationError, match="subDomain"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda it: it.stem)
def test_names_and_numbers_of_a_manifest_agree(manifest: Path) -> None:
    service, job = documents(manifest)
    spec, container = job["spec"], container_of(job)
    assert (
        (service["metadata"]["name"], job["metadata"]["name"]) == (SERVICE, NAME) == (spec_of(job)["subdomain"], NAME)
    )
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": NAME}
    assert spec["completions"] == spec["parallelism"]
    mounted = {it["name"] for it in container["volumeMounts"]}
    assert mounted == {it["name"] for it in spec_of(job)["volumes"]}
    said = " ".join([*container["command"], *container.get("args", ()), *environment(job, 0).values()])
    assert f"{NAME}-0.{SERVICE}" in said
    assert str(spec["completions"]) in (environment(job, 0).get("WORLD_SIZE"), *re.findall(r"--nnodes=(\d+)", said))


def spec_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec of a job's pods."""
    return job["spec"]["template"]["spec"]


def container_of(job: Mapping[str, Any]) -> dict[str, Any]:
    (container,) = spec_of(job)["containers"]
    return container


def environment(job: Mapping[str, Any], index: int) -> dict[str, str]:
    """Return a container's environment as kubelet sets it. The variable of the Job's controller comes last."""
    told = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "ranks token": "a token for four ranks, of a test",
    }
    env = {}
    for it in container_of(job)["env"]:
        source = it.get("valueFrom", {})
        secret = " ".join(source.get("secretKeyRef", {}).values())
        env[it["name"]] = it["value"] if not source else told[secret or source["fieldRef"]["fieldPath"]]
    return env | {"JOB_COMPLETION_INDEX": str(index)}


class Pod:
    """A pod of a job, as a process on its own host, with a /dev/shm of its size and its volumes in a folder."""

    def __init__(self, job: Mapping[str, Any], index: int, folder: Path, namespace: str, known: Path) -> None:
        self._folders = {"/program": str(EXAMPLE), "/scratch": str(folder)}
        container, env = container_of(job), environment(job, index)
        self._probe = [self._here(it) for it in container["readinessProbe"]["exec"]["command"]]
        words = [
            re.sub(r"\$\((\w+)\)", lambda it: env[it[1]], it)
            for it in (*container["command"], *container.get("args", ()))
        ]
        assert words[-1] == "600"
        command = [self._here(it) for it in words[:-1]] + [SECONDS]
        (memory,) = (it["emptyDir"]["sizeLimit"] for it in spec_of(job)["volumes"] if it["name"] == "shm")
        shm = f'mount -t tmpfs -o size={memory.removesuffix("i").lower()} tmpfs /dev/shm && exec "$@"'
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the image's python and torchrun
        self._output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            inside(namespace, f"{NAME}-{index}", known, "sh", "-c", shm, "sh", *command),
            env={"PATH": path} | {name: self._here(value) for name, value in env.items()},
            stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _here(self, text: str) -> str:
        for mounted, folder in self._folders.items():
            if text == mounted or text.startswith(f"{mounted}/"):
                return folder + text.removeprefix(mounted)
        return text

    def ended(self) -> tuple[int, str]:
        """Wait for the end, and return the exit status and the output."""
        status = self.process.wait(timeout=HANGS)
        self._output.seek(0)
        return status, self._output.read()

    def ready(self) -> bool:
        """Return whether the readiness probe succeeds."""
        return subprocess.run(self._probe, check=False).returncode == 0

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()


@pytest.mark.search
@pytest.mark.real
@pytest.mark.timeout(3 * HANGS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda it: it.stem)
def test_pods_of_a_manifest_form_four_ranks(manifest: Path, tmp_path: Path) -> None:
    _, job = documents(manifest)
    count = job["spec"]["completions"]
    known = tmp_path / "hosts"
    names = [f"{address(it)} {NAME}-{it}.{SERVICE} {NAME}-{it}\n" for it in range(count)]
    known.write_text("127.0.0.1 localhost\n" + "".join(names))
    with contextlib.ExitStack() as stack:
        pods = []
        for index, namespace in enumerate(stack.enter_context(hosts(count))):
            folder = tmp_path / str(index)
            folder.mkdir()
            pods.append(Pod(job, index, folder, namespace, known))
            stack.callback(pods[-1].stop)
        ends = [it.ended() for it in pods]
        assert [status for status, _ in ends] == [0] * count, ends
        assert "second 1: 4 ranks" in "".join(output for _, output in ends)
        assert all(it.ready() for it in pods)
