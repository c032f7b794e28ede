"""Test what deploy/ holds: kubectl renders it, the schemas and Prometheus take it, the Dockerfile's commands run.

No image was built and no cluster was asked: there is no container runtime here.
"""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from rig import scratch
from rig.kubectl import HOW, kubectl
from rig.model import CACHE
from rig.prometheus import HOW as NO_PROMETHEUS
from rig.prometheus import program
from rig.small_wheel import make_wheel

from vllm.config import KVTransferConfig

DEPLOY = CACHE.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MONITORING = KUBERNETES / "monitoring"
DOCKERFILE = DEPLOY / "Dockerfile"
SCHEMAS = ("1.28", "1.32", "1.35")
CUSTOM = {"PrometheusRule"}
"""Kinds that come with an operator: Kubernetes has no schema of them."""


def rendered(folder: str) -> dict[tuple[str, str], dict]:
    """Return the objects that kustomize makes of a folder, by kind and name."""
    if kubectl() is None:
        pytest.skip(HOW)
    command = [kubectl(), "kustomize", KUBERNETES / folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    objects = list(yaml.safe_load_all(done.stdout))
    return {(o["kind"], o["metadata"]["name"]): o for o in objects}


@pytest.mark.parametrize("folder", ["base", "kv-checksum", "monitoring"])
def test_the_objects_fit_the_published_schemas(folder):
    objects = rendered(folder)
    for (kind, name), one in objects.items():
        if kind in CUSTOM:
            continue
        for version in SCHEMAS:
            kubernetes_validate.validate(one, version, strict=True)
        broken = {**one, "spec": {"replicas": "many"}, "dato": {}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, SCHEMAS[0], strict=True)


def container(objects, name):
    (one,) = objects["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return one


def test_the_overlay_changes_the_image_and_the_setting_alone():
    before, after = rendered("base"), rendered("kv-checksum")
    assert before.keys() == after.keys()
    for name, role in (("vllm-prefill", "kv_producer"), ("vllm-decode", "kv_consumer")):
        was, now = container(before, name), container(after, name)
        assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in now["args"]
        configs = []
        for one in (was, now):
            (env,) = [e for e in one["env"] if e["name"] == "KV_TRANSFER_CONFIG"]
            configs.append(json.loads(env.pop("value")))
        assert configs[1] == {**configs[0], "enable_kv_checksum": True}
        assert KVTransferConfig(**configs[1]).enable_kv_checksum
        assert configs[0]["kv_role"] == role
        assert was.pop("image").startswith("vllm/vllm-openai:")
        assert now.pop("image").startswith("registry.example.com/vllm-kv-checksum:")
    assert before == after


def test_the_objects_are_made_of_the_documents_files():
    made = runpy.run_path(str(MONITORING / "generate.py"))["objects"]()
    assert made == {n: (MONITORING / n).read_text() for n in made}
    features = DEPLOY.parent / "docs/features"
    objects = rendered("monitoring")
    (rule,) = [o for (kind, _), o in objects.items() if kind == "PrometheusRule"]
    alerts = yaml.safe_load((features / "kv_checksum_alerts.yaml").read_text())
    assert rule["spec"] == alerts
    (board,) = objects["ConfigMap", "vllm-kv-checksum-dashboard"]["data"].values()
    original = (features / "kv_checksum_dashboard.json").read_text()
    assert json.loads(board) == json.loads(original)


def test_prometheus_takes_the_rule_s_spec(tmp_path):
    if program("promtool") is None:
        pytest.skip(NO_PROMETHEUS)
    rule = yaml.safe_load((MONITORING / "prometheus-rule.yaml").read_text())
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    command = [program("promtool"), "check", "rules", tmp_path / "rules.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "SUCCESS: 6 rules found" in done.stdout


def test_hadolint_takes_the_dockerfile(tmp_path):
    hadolint = Path(sys.executable).parent / "hadolint"
    command = [hadolint, "--failure-threshold", "style", "--ignore", "DL3059"]
    done = subprocess.run([*command, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (tmp_path / "Dockerfile").write_text(
        DOCKERFILE.read_text() + "RUN cd / && pip install x\n"
    )
    done = subprocess.run([*command, tmp_path / "Dockerfile"], capture_output=True)
    assert done.returncode == 1


def test_the_dockerfile_s_commands_give_a_patched_vllm(tmp_path):
    """Run each stage's commands in an environment of its own; a small wheel takes the place of vLLM's."""
    own = make_wheel(tmp_path / "index")
    scratch.checkout(tmp_path / "src/kv-checksum")
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    assert len(stages) == 2
    said = ""
    for number, stage in enumerate(stages):
        venv = tmp_path / f"venv-{number}"
        scratch.make_venv(venv)
        for copied in re.findall(
            r"^COPY --from=wheels (\S+) (\S+)$", stage, re.MULTILINE
        ):
            source, target = (tmp_path / path.lstrip("/") for path in copied)
            source.rename(target.with_name("copied"))
            stage = stage.replace(f"{copied[1]}/", "/copied/")
        for line in re.findall(r"^RUN (.*)$", stage, re.MULTILINE):
            for folder in ("wheels", "src", "copied"):
                line = line.replace(f" /{folder}/", f" {tmp_path}/{folder}/")
            done = subprocess.run(
                ["bash", "-euc", line],
                env={
                    **scratch.environment(venv),
                    "VLLM_WHEEL": str(own),
                    "PIP_NO_INDEX": "1",
                },
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, line + done.stdout + done.stderr
            said = done.stdout
    assert said.startswith("applied series") and "(in a patched wheel)" in said
    assert str(tmp_path / "venv-1") in said
