"""deploy/: configured options and queried metrics exist, and the programs that read the files accept them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dovetail.core.compose import compose, installed
from dovetail.core.metrics import Metrics

DEPLOY = Path(__file__).parents[3] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "dovetail.json"
KUBERNETES = "1.31"


class Strict(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, which others accept."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"duplicate key: {sorted(map(str, keys))}{node.start_mark}"
        return super().construct_mapping(node, deep)


def read(file: Path) -> Any:
    return yaml.load(file.read_text(encoding="utf-8"), Strict)


MANIFESTS = {file.stem: read(file) for file in sorted(BASE.glob("*.yaml")) if file.stem != "kustomization"}
DEPLOYMENT = MANIFESTS["deployment"]
POD = DEPLOYMENT["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda file: str(file.relative_to(DEPLOY)))
def test_yaml_is_sound(file: Path) -> None:
    assert isinstance(read(file), dict)


# Metrics.


def measured() -> dict[str, set[str]]:
    """Return name of each exported series -> its labels."""
    found: dict[str, set[str]] = {}
    metrics = Metrics("m")
    metrics.error(500)
    metrics.request(Record())
    for family in metrics.registry.collect():
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


class Record:
    outcome, prompt_tokens, output_tokens, ttft, duration, tpot = "stop", 1, 2, 0.1, 0.2, 0.1


ADDED = {"instance", "job"}
"""Labels that Prometheus adds to every series."""


def queries() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for group in read(DEPLOY / "prometheus" / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for rule in read(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]:
        yield "adapter", re.sub(r"\{.*\}", "", rule["seriesQuery"])


def unmeasured(query: str) -> set[str]:
    """Return series and labels of a query that are not exported."""
    series, wrong = measured(), set()
    for name, selector in re.findall(r"(dovetail:\w+)(\{[^}]*\})?", query):
        if name not in series:
            wrong.add(name)
            continue
        labels = set(re.findall(r"(\w+)=", selector)) | set(
            re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", query)))
        )
        wrong |= labels - series[name] - ADDED
    return wrong


@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda text: text if len(text) < 60 else "")
def test_what_is_asked_for_is_measured(where: str, query: str) -> None:
    assert "dovetail:" in query or "up{" in query or "process_cpu_seconds_total" in query
    assert not unmeasured(query), where


def test_a_misspelt_metric_or_label_would_be_found() -> None:
    assert unmeasured("rate(dovetail:generation_token_total[1m])") == {"dovetail:generation_token_total"}
    assert unmeasured('dovetail:num_requests_running{model="x"}') == {"model"}
    assert unmeasured("sum by (reason) (dovetail:requests_finished_total)") == {"reason"}


def test_the_dashboard_shows_what_is_measured() -> None:
    """Every exported series is on some panel."""
    text = DASHBOARD.read_text()
    names = {re.sub(r"_(bucket|sum|count|created|total)$", "", n) for n in measured() if n.startswith("dovetail:")}
    assert not [name for name in sorted(names) if name not in text]


def test_panels_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [
        (x, y)
        for p in panels
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24
    assert len({p["id"] for p in panels}) == len(panels)


# Kubernetes.


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts(name: str) -> None:
    kubernetes_validate.validate(MANIFESTS[name], KUBERNETES, strict=True)


def test_kustomize_takes_every_manifest() -> None:
    kustomization = read(BASE / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == sorted(f"{name}.yaml" for name in MANIFESTS)
    assert [image["name"] for image in kustomization["images"]] == [CONTAINER["image"]]


def test_manifests_name_each_other() -> None:
    labels = POD["metadata"]["labels"]
    for name in ("deployment", "pdb"):
        assert MANIFESTS[name]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    service, hpa = MANIFESTS["service"]["spec"], MANIFESTS["hpa"]["spec"]
    assert service["selector"].items() <= labels.items()
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert service["ports"][0]["targetPort"] in ports
    assert f"serve.port={ports['http']}" in CONTAINER["args"]
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(ports["http"])
    target = hpa["scaleTargetRef"]
    assert [target[key] for key in ("kind", "apiVersion", "name")] == [
        DEPLOYMENT["kind"],
        DEPLOYMENT["apiVersion"],
        DEPLOYMENT["metadata"]["name"],
    ]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {v["name"] for v in POD["spec"]["volumes"]}
    (rule,) = read(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]
    assert hpa["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    assert MANIFESTS["pdb"]["spec"]["maxUnavailable"] < hpa["minReplicas"]


def test_a_pod_has_the_time_that_it_needs() -> None:
    grace = int(next(arg for arg in CONTAINER["args"] if arg.startswith("serve.grace=")).partition("=")[2])
    drained = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > grace + drained
    compose_file = read(DEPLOY / "compose.yaml")["services"]["dovetail"]
    wait = int(compose_file["stop_grace_period"].removesuffix("s"))
    assert all(int(arg.partition("=")[2]) < wait for arg in compose_file["command"] if arg.startswith("serve.grace="))
    unit = (DEPLOY / "systemd" / "dovetail.service").read_text()
    assert int(re.search(r"TimeoutStopSec=(\d+)", unit)[1]) > int(re.search(r"serve.grace=(\d+)", unit)[1])  # type: ignore[index]


# Compose and Docker.


def test_compose_files_name_what_is_there() -> None:
    both = [read(DEPLOY / name) for name in ("compose.yaml", "compose.gpu.yaml")]
    services = both[0]["services"]
    assert both[1]["services"].keys() <= services.keys()
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in both[0]["volumes"]
    (target,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in services and services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (source,) = read(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml")["datasources"]
    assert source["uid"] in DASHBOARD.read_text()
    build = services["dovetail"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    arguments = re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert build["args"].keys() <= set(arguments)


def test_the_image_gets_what_the_wheel_is_built_from() -> None:
    sent = re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M)
    assert all((DEPLOY.parent / path).exists() for path in sent)
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    needed = re.search(r"targets\.sdist\]\nonly-include = \[(.*)\]", project)
    assert needed is not None
    assert {path.split("/")[0] for path in re.findall(r'"(.+?)"', needed[1])} <= set(sent)


def words_of_the_unit() -> list[str]:
    unit = (DEPLOY / "systemd" / "dovetail.service").read_text()
    line, given = re.search(r"^ExecStart=\S+ (.*)$", unit, re.M), re.search(r'DOVETAIL_ARGS="(.*)"', unit)
    assert line is not None and given is not None
    return shlex.split(line[1].replace("$DOVETAIL_ARGS", given[1]))


def command_lines() -> dict[str, list[str]]:
    docker = (DEPLOY / "Dockerfile").read_text()
    found = {
        "Dockerfile": json.loads(re.search(r"^CMD (\[.*\])", docker, re.M)[1]),  # type: ignore[index]
        "kubernetes": CONTAINER["args"],
        "systemd": words_of_the_unit(),
    }
    for name in ("compose.yaml", "compose.gpu.yaml"):
        found[name] = read(DEPLOY / name)["services"]["dovetail"]["command"]
    return found


@pytest.mark.skipif("serve" not in installed().options("app"), reason="app=serve is not here yet")
@pytest.mark.parametrize("where", command_lines())
def test_what_is_started_can_be_composed(where: str) -> None:
    assert compose(command_lines()[where]).app == "serve"


# Checks by the programs that read the files.


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not here")
    unit = (DEPLOY / "systemd" / "dovetail.service").read_text()
    file = tmp_path / "dovetail.service"
    file.write_text(unit.replace("/opt/dovetail/bin/dovetail", sys.executable))
    said = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True, timeout=60)
    ours = [line for line in said.stderr.splitlines() if "dovetail.service" in line]
    assert said.returncode == 0 and not ours, said.stderr


def test_nginx_sends_again_only_what_has_not_reached_an_engine() -> None:
    """`error` with `non_idempotent` would repeat a POST whose connection broke, and so what killed its server."""
    rules = re.findall(r"proxy_next_upstream (.*);", (DEPLOY / "nginx" / "nginx.conf").read_text())
    assert rules == ["http_503 http_429 non_idempotent", "error"]


def test_nginx_accepts_its_configuration() -> None:
    nginx = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
    if nginx is None:
        pytest.skip("nginx is not here")
    said = subprocess.run(
        [nginx, "-t", "-c", DEPLOY / "nginx" / "nginx.conf"], capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stderr
