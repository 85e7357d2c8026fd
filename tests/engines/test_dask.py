import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from functools import partial

import pytest

from tests.engines.work import (
    double,
    kill_at,
    nap,
    negative,
    never,
    process_of,
    raise_at,
    singles,
    unexpected,
)
from tnetcli import __version__
from tnetcli.engines.dask import AHEAD, DaskEngine
from tnetcli.errors import ClusterError, MissingExtraError, UsageError

distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
pytestmark = pytest.mark.filterwarnings("ignore")  # of distributed, about what we kill on purpose


def start(workers, *, processes=False):
    return distributed.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=processes,
        protocol="tcp",
        dashboard_address=None,
        silence_logs=logging.CRITICAL,
    )


@pytest.fixture(scope="module")
def local():
    """Return a cluster in this process, which takes no time to start."""
    with start(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def remote():
    with start(2, processes=True) as cluster:
        yield cluster


def run(local, work, items, *, paths=(), should_stop=never, lost=unexpected):
    scheduler = getattr(local, "scheduler_address", local)
    batches = ([item] for item in items)
    return DaskEngine(str(scheduler), [*map(str, paths)]).map(
        work, batches, should_stop=should_stop, lost=lost
    )


def test_every_batch_is_done_once(local):
    assert sorted(run(local, double, range(12))) == singles(*range(0, 24, 2))


@pytest.mark.slow
def test_batches_are_done_by_the_processes_of_the_cluster(remote):
    found = list(run(remote, process_of, range(12)))
    assert sorted(item for item, _ in found) == list(range(12))
    assert os.getpid() not in {process for _, process in found}


def test_a_scheduler_is_found_by_its_file(local, tmp_path):
    file = tmp_path / "scheduler.json"
    file.write_text(f'{{"address": "{local.scheduler_address}"}}')
    assert sorted(run(file, double, range(3))) == singles(0, 2, 4)


def test_an_error_is_raised(local):
    with pytest.raises(ValueError, match="two"):
        list(run(local, raise_at, range(4)))


def test_running_batches_are_finished_after_a_stop(local):
    asked, found = [], []
    for each, _ in run(local, process_of, iter(range(100)), should_stop=lambda: bool(asked)):
        found.append(each)
        asked.append(True)
    assert 1 <= len(found) < 50
    assert sorted(found) == list(range(len(found)))  # what was waiting is taken back


@pytest.mark.slow
def test_an_adaptive_cluster_grows():
    with start(0, processes=True) as cluster:
        cluster.adapt(minimum=0, maximum=2, interval="100ms")
        found = list(run(cluster, process_of, range(200)))
    assert sorted(item for item, _ in found) == list(range(200))
    assert len({process for _, process in found}) == 2


def test_a_worker_that_does_not_see_a_file_is_named(local, tmp_path):
    file = tmp_path / "here.tif"
    file.touch()
    engine = run(local, double, [1], paths=[file], should_stop=lambda: file.unlink(missing_ok=True))
    with pytest.raises(UsageError, match=r"worker .* does not see .*here\.tif") as caught:
        list(engine)
    assert "share" in caught.value.hint


def test_a_file_that_is_missing_here_too_is_not_checked(local, tmp_path):
    assert list(run(local, double, [1], paths=[tmp_path / "gone.tif", "s3://b/a.tif"])) == [[2]]


def test_a_failure_ends_it_before_a_thousand_more_are_handed_out(local):
    found = []
    for each in run(local, double, iter(range(10_000)), should_stop=lambda: bool(found)):
        found.append(each)
    assert len(found) <= 2 * AHEAD * 2


def test_a_worker_of_another_version_is_named(local, monkeypatch):
    def age():
        monkeypatch.setattr("tnetcli.engines.dask.__version__", "0.0.9")

    problem = f"worker .* runs tnet 0.0.9, this is {__version__}"
    with pytest.raises(UsageError, match=problem) as caught:
        list(run(local, double, [1], should_stop=age))
    assert "same environment" in caught.value.hint


def test_a_worker_that_cannot_import_the_work_is_an_error(local):
    with pytest.raises(
        UsageError, match=r"the cluster cannot do this work: No module named 'none'"
    ):
        list(run(local, lambda batch: __import__("none"), [1]))


def test_workers_that_come_late_are_awaited(caplog):
    found = []
    with start(0) as cluster:

        def never_but_grow():
            if not cluster.plan:
                cluster.scale(1)
            return False

        found += run(cluster, double, range(3), should_stop=never_but_grow)
    assert sorted(found) == singles(0, 2, 4)
    assert "has no workers; waiting" in caplog.text


def test_waiting_for_workers_can_be_stopped():
    asked = []
    with start(0) as cluster:

        def stop_at_the_second_call():
            asked.append(True)
            return len(asked) > 1

        assert list(run(cluster, double, range(3), should_stop=stop_at_the_second_call)) == []


def test_a_worker_whose_storage_hangs_is_not_waited_for(monkeypatch, caplog):
    """The scheduler gives its work to others."""

    def find(paths):
        answer = Future()
        if distributed.get_worker().name == 0:
            answer.set_result("")
        return answer

    monkeypatch.setattr("tnetcli.engines.dask.TRANSFER", 0.2)
    monkeypatch.setattr("tnetcli.engines.dask._find_missing", find)
    with start(2) as cluster:
        assert sorted(run(cluster, double, range(6))) == singles(*range(0, 12, 2))
    assert "does not answer: continuing without it" in caplog.text


def test_a_result_that_takes_long_to_come_is_awaited(local, monkeypatch):
    """As after the death of the worker that had it: it is made again."""
    slow = iter([True, True, False])
    result = distributed.Future.result

    def late(self, timeout=None):
        if next(slow, False):
            raise TimeoutError
        return result(self, timeout=timeout)

    monkeypatch.setattr(distributed.Future, "result", late)
    assert sorted(run(local, double, range(3))) == singles(0, 2, 4)


@pytest.mark.slow
def test_a_scheduler_that_is_gone_ends_it():
    with start(1, processes=True) as cluster:
        found = run(cluster, nap, [0, 0, 600])
        next(found)
        cluster.close()
        with pytest.raises(ClusterError, match="is gone") as caught:
            list(found)
    assert "run the same command again" in caught.value.hint


@pytest.mark.slow
def test_workers_that_die_lose_only_the_item_that_kills_them(remote, tmp_path):
    work = partial(kill_at, str(tmp_path))
    found = run(remote, work, range(9), lost=negative)
    assert sorted(found) == singles(-3, 0, 1, 2, 4, 5, 6, 7, 8)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense://x", "tcp://localhost"])
def test_a_scheduler_that_does_not_answer_is_an_error(address, monkeypatch):
    monkeypatch.setattr("tnetcli.engines.dask.PATIENCE", 0.5)
    with pytest.raises(UsageError, match="no scheduler answers"):
        list(run(address, double, [1]))


@pytest.mark.parametrize("name", ["none.json", "localhost", ""])
def test_a_scheduler_file_that_does_not_exist_is_an_error(name):
    with pytest.raises(UsageError, match="no scheduler file"):
        list(run(name, double, [1]))


@pytest.mark.parametrize("text", ["", "{}", "[]", "no JSON", '{"type": "Scheduler"}'])
def test_a_file_of_no_scheduler_is_an_error(tmp_path, text):
    file = tmp_path / "scheduler.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="this is no scheduler file") as caught:
        list(run(file, double, [1]))
    assert "--scheduler-file FILE" in caught.value.hint


def test_without_the_extra_the_hint_is_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError) as caught:
        list(run("tcp://x:1", double, [1]))
    assert caught.value.hint == "pip install 'tnetcli[dask]'"


