"""Many independent runs: side by side, tried again, kept, stopped and gone on with; on Ray where it is installed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ranks import free_port

from bilevel.errors import DataError, MissingPackageError, OptionError, RunError
from bilevel.running.run_many import ResultFolder, RunItem, Where, run_items, run_many

NO_RAY = "Ray is not installed: pip install 'bilevel[ray]'"


def logged(settings, result):
    """The result; a line in the log of begun runs says that this one was begun, and where."""
    with open(Path(settings["log"]) / f"{settings['x']}", "a") as file:
        file.write(f"{os.getpid()}\n")
    return result


def pids(folder: Path) -> list[int]:
    """The processes of all runs that were begun."""
    return [pid for found in begun(folder).values() for pid in found]


def begun(folder: Path) -> dict[str, list[int]]:
    return {path.name: [int(line) for line in path.read_text().split()] for path in sorted(folder.iterdir())}


def square(settings):
    return logged(settings, {"value": settings["x"] ** 2})


def dies_once(settings):
    logged(settings, None)
    if settings["x"] == 1 and len(begun(Path(settings["log"]))["1"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"value": settings["x"] ** 2}


def fails_at_two(settings):
    logged(settings, None)
    if settings["x"] == 2:
        raise FloatingPointError("two is not liked")
    return {"value": settings["x"] ** 2}


SPOILT: list[int] = []


def spoils_its_process(settings):
    """As an error of a GPU does: the first run of 1 fails, and all later ones in its process."""
    logged(settings, None)
    if SPOILT or (settings["x"] == 1 and len(begun(Path(settings["log"]))["1"]) == 1):
        SPOILT.append(1)
        raise RuntimeError("the device is gone")
    return {"value": settings["x"] ** 2}


def refuses(settings):
    logged(settings, None)
    raise DataError("there is no data.")


def slow(settings):
    logged(settings, None)
    time.sleep(0.1 if settings["x"] < 2 else 60)
    return {"value": settings["x"]}


@pytest.fixture
def items(tmp_path):
    (tmp_path / "log").mkdir()
    return [{"x": x, "log": str(tmp_path / "log")} for x in range(4)]


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_items_and_are_not_computed_twice(items, tmp_path, workers):
    for _ in range(2):
        found = run_many(square, items, tmp_path / "out", workers=workers)
        assert [one["value"] for one in found] == [0, 1, 4, 9]
    first = begun(tmp_path / "log")
    assert [len(found) for found in first.values()] == [1, 1, 1, 1]
    assert (os.getpid() in pids(tmp_path / "log")) == (workers == 1)
    assert len(set(pids(tmp_path / "log"))) <= workers
    assert run_many(square, [{**items[0], "x": 7}, *items], tmp_path / "out")[0]["value"] == 49
    assert sum(map(len, begun(tmp_path / "log").values())) == 5


def test_run_whose_process_is_killed_is_run_again_in_another(items, tmp_path):
    store, cells = ResultFolder(tmp_path / "out"), [RunItem(item, 0) for item in items]
    assert run_items(cells, store, dies_once, where=Where(2))
    assert [(store.get(cell) or {})["value"] for cell in cells] == [0, 1, 4, 9]
    assert {name: len(found) for name, found in begun(tmp_path / "log").items()} == {"0": 1, "1": 2, "2": 1, "3": 1}


def always_dies(settings):
    if settings["x"] == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(settings)


def test_run_that_kills_its_process_each_time_is_named_and_takes_no_other_with_it(items, tmp_path):
    with pytest.raises(RunError, match=r"1 of 4 runs failed, each tried 1 times: 1-.*its process ended"):
        run_many(always_dies, items, tmp_path / "out", workers=2, retries=0)
    assert len(list((tmp_path / "out").glob("*.json"))) == 3


def test_several_workers_without_joblib_say_what_to_install(items, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "joblib", None)
    monkeypatch.setitem(sys.modules, "joblib.externals.loky", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bilevel\[apps\]'"):
        run_many(square, items, tmp_path / "out", workers=2)


def test_process_of_a_run_that_failed_gets_no_other(items, tmp_path):
    found = run_many(spoils_its_process, items, tmp_path / "out", workers=2, retries=1)
    assert [one["value"] for one in found] == [0, 1, 4, 9]
    assert {name: len(runs) for name, runs in begun(tmp_path / "log").items()} == {"0": 1, "1": 2, "2": 1, "3": 1}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_that_fails_for_good_is_named_and_the_others_are_kept(items, tmp_path, workers):
    with pytest.raises(RunError, match=r"1 of 4 runs failed, each tried 2 times: 2-.*FloatingPointError: two is not"):
        run_many(fails_at_two, items, tmp_path / "out", workers=workers, retries=1)
    assert {name: len(found) for name, found in begun(tmp_path / "log").items()} == {"0": 1, "1": 1, "2": 2, "3": 1}
    assert [one["value"] for one in run_many(square, items, tmp_path / "out")] == [0, 1, 4, 9]
    assert len(begun(tmp_path / "log")["3"]) == 1


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_error_of_the_library_is_raised_at_once(items, tmp_path, workers):
    with pytest.raises(DataError, match="there is no data"):
        run_many(refuses, items, tmp_path / "out", workers=workers)
    assert max(len(found) for found in begun(tmp_path / "log").values()) == 1


def test_no_run_is_begun_after_the_deadline(items, tmp_path):
    cells = [RunItem(item, item["x"]) for item in items]
    assert run_items(cells, ResultFolder(tmp_path / "out"), square, deadline=time.monotonic())
    assert begun(tmp_path / "log") == {}


def test_counts_are_checked(items, tmp_path):
    with pytest.raises(OptionError, match=r"workers must be .*at least 1; got 0"):
        run_many(square, items, tmp_path / "out", workers=0)
    with pytest.raises(OptionError, match="retries must be"):
        run_many(square, items, tmp_path / "out", retries=-1)


SCRIPT = """
import json, os, sys
sys.path[:0] = [sys.argv[1], os.path.dirname(sys.argv[1])]
from test_runs import slow, run_many

