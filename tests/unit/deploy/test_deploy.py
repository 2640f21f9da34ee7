"""deploy/: configured options and queried metrics exist, and the programs that read the files accept them."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import prometheus_client.openmetrics.parser as openmetrics_parser
import prometheus_client.parser as text_parser
import pytest
import yaml

from dovetail.core.compose import compose, installed
from dovetail.plugins.app.serve.config import ServeConfig
from dovetail.plugins.app.serve.hosts import Hosts
from dovetail.plugins.app.serve.monitor import Monitor

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


ACCEPTED = {
    "Prometheus 2": "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "text": "text/plain",
}
"""Client -> the header `Accept` with which it scrapes. Versions store names differently, except plain ones."""


def scraped(accept: str) -> dict[str, set[str]]:
    """Return name of each series that a client stores -> its labels."""
    monitor = Monitor()
    monitor.engine_ready("m", replicas=1)
    monitor.response_sent(500)
    monitor.request(Record())  # type: ignore[arg-type]
    page = asyncio.run(monitor.exposition(accept))
    parse = openmetrics_parser if page.content_type.startswith("application/openmetrics-text") else text_parser
    found: dict[str, set[str]] = {}
    for family in parse.text_string_to_metric_families(page.text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


class Record:
    outcome, prompt_tokens, output_tokens, ttft, duration, tpot = "stop", 1, 2, 0.1, 0.2, 0.1


SCRAPED = {client: scraped(accept) for client, accept in ACCEPTED.items()}
ADDED = {"instance", "job", "namespace", "pod"}
"""Labels that Prometheus adds to every series."""


def queries() -> Iterator[tuple[str, str]]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])
        yield f"variable {variable['name']}", f"sum by ({asked[2]}) ({asked[1]})"  # type: ignore[index]
    for group in read(DEPLOY / "prometheus" / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]
    for rule in read(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]:
        yield "adapter", rule["seriesQuery"]


def unmeasured(query: str, series: Mapping[str, set[str]]) -> set[str]:
    """Return names of series and labels in a query that are not scraped. In PromQL, a name that is not a function, a
    label or an operator is a series."""
    grouping = r"\b(?:by|without) \(([^)]*)\)"
    labels = set(re.findall(r"(\w+)!?=", " ".join(re.findall(r"\{([^}]*)\}", query))))
    labels |= set(re.findall(r"\w+", " ".join(re.findall(grouping, query))))
    rest = re.sub(rf"\{{[^}}]*\}}|\[[^]]*\]|{grouping}", "", query)
    names = set(re.findall(r"(?<![\w.])[a-zA-Z_][\w:]*\b(?! *\()", rest)) - {"and", "or", "unless"}
    assert names, query
    known = {**series, "up": set[str]()}
    return (names - known.keys()) | {label for name in names & known.keys() for label in labels - known[name] - ADDED}


@pytest.mark.parametrize("client", ACCEPTED)
@pytest.mark.parametrize(("where", "query"), list(queries()), ids=lambda text: text if len(text) < 60 else "")
def test_what_is_asked_for_is_measured(where: str, query: str, client: str) -> None:
    assert not unmeasured(query, SCRAPED[client]), where


def test_a_misspelt_metric_or_label_would_be_found() -> None:
    series = SCRAPED["text"]
    assert unmeasured("rate(dovetail_generation_token_total[1m])", series) == {"dovetail_generation_token_total"}
    assert unmeasured("sum(rate(dovetail:generation_tokens_total[1m])) > 3", series) == {
        "dovetail:generation_tokens_total"
    }
    assert unmeasured('dovetail_num_requests_running{model="x"}', series) == {"model"}
    assert unmeasured("sum by (reason) (dovetail_requests_finished_total)", series) == {"reason"}


def test_the_dashboard_shows_what_is_measured() -> None:
    """Every exported series is on some panel."""
    text = DASHBOARD.read_text()
    names = {re.sub(r"_(bucket|sum|count|created|total)$", "", n) for n in SCRAPED["text"] if n.startswith("dovetail_")}
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
    unit, settings = ((DEPLOY / "systemd" / name).read_text() for name in ("dovetail.service", "env"))
    line, given = re.search(r"^ExecStart=\S+ (.*)$", unit, re.M), re.search(r'DOVETAIL_ARGS="(.*)"', settings)
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


@pytest.mark.parametrize("where", command_lines())
def test_a_server_that_others_can_reach_has_keys_or_only_known_names(where: str) -> None:
    """Only Compose publishes its port on loopback, so only there the keys may be missing."""
    config = compose(command_lines()[where]).app_part.config
    assert isinstance(config, ServeConfig) and config.open == where.startswith("compose")
    if config.open:
        hosts = Hosts(config, keys=False)
        (job,) = read(DEPLOY / "prometheus" / "prometheus.yml")["scrape_configs"]
        assert all(hosts.accept(target) for target in (*job["static_configs"][0]["targets"], "localhost:8000"))
        assert not hosts.accept("evil.example")


def test_the_keys_of_a_pod_are_not_optional() -> None:
    (keys,) = (one for one in CONTAINER["env"] if one["name"] == "DOVETAIL_API_KEYS")
    assert not keys["valueFrom"]["secretKeyRef"].get("optional")


def test_the_steps_for_systemd_create_what_the_unit_needs() -> None:
    unit = (DEPLOY / "systemd" / "dovetail.service").read_text()
    steps = (DEPLOY.parent / "docs" / "deploying.md").read_text().partition("## systemd")[2].partition("```bash")[2]
    user, file, program = (
        re.search(rf"^{name}=(\S+)", unit, re.M)[1]  # type: ignore[index]
        for name in ("User", "EnvironmentFile", "ExecStart")
    )
    assert re.search(rf"useradd .*--user-group .* {user}$", steps, re.M)
    assert f" {file}\n" in steps and f"venv {program.partition('/bin/')[0]} " in steps


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
