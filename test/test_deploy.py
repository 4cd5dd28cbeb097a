"""The files of ``deploy``: each is checked by the tool of its kind, and its commands by ours.

A flag, a setting, a route or a metric that is renamed fails here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from fastapi import FastAPI

from sglang_batch.__main__ import _parser
from sglang_batch.config import OfflineBatchConfig
from sglang_batch.errors import ConfigError
from sglang_batch.run.fleet_options import WorkerOptions, engine_options
from sglang_batch.run.prepare import RunOptions
from sglang_batch.run.serve_command import _front_options
from sglang_batch.server import metrics, runner
from sglang_batch.server.http.all_routes import install
from sglang_batch.server.http.authorization import METRICS, OPEN
from sglang_batch.server.http.calls import known_routes
from sglang_batch.srt.compat.command_line import check_arguments

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").iterdir())
COMPOSE = DEPLOY / "compose" / "compose.yaml"
CHART = DEPLOY / "helm" / "sglang-batch"
UNIT = DEPLOY / "systemd" / "sglang-batch.service"
SKYPILOT = DEPLOY / "skypilot" / "batch.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Tools that the extra `dev` installs.
OF_DEV = ("hadolint", "check-jsonschema")
BIN = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])


def run_tool(name: str, *arguments: str | Path) -> None:
    """Run a tool, which must find nothing."""
    path = shutil.which(name, path=BIN)
    if path is None:
        assert name not in OF_DEV, f"{name} is not installed; run `make env`"
        pytest.skip(f"{name} is not installed")
    done = subprocess.run([path, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def of_dev(name: str) -> Any:
    """A module that the extra `dev` installs."""
    assert find_spec(name), f"{name} is not installed; run `make env`"
    return import_module(name)


def check(command: Iterable[str]) -> None:
    """Check a command as `sglang-batch` does before it looks at files and servers."""
    options, rest = _parser().parse_known_args([*command])
    if options.command == "serve":
        engine = engine_options(options, rest)
        if isinstance(engine, WorkerOptions):
            known = _front_options([*engine.argv])
        else:
            known = check_arguments([*engine.argv])
        settings = getattr(known, "offline_batch_config", None)
        OfflineBatchConfig.from_json(settings)
    elif options.command == "run":
        engine = RunOptions.of(options, rest).engine
        if not isinstance(engine, WorkerOptions):
            check_arguments([*engine.argv])
    else:
        assert options.command in ("backup", "restore")
        assert not rest


def substituted(text: str, **values: str) -> str:
    """Variables of a file's environment, such as ``${MODEL:?a model}``, replaced."""
    return re.sub(r"\$\{?\(?(\w+)(:[?-][^}]*)?[)}]?", lambda m: values[m[1]], text)


def check_probe(url: str) -> None:
    assert "/" + url.rpartition("/")[2] in OPEN, url