if __name__ == "__main__":
    items = json.loads(sys.argv[2])
    try:
        run_many(slow, items, sys.argv[3], workers=2)
    except KeyboardInterrupt:
        sys.exit(7)
"""


def until_two_are_kept(folder: Path) -> None:
    """Wait for two results, while the other two runs are under way."""
    limit = time.monotonic() + 300
    while len(list(folder.glob("out/*.json"))) < 2 or len(begun(folder / "log")) < 4:
        assert time.monotonic() < limit
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_study_that_is_stopped_keeps_what_is_finished_and_leaves_no_process(items, tmp_path, number):
    (tmp_path / "study.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, tmp_path / "study.py", Path(__file__).parent, json.dumps(items), tmp_path / "out"]
    )
    until_two_are_kept(tmp_path)
    process.send_signal(number)
    assert process.wait(120) == (7 if number == signal.SIGINT else -9)
    kept = [json.loads(path.read_text())["result"] for path in (tmp_path / "out").glob("*.json")]
    assert sorted(one["value"] for one in kept) == [0, 1]
    if number == signal.SIGINT:
        for pid in set(pids(tmp_path / "log")):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    else:  # its workers end with the run that they are at: not waited for here
        for pid in set(pids(tmp_path / "log")):
            os.kill(pid, signal.SIGKILL)
    found = run_many(square, items, tmp_path / "out")
    assert [one["value"] for one in found] == [0, 1, 4, 9]
    assert [len(found) for found in begun(tmp_path / "log").values()] == [1, 1, 2, 2]


# -- Ray ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def addresses():
    """The two of a cluster on this machine with two workers, which another process has started."""
    place = Path(__file__).parent
    path = os.pathsep.join([str(place), str(place.parent), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray makes one, in the user's home
        patch.setenv("PYTHONPATH", path)
        pytest.importorskip("ray", reason=NO_RAY)
        port, client = free_port(), free_port()
        start = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--num-cpus=2",
            f"--port={port}",
            f"--ray-client-server-port={client}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--dashboard-agent-listen-port={free_port()}",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--temp-dir={folder}",
        ]
        head = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            listening(port, head)
            yield f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}"
        finally:
            head.terminate()
            head.wait(60)


@pytest.fixture
def cluster(addresses):
    return addresses[0]


def listening(port: int, head: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until the cluster is there."""
    limit = time.monotonic() + 120
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            assert head is None or head.poll() is None, f"the cluster ended with code {head.returncode}"
            assert time.monotonic() < limit, "there is no cluster after two minutes"
            time.sleep(0.2)


def test_runs_go_to_the_workers_of_a_ray_cluster_and_are_kept(cluster, items, tmp_path):
    for _ in range(2):
        found = run_many(square, items, tmp_path / "out", address=cluster)
        assert [one["value"] for one in found] == [0, 1, 4, 9]
    assert len(pids(tmp_path / "log")) == 4
    assert os.getpid() not in pids(tmp_path / "log")


def test_runs_go_to_a_ray_cluster_by_its_address_for_clients(addresses, items, tmp_path):
    listening(int(addresses[1].rpartition(":")[2]))
    assert [one["value"] for one in run_many(square, items, tmp_path / "out", address=addresses[1])] == [0, 1, 4, 9]
    assert os.getpid() not in pids(tmp_path / "log")


def test_run_whose_ray_worker_is_killed_is_run_again(cluster, items, tmp_path):
    found = run_many(dies_once, items, tmp_path / "out", address=cluster)
    assert [one["value"] for one in found] == [0, 1, 4, 9]
    assert {name: len(found) for name, found in begun(tmp_path / "log").items()} == {"0": 1, "1": 2, "2": 1, "3": 1}


def test_run_that_fails_on_ray_is_named(cluster, items, tmp_path):
    with pytest.raises(RunError, match=r"1 of 4 runs failed, each tried 2 times: 2-.*FloatingPointError"):
        run_many(fails_at_two, items, tmp_path / "out", address=cluster, retries=1)
    assert len(list((tmp_path / "out").glob("*.json"))) == 3


def test_study_on_ray_that_is_stopped_by_ctrl_c_keeps_what_is_finished_and_goes_on(cluster, items, tmp_path):
    (tmp_path / "study.py").write_text(SCRIPT.replace("workers=2", f"address={cluster!r}"))
    process = subprocess.Popen(
        [sys.executable, tmp_path / "study.py", Path(__file__).parent, json.dumps(items), tmp_path / "out"]
    )
    until_two_are_kept(tmp_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 7
    assert len(list(tmp_path.glob("out/*.json"))) == 2
    found = run_many(square, items, tmp_path / "out", address=cluster)
    assert [one["value"] for one in found] == [0, 1, 4, 9]
    assert [len(found) for found in begun(tmp_path / "log").values()] == [1, 1, 2, 2]


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_address_at_which_nothing_listens_is_refused_at_once(items, tmp_path, scheme):
    pytest.importorskip("ray", reason=NO_RAY)
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(OptionError, match=f"there is no Ray cluster at {address} .*refused"):
        run_many(square, items, tmp_path / "out", address=address)


def test_address_without_ray_says_what_to_install(items, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bilevel\[ray\]'"):
        run_many(square, items, tmp_path / "out", address="auto")
