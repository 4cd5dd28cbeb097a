"""What is carried to a GPU and run there, without one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import preloaded
import psutil
import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
GPU = BENCHMARK / "gpu"


@pytest.fixture(autouse=True)
def gpu_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's files are in one directory and not a package."""
    monkeypatch.syspath_prepend(str(GPU))


# The list -------------------------------------------------------------------------------


def test_every_command_can_run() -> None:
    from command_list import read_commands
    from dry_run import dry_run

    commands = read_commands()
    said = dry_run(commands)
    assert "8000+100->128: 1024 requests" in said["ours"]
    assert "400 x 16, 2000+200->100: 6400 requests" in said["ours"]
    assert "1,4,16,64,256,1024 256,32,256,64,32,256" in said["trees-64-8"]
    assert "tiles for pages of 1" in said["tune"]
    assert "fa3" in said["servers-correct"] and "torch" not in said["servers-correct"]
    assert "drafts-of-a-model" in said["drafts-correct"]
    policies = {"lpm", "fcfs", "dfs-weight", "hrrn", "shortest-prefill-first", "lof"}
    assert policies | {"random", "routing-key"} <= said.keys()
    # Whatever a benchmark measures is kept.
    for command in commands:
        for line in command.run:
            if line[1].startswith("benchmark/"):
                assert any("{" in word for word in line), command.name