@pytest.mark.parametrize(
    "command",
    [
        "serve --model-path=m --no-such-option=1",
        "serve --workers=http://a --no-such-option",
        """serve --model-path=m --offline-batch-config='{"no_setting":1}'""",
        "run -i a -o b --state=s3://c --no-such-option --model-path=m",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    with pytest.raises(ConfigError):
        check(shlex.split(command))


def test_probes_are_routes() -> None:
    app = FastAPI()
    install(app)
    # The others are SGLang's, and a front's.
    ours = {route.template for route in known_routes(app)} & OPEN
    assert ours >= {"/live", "/draining"}


# Images ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    run_tool("hadolint", path)
    text = path.read_text()
    for names in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    [extras] = re.findall(r"\[(.+)\]' *(?:\\|$)", text, re.MULTILINE)
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    start = [
        json.loads(words) for words in re.findall(r"^(?:ENTR|CMD).*?(\[.+)", text, re.M)
    ]
    assert start == [["sglang-batch"], ["serve", "--help"]]


@pytest.mark.parametrize("path", [DEPLOY / "docker" / "Dockerfile.gpu", SKYPILOT])
def test_sglangs_image_is_that_of_the_pinned_release(path: Path) -> None:
    [pinned] = [each for each in PROJECT["dependencies"] if each.startswith("sglang==")]
    [tag] = re.findall(r"lmsysorg/sglang:v(\S+)", path.read_text())
    assert pinned == f"sglang=={tag}"
    assert requires("sglang")


# Compose --------------------------------------------------------------------------


def test_compose() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    run_tool("check-jsonschema", *schema, COMPOSE)
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert services.keys() == {"server", "front", "worker-0", "worker-1"}
    for name, service in services.items():
        command = [
            substituted(word, MODEL="m", WORKERS_KEY="k") for word in service["command"]
        ]
        check(command)
        check_probe(service["healthcheck"]["test"][-1])
        build = service["build"]
        assert (COMPOSE.parent / build["context"] / build["dockerfile"]).exists()
        assert service["stop_grace_period"] == "2m"
        for url in re.findall(r"http://([\w-]+):30000", " ".join(command)):
            assert url in services, name
    example = (COMPOSE.parent / "example.env").read_text()
    used = re.findall(r"\$\{(\w+)", COMPOSE.read_text())
    assert {*used} == {*re.findall(r"^(\w+)=", example, re.MULTILINE)}
    assert runner.DRAIN_S < 120


# nginx ----------------------------------------------------------------------------


def test_nginx(tmp_path: Path) -> None:
    crossplane = of_dev("crossplane")
    path = tmp_path / "nginx.conf"
    include = f"events {{}} http {{ include {DEPLOY}/nginx/*.conf; }}"
    path.write_text(include)
    found = crossplane.parse(str(path), strict=True)
    assert found["status"] == "ok", found["errors"]
    assert len(found["config"]) == 2
    assert METRICS in json.dumps(found["config"][1])


# systemd --------------------------------------------------------------------------


def test_systemd_unit(tmp_path: Path) -> None:
    text = UNIT.read_text()
    [command] = re.findall(r"^ExecStart=((?:.*\\\n)*.*)$", text, re.MULTILINE)
    program, *words = shlex.split(command.replace("\\\n", " "))
    check(substituted(word, MODEL="m") for word in words)
    found = dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
    assert found["KillMode"] == "mixed"
    assert int(found["TimeoutStopSec"]) > runner.DRAIN_S
    # The program is where this test runs.
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace(program, sys.executable))
    run_tool("systemd-analyze", "verify", "--man=no", copy)


# Helm -----------------------------------------------------------------------------

SECRET = {"secret": {"keys": "ann sk-1", "workersKey": "sk-2"}}
ALL = {
    **SECRET,
    "workers": {"replicas": 5, "args": ["--tp=2"], "nodeSelector": {"gpu": "h100"}},
    "front": {"config": {"max_batches": 8}, "args": ["--log-level=debug"]},
    "autoscaling": {"enabled": True, "minReplicas": 2},
    "backup": {"url": "s3://bucket/batches.tar", "restore": True},
    "job": {"enabled": True, "input": "s3://i", "output": "s3://o", "state": "s3://s"},
    "env": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "serviceAccountName": "batch",
}


@pytest.fixture(scope="module")
def helm() -> Any:
    return of_dev("helm_python")


def render(helm: Any, values: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects that an installation makes."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name="demo", namespace="prod")
    texts = [text for text in files.values() if text.strip()]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def by_kind(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def containers(
    objects: list[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Containers with the pods that they are in."""
    for each in objects:
        pod = each["spec"].get("template", {}).get("spec") if "spec" in each else None
        if pod:
            for container in [*pod.get("initContainers", ()), *pod["containers"]]:
                yield container, pod


def test_the_chart_is_clean(helm: Any) -> None:
    found = helm.lint(str(CHART), values=SECRET)
    assert not found["errors"]
    worse = [each for each in found["messages"] if each["severity"] > 1]
    assert not worse


@pytest.mark.parametrize("values", [SECRET, ALL], ids=["default", "all"])
@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_objects_of_the_chart(helm: Any, values: dict[str, Any], version: str) -> None:
    kubernetes = of_dev("kubernetes_validate")
    objects = render(helm, values)
    for each in objects:
        kubernetes.validate(each, version, strict=True)
    [secret] = [each for each in objects if each["kind"] == "Secret"]
    shells = []
    for container, pod in containers(objects):
        mounted = {each["name"] for each in container.get("volumeMounts", ())}
        claims = {"batches", "cache"}
        assert mounted <= {each["name"] for each in pod.get("volumes", ())} | claims
        keys = [each["valueFrom"]["secretKeyRef"] for each in container.get("env", ())
                if "valueFrom" in each]  # fmt: skip
        assert all(
            key["key"] in secret["stringData"] or key["optional"] for key in keys
        )
        if "args" in container:
            check(substituted(word, WORKERS_KEY="k") for word in container["args"])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                check_probe(container[probe]["httpGet"]["path"])
        shells += [container["command"][2]] if "command" in container else []
    for shell in shells:
        done = subprocess.run(["sh", "-n"], input=shell, text=True, capture_output=True)
        assert not done.stderr
        for line in re.findall(r"sglang-batch (?:backup|restore) .*", shell):
            check(shlex.split(line)[1:])


def test_the_front_knows_all_workers_that_may_come(helm: Any) -> None:
    found = by_kind(render(helm, ALL))
    [front] = [
        c
        for c, _ in containers([found["StatefulSet", "demo-front"]])
        if c["name"] == "front"
    ]
    urls = front["args"][1].removeprefix("--workers=").split(",")
    assert urls == [f"http://demo-worker-{i}.demo-worker:30000" for i in range(5)]
    scaler = found["HorizontalPodAutoscaler", "demo-worker"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    assert "replicas" not in found["StatefulSet", "demo-worker"]["spec"]
    [metric] = [each["external"] for each in scaler["metrics"]]
    assert (
        metric["metric"]["name"].removeprefix(metrics.PREFIX)
        in metrics.METRICS["gauges"]
    )
    assert metric["target"]["averageValue"] == "20000000"
    config = json.loads(front["args"][-2].partition("=")[2])
    assert config == {
        "api_keys": "/etc/sglang-batch/keys",
        "open_metrics": True,
        "max_batches": 8,
    }
    # A job starts when all of its workers are there.
    [job] = [c for c, _ in containers([found["Job", "demo-job"]]) if c["name"] == "job"]
    assert len(job["args"][1].split(",")) == 2


def test_the_name_of_a_secret_replaces_the_values(helm: Any) -> None:
    objects = render(helm, {"secret": {"name": "mine"}})
    assert not [each for each in objects if each["kind"] == "Secret"]
    assert "mine" in json.dumps(objects)
    assert "demo-keys" not in json.dumps(objects)
    with pytest.raises(helm.HelmError, match=r"secret\.keys"):
        render(helm, {})


@pytest.mark.parametrize(
    "values",
    [{"wokers": {}}, {"workers": {"replicas": 0}}, {"front": {"storge": "1Gi"}}],
    ids=str,
)
def test_wrong_values_are_refused(helm: Any, values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmError):
        render(helm, SECRET | values)


# SkyPilot -------------------------------------------------------------------------


def skypilots_schema(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The schema of its tasks, without the clients of all clouds that ``import sky`` loads."""
    root = Path(sys.prefix) / "skypilot" / "sky"
    assert root.exists(), "skypilot is not installed; run `make env`"
    for name in ("sky", "sky.skylet", "sky.utils", "sky.setup_files"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    sys.modules["sky"].__version__ = "0.14.1"  # type: ignore[attr-defined]
    stop = types.ModuleType("sky.skylet.autostop_lib")
    stop.AutostopWaitFor = types.SimpleNamespace(  # type: ignore[attr-defined]
        supported_modes=lambda: ["jobs", "none"]
    )
    monkeypatch.setitem(sys.modules, stop.__name__, stop)
    from sky.utils import schemas  # type: ignore[import-not-found]

    # Of the section `config`, which is not used, it would import the clouds.
    monkeypatch.setattr(schemas, "_task_config_schema", dict)
    schema: dict[str, Any] = schemas.get_task_schema()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
        monkeypatch.delitem(sys.modules, name)
    return schema


def test_skypilot(monkeypatch: pytest.MonkeyPatch) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    jsonschema.validate(task, skypilots_schema(monkeypatch))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(task | {"rum": ""}, skypilots_schema(monkeypatch))


def test_skypilots_command() -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["resources"]["use_spot"]
    for script in (task["setup"], task["run"]):
        assert not subprocess.run(
            ["sh", "-n"], input=script, text=True, capture_output=True
        ).stderr
    [line] = re.findall(r"sglang-batch (run .*) \|\|", task["run"])
    values = {name: value or "s3://bucket/x" for name, value in task["envs"].items()}
    command = shlex.split(substituted(line, **values))
    assert "--state" in command
    check(command)


def test_the_page_names_each_file() -> None:
    page = (DEPLOY / "README.md").read_text()
    assert all(folder.name in page for folder in DEPLOY.iterdir() if folder.is_dir())