def address_in(file):
    return list(run(file, double, [1]))


class TestSchedulerFile:
    """What it names can run code in this process."""

    @pytest.fixture
    def file(self, tmp_path, local):
        file = tmp_path / "scheduler.json"
        file.write_text(f'{{"address": "{local.scheduler_address}"}}')
        file.chmod(0o644)
        return file

    @pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
    def test_one_that_others_may_write_is_refused(self, file, mode):
        assert address_in(file) == [[2]]
        file.chmod(mode)
        with pytest.raises(UsageError, match="other users may write") as caught:
            address_in(file)
        assert "chmod go-w" in caught.value.hint
        assert caught.value.exit_code == 2

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
    def test_one_of_another_user_is_refused(self, file):
        os.chown(file, 12345, -1)
        with pytest.raises(UsageError, match="other users may write"):
            address_in(file)

    def test_one_that_others_may_replace_is_refused(self, file, tmp_path):
        tmp_path.chmod(0o777)
        with pytest.raises(UsageError, match="other users may replace"):
            address_in(file)
        tmp_path.chmod(0o1777)
        assert address_in(file) == [[2]]

    def test_pipes_folders_and_large_files_are_refused(self, file, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        large = tmp_path / "large"
        large.write_text(f'{{"more": "{"x" * 2**20}", "address": "tcp://127.0.0.1:9"}}')
        deep = tmp_path / "deep"
        deep.write_text("[" * 10**5)
        for name in ("pipe", ".", "large", "deep"):
            with pytest.raises(UsageError, match="this is no scheduler file"):
                address_in(tmp_path / name)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    paths = {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tnet"]
    subprocess.run(
        [*command, "-days", "2", "-keyout", paths["key"], "-out", paths["cert"]],
        check=True,
        capture_output=True,
    )
    return paths


def tls(certificate):
    """Return the configuration of docs/hpc.md."""
    comm = "distributed.comm"
    return {
        f"{comm}.require-encryption": True,
        f"{comm}.tls.ca-file": certificate["cert"],
        **{
            f"{comm}.tls.{role}.{name}": path
            for role in ("scheduler", "worker", "client")
            for name, path in certificate.items()
        },
    }


class TestTls:
    def test_a_scheduler_with_certificates_is_used(self, certificate):
        from dask import config

        with config.set(tls(certificate)):
            security = distributed.Security()
            settings = {"threads_per_worker": 1, "dashboard_address": None, "security": security}
            with distributed.LocalCluster(
                n_workers=1, processes=False, protocol="tls", **settings
            ) as cluster:
                assert cluster.scheduler_address.startswith("tls://")
                assert list(run(cluster, double, [1])) == [[2]]

    def test_an_address_without_encryption_is_refused_where_it_is_required(self, certificate):
        from dask import config

        with (
            config.set(tls(certificate)),
            pytest.raises(UsageError, match="refuse unencrypted") as caught,
        ):
            list(run("tcp://127.0.0.1:9", double, [1]))
        assert "tls" in caught.value.hint

    def test_without_certificates_the_configuration_is_named(self):
        with pytest.raises(UsageError, match="no certificate is configured") as caught:
            list(run("tls://127.0.0.1:9", double, [1]))
        assert "DASK_CONFIG" in caught.value.hint