def test_a_command_that_cannot_run_is_named(tmp_path: Path) -> None:
    from command_list import Command
    from dry_run import dry_run

    def refused(*line: str, minutes: float = 1) -> str:
        with pytest.raises(ValueError, match="one: ") as caught:
            dry_run([Command("one", "", minutes, [list(line)])])
        return str(caught.value)

    script = "benchmark/bench_gpu_throughput.py"
    assert "'nope' is no engine" in refused("python", script, "--engines", "nope")
    assert "--alone" in refused("python", script, "--kv-tokens=all")
    assert "fewer layers" in refused(
        "python", script, "--model=qwen3-next-80b-a3b", "--jobs=1"
    )
    assert "does not fit" in refused("python", script, "--jobs=2", "--kv-tokens=4000")
    tests = ("python", "-m", "pytest", "test/kernels/test_shared_prefix_gpu.py", "-k")
    assert "no test 'nope'" in refused(*tests, "nope")
    assert "no test for a GPU" in refused("python", "-m", "pytest", "test/job")
    assert "unknown command" in refused("rm", "-r", "/")
    for command in ("plan", "calibrate", "simulate"):
        misspelt = refused("sglang-batch", command, "--atention-backend", "fa3")
        assert "unrecognized arguments: --atention-backend fa3" in misspelt
    assert "not less than 9" in refused("python", script, minutes=9)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_options_of_sglang() -> None:
    import bench_gpu_throughput as jobs
    import first_tokens
    from command_list import read_commands

    options, model = jobs.parse_options(["--alone", "--kv-tokens=all"]), Path("m")
    kinds = map(
        jobs.kind_of, [*jobs.OURS, *jobs.POLICIES, "best+mixed", "best+hicache"]
    )
    engines = [first_tokens.arguments_of(first_tokens.parse_options([]), model)]
    for kind in kinds:
        policy = [] if kind.ours else [f"--schedule-policy={kind.policy}"]
        arguments = [*jobs.arguments_of(options, model), *kind.arguments]
        engines.append(arguments + policy)

    lines = [
        [word.format(save="s", scratch="s", model="m") for word in line[3:]]
        for command in read_commands()
        for line in command.run
        if line[1] == "exec"
    ]
    code = (
        "import argparse, json, sys\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.benchmark.offline_throughput import BenchArgs\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "lines, engines = json.loads(sys.argv[1])\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "ServerArgs.add_cli_args(parser)\n"
        "for engine in engines: parser.parse_args(engine)\n"
        "for line in lines:\n"
        "    parser = argparse.ArgumentParser()\n"
        "    ServerArgs.add_cli_args(parser); BenchArgs.add_cli_args(parser)\n"
        "    found = BenchArgs.from_cli_args(parser.parse_args(line))\n"
        "    print(found.gsp_num_groups, found.dataset_name)\n"
    )
    done = preloaded.run(
        [sys.executable, "-c", code, json.dumps([lines, engines])], timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["64 generated-shared-prefix"] * len(lines)


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@pytest.mark.slow
def test_the_list_goes_on_after_failures_and_another_call(tmp_path: Path) -> None:
    from command_list import Command
    from run_list import FINAL, Runner

    def python(code: str) -> list[str]:
        return ["python", "-c", code]

    def command(
        name: str,
        *lines: list[str],
        minutes: float = 0.5,
        needs: str = "",
        least: float = 0,
    ) -> Command:
        return Command(name, "", minutes, list(lines), tuple(needs.split()), least)

    count = "open(r'{save}/count', 'a').write('x')"
    # An engine in a session of its own, whose benchmark crashes.
    left = (
        "import subprocess, sys; print('lost', flush=True)\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(99)']\n"
        "engine = subprocess.Popen(sleep, start_new_session=True)\n"
        "open(r'{save}/pid', 'w').write(str(engine.pid)); sys.exit(3)"
    )
    given = "open(r'{save}/given', 'w').write('{minutes}')"
    commands = [
        command("bad", python(left), python(count)),
        command("no tool", ["no-such-tool"]),
        command("slow", python("import time; time.sleep(60)"), minutes=0.02),
        command("lacking", python(count), needs="sglang-kernel-of-mars pytest"),
        command("large", python(count), minutes=8),
        command("shorter", python(given), minutes=8, least=1.5),
        command("good", python(count), python(count), needs="pytest"),
    ]
    save, bundle = tmp_path / "save", tmp_path / "all.tar.gz"
    runner = Runner(save, None, bundle)
    runner.run(commands, minutes=2)
    states = runner.states()
    assert states == {
        "bad": "failed",
        "no tool": "failed",
        "slow": "ended",
        "shorter": "done",
        "good": "done",
    }
    # It has less than its minutes, and a minute of them to end in.
    assert 0.5 <= float((save / "given").read_text()) <= 1
    assert "lost" in (save / "bad.log").read_text()
    assert not _runs(int((save / "pid").read_text()))
    assert (save / "count").read_text() == "xx"
    with tarfile.open(bundle) as archive:
        names = set(archive.getnames())
    assert {"./count", "./good.log", "./status.jsonl"} <= names
    assert not any("scratch" in name for name in names)
    # The next call has the time for the large one, and runs no other again.
    again = Runner(save, None, None)
    again.run(
        [each for each in commands if again.states().get(each.name) not in FINAL], 9
    )
    assert again.states()["large"] == "done"
    assert (save / "count").read_text() == "xxx"


@pytest.mark.slow
def test_packages_that_cannot_be_imported_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import run_list
    from command_list import Command

    monkeypatch.setitem(run_list.IMPORTED, "pytest", ("xml", "no_such_module"))
    line = ["python", "-c", "open(r'{save}/ran', 'w')"]
    command = Command("one", "", 1, [line], ("pytest",))
    run_list.Runner(tmp_path, None, None).run([command], 2)
    assert "one: left out" in (said := capsys.readouterr().out)
    assert "No module named 'no_such_module'" in said
    assert not (tmp_path / "ran").exists()


def test_sglang_finds_the_plugin_of_a_checkout(tmp_path: Path) -> None:
    from run_list import write_plugin

    write_plugin(tmp_path)
    code = (
        "from importlib.metadata import distribution\n"
        "found = distribution('sglang-batch').entry_points\n"
        "print({each.group for each in found})"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "sglang.srt.plugins" in done.stdout and "sglang.srt.platforms" in done.stdout


# What is carried ------------------------------------------------------------------------


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
    return path


def test_parts_become_a_folder_of_packages(tmp_path: Path) -> None:
    import carry

    wheels = [
        wheel(
            tmp_path,
            "carried_one",
            {
                "carried_one/__init__.py": b"from .part import VALUE\n",
                "carried_one-1.0.data/purelib/carried_one/part.py": b"VALUE = 41\n",
                "carried_one-1.0.data/scripts/tool": b"#!python\n",
                "carried_one-1.0.dist-info/METADATA": b"Name: carried-one\nVersion: 1.0\n",
            },
        ),
        wheel(
            tmp_path,
            "carried_two",
            {
                "carried_two.py": b"import carried_one\nVALUE = carried_one.VALUE + 1\n",
                "carried_large.bin": os.urandom(20_000),
                "sgl_kernel/sm100/ops.so": os.urandom(20_000),
            },
        ),
    ]
    parts, site = tmp_path / "parts", tmp_path / "site"
    names = carry.pack(wheels, parts, part_bytes=6000)
    assert len(names) >= 4
    assert all((parts / name).stat().st_size <= 6000 for name in names)
    assert carry.main(["unpack", str(parts), str(site)]) == 0
    assert not (site / "tool").exists() and not (site / "sgl_kernel").exists()
    assert len((site / "carried_large.bin").read_bytes()) == 20_000
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import carried_two; print(carried_two.VALUE)"],
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "42\n"


def test_a_part_and_a_checkout_are_one_upload() -> None:
    import carry

    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=BENCHMARK.parent, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("no checkout of git")
    files = (BENCHMARK.parent / name for name in listed.stdout.split("\0") if name)
    size = sum(file.stat().st_size for file in files if file.exists())
    assert size + carry.PART_BYTES <= 64 << 20


def test_damaged_and_missing_parts_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import carry

    parts, site = tmp_path / "parts", tmp_path / "site"
    one = wheel(tmp_path, "carried_one", {"one.bin": os.urandom(5000)})
    names = carry.pack([one], parts, part_bytes=2000)
    damaged = parts / names[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert carry.main(["unpack", str(parts), str(site)]) == 1
    assert capsys.readouterr().err == f"carry.py: damaged, send again: {names[1]}.\n"
    damaged.unlink()
    assert carry.main(["unpack", str(parts), str(site)]) == 1
    assert f"lacks {names[1]}: send these" in capsys.readouterr().err
    assert not site.exists()
    with pytest.raises(carry.CarryError, match="not empty"):
        carry.pack([one], parts)


def test_only_what_the_machine_lacks_is_carried(tmp_path: Path) -> None:
    import carry

    (tmp_path / "machine.txt").write_text(
        "# a machine\npython==3.12\npluggy==0.1\nPackaging\n"
    )
    machine = carry.Machine.read(tmp_path / "machine.txt")
    assert machine.python == "3.12"
    pins = {
        "pytest": "9.2.0",
        "pluggy": "1.7.0",
        "packaging": "26.3",
        "iniconfig": "2.3.1",
    }
    found = carry.missing(["pytest"], pins, machine, replace=[])
    assert found == ["iniconfig==2.3.1", "pytest==9.2.0"]
    found = carry.missing(
        ["pytest"], pins, machine, replace=["pluggy"], without=["iniconfig"]
    )
    assert found == ["pluggy==1.7.0", "pytest==9.2.0"]
    # What only a package requires that stays, stays too.
    found = carry.missing(["hypothesis", "pytest"], pins, machine, without=["pytest"])
    assert found == []
    assert carry.Machine.read(carry.MACHINE).packages["torch"] == "2.11.0"
    (tmp_path / "here.txt").write_text(carry.probe())
    assert "pytest" in carry.Machine.read(tmp_path / "here.txt").packages


# What the commands compute --------------------------------------------------------------


def test_the_best_policy_is_that_of_the_same_jobs(tmp_path: Path) -> None:
    from bench_gpu_throughput import best_policy, kind_of

    def saved(policy: str, **seconds: float) -> None:
        runs = [{"job": job, "seconds": each} for job, each in seconds.items()]
        (tmp_path / f"{policy}.json").write_text(json.dumps({"runs": runs}))

    assert best_policy(None) == best_policy(tmp_path) == "dfs-weight"
    saved("dfs-weight", one=3, two=8)
    saved("lpm", one=2)  # it was ended before the second job
    saved("fcfs", one=4, two=5)
    assert best_policy(tmp_path) == "lpm"
    assert kind_of("best+hicache", tmp_path) == (
        False,
        "lpm",
        ["--enable-hierarchical-cache"],
    )
    assert kind_of("stock-mixed") == (False, "dfs-weight", ["--enable-mixed-chunk"])


def test_the_time_of_a_trace(tmp_path: Path) -> None:
    from trace_steps import times_of

    def event(
        begin: float, took: float, name: str, kind: str = "kernel"
    ) -> dict[str, object]:
        return {"ts": begin, "dur": took, "name": name, "cat": kind}

    events = [
        event(10, 4, "matmul"),
        event(12, 6, "attention"),  # at the same time, on another stream
        event(30, 2, "matmul"),
        event(0, 99, "host", "cpu_op"),
        {"name": "a mark without a category"},
    ]
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    times = times_of(path)
    assert (times.span, times.busy) == (22, 10)
    assert list(times.kernels.items()) == [("matmul", 6), ("attention", 6)]


def test_log_probabilities_are_compared_while_tokens_are_equal() -> None:
    import numpy as np
    from compare_logprobs import figures_of
    from throughput_engine import TaskResult

    def result(tokens: list[list[int]], logprobs: list[list[float]]) -> TaskResult:
        return TaskResult(1, 1, tokens, 0, 0, 0, {}, logprobs, np.empty(0))

    one = result([[1, 2, 3], [4, 5, 6]], [[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]])
    two = result([[1, 2, 3], [4, 7, 8]], [[-1.01, -1.2, -1.0], [-2.0, -9.0, -9.0]])
    first, later, equal = figures_of(one, two)
    assert first.value == pytest.approx(0.01) and first.met
    assert later.value == pytest.approx(0.2)
    assert equal.value == 0.5


def test_a_result_has_what_attention_did_not_read_again() -> None:
    from throughput_engine import _Session

    class Manager:
        read = 0

        async def get_internal_state(self) -> list[dict[str, object]]:
            self.read += 100
            counts = {"attention_steps_shared": 3, "kv_read_bytes_saved": self.read}
            usage = {"token_capacity": 4000}
            return [{"offline_batch": counts, "memory_usage": usage}]

    info = {"cached_tokens": 7, "output_token_logprobs": [(-0.5, 11, None)]}
    with asyncio.Runner() as runner:
        session = _Session(runner.get_loop(), Manager(), 0.0)
        session.begin(None)
        found = session.end([{"meta_info": info, "output_ids": [11]}])
    assert found["attention"] == {
        "attention_steps": 0,
        "attention_steps_shared": 0,
        "kv_read_bytes": 0,
        "kv_read_bytes_saved": 100,
    }
    assert (found["kv_tokens"], found["logprobs"]) == (4000, [[-0.5]])
    assert found["cached_tokens"] == 7 and found["retractions"] == 0


def test_results_are_saved_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import report

    parser = argparse.ArgumentParser()
    report.add_save(parser)
    named = parser.parse_args(["--save", "name"]).save
    assert named == report.RESULTS / "name.json"
    save = parser.parse_args([f"--save={tmp_path}/a/b.json"]).save
    assert save == tmp_path / "a" / "b.json"
    results: dict[str, object] = {"runs": []}
    report.save_as_they_come(save, results)
    results["runs"] = [1]
    report.print_table("a table", ["x"], [[5]])
    document = json.loads(save.read_text())
    assert document["unfinished"] and document["runs"] == [1]
    assert document["tables"][-1]["rows"] == [[5]]
    report.finish(results, save)
    assert "unfinished" not in json.loads(save.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == [1]
