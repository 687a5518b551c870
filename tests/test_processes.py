"""Movers in processes of their own, over a mapped file as vLLM's CPU tier is one."""

import gc
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from work import PATIENCE, descriptors, ended, movers_of, until

import kvstore
from kvstore import BlockStore, InvalidInputError, Layout
from kvstore.arrays import split_proof
from kvstore.job import Job, Outcome
from kvstore.jobs import DIED, JobRunner
from kvstore.processes import ProcessMover, Task, launch
from kvstore.region import Region
from kvstore.testing import sample_config
from kvstore.transfer import ABSENT, DAMAGED, FOUND, LOADED, Rows, learn

OURS = os.getpid()


@pytest.fixture
def shared() -> Iterator[Callable[[int, int], Rows]]:
    """Makes rows in files of /dev/shm, which have their names while the test runs."""
    paths: list[Path] = []

    def make(count: int, nbytes: int) -> Rows:
        path = Path(f"/dev/shm/kvstore-test-{uuid.uuid4().hex}")
        paths.append(path)
        with path.open("w+b") as file:
            file.truncate(count * nbytes)
            memory = mmap.mmap(file.fileno(), 0)
        return np.ndarray((count, nbytes), np.uint8, memory)

    yield make
    for path in paths:
        path.unlink()


def store_of(folder: Path, nbytes: int, **options: Any) -> BlockStore:
    layout = Layout.of_bytes(nbytes, dtype="float16", reason="a test")
    return BlockStore.open(folder, sample_config(), layout, **options)


@contextmanager
def running(
    store: BlockStore,
    rows: Rows,
    *,
    processes: int = 1,
    deadline: float = 600.0,
    grace: float = 600.0,
) -> Iterator[JobRunner]:
    runner = JobRunner(movers(store, rows, processes), deadline=deadline, grace=grace)
    try:
        yield runner
    finally:
        for process in movers_of(OURS):
            os.kill(process, signal.SIGCONT)
        runner.shutdown()
        assert movers_of(OURS) == []


def movers(store: BlockStore, rows: Rows, processes: int) -> list[ProcessMover]:
    region = Region.of(rows)
    assert region is not None
    task = Task({0: store.blocks}, region, threads=2, lookups=1, collector=None)
    made = [ProcessMover(task) for _ in range(processes)]
    os.close(region.descriptor)
    return made


def key(number: int) -> bytes:
    """One of KV group 0."""
    return number.to_bytes(32) + bytes(4)


def job(job_id: int, operation: Any, *numbers: int) -> Job:
    """A job on blocks in the slots of their numbers."""
    return Job(job_id, operation, tuple(map(key, numbers)), numbers)


def words(outcome: Outcome) -> set[str]:
    return set(outcome.words)


def done(runner: JobRunner, job: Job) -> Outcome:
    runner.submit(job)
    runner.drain()
    [outcome] = runner.finished()
    return outcome


def fill(rows: Rows) -> None:
    rows[:] = np.random.default_rng(0).integers(0, 256, rows.shape, np.uint8)


# ---- transfers


@pytest.mark.parametrize("nbytes", [4096, 6051 + 4096, 720 << 10, 3 << 20])
def test_blocks_go_through_processes_bit_exact(
    tmp_path: Path, shared: Callable[[int, int], Rows], nbytes: int
) -> None:
    rows = shared(8, -(-nbytes // 4096) * 4096)
    fill(rows)
    before = rows.copy()
    store = store_of(tmp_path, nbytes)
    with running(store, rows, processes=2) as runner:
        assert len(movers_of(OURS)) == 2
        assert words(done(runner, job(1, "lookup", *range(8)))) == {ABSENT}
        assert words(done(runner, job(2, "store", *range(4)))) == {"stored"}
        assert (rows == before).all()
        assert words(done(runner, job(3, "store", *range(4)))) == {"kept"}
        found = done(runner, job(4, "lookup", *range(4)))
        assert words(found) == {FOUND}
        assert set(found.proofs) == {None}  # the load proves
        proofs = tuple(store.blocks.prove(key(n)) for n in range(4))
        assert None not in proofs
        for hints in ((), proofs):
            rows[4:] = 0
            load = Job(5, "load", tuple(map(key, range(4))), (7, 6, 5, 4), hints)
            assert words(done(runner, load)) == {LOADED}
            assert (rows[:3:-1, :nbytes] == before[:4, :nbytes]).all()
            assert not rows[4:, nbytes:].any()
    buffer = bytearray(nbytes)
    for number in range(4):
        assert store.load(key(number), buffer)
        assert buffer == before[number, :nbytes].tobytes()


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_a_process_writes_with_the_stores_codec(
    tmp_path: Path, shared: Callable[[int, int], Rows], codec: Any
) -> None:
    rows = shared(2, 64 << 10)
    rows[:] = np.arange(64 << 10) % 7
    with running(store_of(tmp_path, 64 << 10, codec=codec), rows) as runner:
        stored = done(runner, job(1, "store", 1))
        [proof] = stored.proofs
        assert words(stored) == {"stored"}
        assert proof is not None
        assert split_proof(proof)[1] == codec
        rows[1] = 0
        assert words(done(runner, job(2, "load", 1))) == {LOADED}
    assert (rows[0] == rows[1]).all()


def test_damage_is_an_answer_with_words(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(2, 4096)
    store = store_of(tmp_path, 4096)
    with running(store, rows) as runner:
        done(runner, job(1, "store", 0, 1))
        [chunk] = tmp_path.rglob(f"{key(1).hex()}/c.0")
        chunk.write_bytes(bytes(range(256)) * 16 + b"1234")
        outcome = done(runner, job(2, "load", 0, 1))
        assert outcome.words == [LOADED, DAMAGED]
        assert "crc32c" in outcome.problems[1]
        learn({0: store}, outcome.job.keys, outcome.words, outcome.proofs, outcome.problems)
        assert store.memory.is_damaged(key(1))
        assert (store.counts()["loaded"], store.counts()["damaged"]) == (1, 1)
        repair = Job(3, "store", (key(1),), (1,), (True,))
        assert words(done(runner, repair)) == {"repaired"}
        assert words(done(runner, job(4, "load", 1))) == {LOADED}
        outcome = done(runner, Job(5, "load", (key(1), b"x" * 36), (99, 0)))
        assert words(outcome) == {"invalid"}
        assert "no row has the number 99" in outcome.problems[0]
        assert "no KV group" in outcome.problems[1]


# ---- processes that end or hang


def stop() -> int:
    """Make the only process hang, in a way in which it can still be killed."""
    [process] = movers_of(OURS)
    os.kill(process, signal.SIGSTOP)
    return process


def test_a_killed_process_fails_its_jobs_once_and_a_new_one_works(
    tmp_path: Path,
    shared: Callable[[int, int], Rows],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = shared(4, 4096)
    store = store_of(tmp_path, 4096)
    with running(store, rows) as runner:
        done(runner, job(1, "store", 0, 1, 2))
        killed = stop()
        runner.submit(job(2, "load", 0))
        runner.submit(job(3, "load", 0, 0))
        assert runner.finished() == []
        os.kill(killed, signal.SIGKILL)
        outcomes = ended(runner, 2)
        assert sorted(o.job.job_id for o in outcomes) == [2, 3]
        assert [words(o) for o in outcomes] == [{"failed"}] * 2
        assert [dict(o.problems) for o in outcomes] == [{0: DIED}] * 2
        assert not Path(f"/proc/{killed}").exists()  # it is no zombie either
        until(lambda: runner.finished() or movers_of(OURS))
        assert words(done(runner, job(4, "load", 1, 2))) == {LOADED}
        assert runner.finished() == []
    [record] = caplog.records
    assert "the 3 blocks that it had count as failed" in record.getMessage()


def test_others_work_on_while_one_is_killed_again_and_again(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(64, 64 << 10)
    fill(rows)
    before = rows.copy()
    told: list[int] = []
    with running(store_of(tmp_path, 64 << 10), rows, processes=2) as runner:
        for number in range(40):
            operation = "load" if number % 2 else "store"
            runner.submit(job(number, operation, *range(number % 4, 64, 4)))
            for process in movers_of(OURS)[:1] if number % 10 == 5 else ():
                os.kill(process, signal.SIGKILL)
            told += [outcome.job.job_id for outcome in runner.finished()]
        runner.drain()
        told += [outcome.job.job_id for outcome in runner.finished()]
        assert sorted(told) == list(range(40))
        # A store that was killed left nothing that is served.
        assert (rows == before).all()
        until(lambda: runner.finished() or len(movers_of(OURS)) == 2)
        assert words(done(runner, job(40, "store", *range(64)))) <= {"stored", "kept"}
        rows[:] = 0
        assert words(done(runner, job(41, "load", *range(64)))) == {LOADED}
    assert (rows == before).all()


def test_a_process_that_hangs_is_killed_and_its_job_fails_after_its_end(
    tmp_path: Path,
    shared: Callable[[int, int], Rows],
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = shared(4, 4096)
    with running(store_of(tmp_path, 4096), rows, deadline=0.2, grace=0.2) as runner:
        stopped = stop()
        runner.submit(job(1, "store", 0))
        [outcome] = ended(runner, 1)
        assert not Path(f"/proc/{stopped}").exists()
        assert outcome.problems == {0: DIED}
        assert outcome.seconds >= 0.4
        assert "0 s late: its process is killed" in caplog.text

        def stores() -> bool:
            """A slow machine may let it wait past the deadline."""
            runner.submit(job(2, "store", 0))
            return words(ended(runner, 1)[0]) <= {"stored", "kept"}

        until(stores)


def test_shutdown_kills_what_hangs_and_reports_its_jobs(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(4, 4096)
    store = store_of(tmp_path, 4096)
    runner = JobRunner(movers(store, rows, 1), deadline=600, grace=0.3)
    done(runner, job(1, "store", 0, 1))
    stop()
    runner.submit(job(2, "load", 0, 0, 0, 1))
    assert runner.finished() == []
    runner.shutdown()
    assert movers_of(OURS) == []
    [outcome] = runner.finished()
    assert outcome.words == ["failed"] * 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_leaves_it_to_the_engine_to_be_interrupted(
    tmp_path: Path, shared: Callable[[int, int], Rows], number: int
) -> None:
    rows = shared(1, 4096)
    with running(store_of(tmp_path, 4096), rows) as runner:
        [process] = movers_of(OURS)
        os.kill(process, number)
        assert words(done(runner, job(1, "store", 0))) == {"stored"}
        assert movers_of(OURS) == [process]


def test_a_process_finds_the_modules_that_the_engine_found_at_its_start(
    tmp_path: Path, shared: Callable[[int, int], Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is in `sys.path`, and wherever the engine has gone since."""
    modules, colon = tmp_path / "modules", tmp_path / "a:b"
    modules.mkdir()
    colon.mkdir()
    (modules / "kvstore").symlink_to(Path(kvstore.__file__).parent)
    others = [e for e in sys.path if not (Path(e or ".") / "kvstore").is_dir()]
    for entry in set(sys.path) - set(others):  # it may be where all that is installed lies
        rest = tmp_path / f"rest-{len(others)}"
        rest.mkdir()
        for name in Path(entry or ".").iterdir():
            if name.name != "kvstore":
                (rest / name.name).symlink_to(name.absolute())
        others.append(str(rest))
    monkeypatch.chdir(tmp_path)
    odd: Any = [Path("/x"), b"/y", None, 7, str(colon), "modules", "nowhere"]
    monkeypatch.setattr(sys, "path", [*odd, *others])
    with running(store_of(tmp_path, 4096), shared(1, 4096)) as runner:
        assert words(done(runner, job(1, "store", 0))) == {"stored"}
        monkeypatch.setattr(sys, "path", [Path("/x"), *sys.path])
        monkeypatch.chdir("/")
        [killed] = movers_of(OURS)
        os.kill(killed, signal.SIGKILL)
        until(lambda: not runner.finished() and set(movers_of(OURS)) - {killed})
        assert words(done(runner, job(2, "load", 0))) == {LOADED}


# ---- the engine's end


_ENGINE = """
import mmap, os, sys, threading, time
import numpy as np
sys.path[:0] = {path!r}
from test_processes import job, movers, store_of
from kvstore.jobs import JobRunner
from pathlib import Path

file = open({file!r}, "r+b")
rows = np.ndarray((4, 4096), np.uint8, mmap.mmap(file.fileno(), 0))
store = store_of(Path({folder!r}), 4096)
runner = JobRunner(movers(store, rows, 2), deadline=600, grace=600)
if {fork}:
    if not os.fork():
        time.sleep(600)
        os._exit(0)
runner.submit(job(1, "store", *range(4)))
print("running", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fork", [False, True], ids=["alone", "with a fork"])
def test_no_process_outlives_an_engine_that_was_killed(
    tmp_path: Path, shared: Callable[[int, int], Rows], fork: bool
) -> None:
    region = Region.of(shared(4, 4096))
    assert region is not None
    file = os.readlink(f"/proc/self/fd/{region.descriptor}")
    os.close(region.descriptor)
    path = [*sys.path, str(Path(__file__).parent)]
    code = _ENGINE.format(path=path, file=file, folder=str(tmp_path), fork=fork)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0
    ) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"running\n"
            assert len(movers_of(engine.pid)) == 2
            engine.kill()
            engine.wait(PATIENCE)
            until(lambda: movers_of(engine.pid) == [])
        finally:
            os.killpg(engine.pid, signal.SIGKILL) if fork else engine.kill()


# ---- starts that fail


class Unloadable:
    """It pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return (_fail, ())


def _fail() -> None:
    raise RuntimeError("this cannot be loaded")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process and no file is open afterwards that was not before."""
    gc.collect()
    files, threads = descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    assert movers_of(OURS) == []
    assert descriptors() == files
    assert set(threading.enumerate()) == threads


REMEDY = 'Set "processes": 0 to transfer on threads of the engine instead.'


@pytest.mark.usefixtures("nothing_left")
def test_a_task_that_cannot_be_loaded_stops_the_start_with_its_remedy(
    tmp_path: Path,
    shared: Callable[[int, int], Rows],
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = Region.of(shared(1, 4096))
    assert region is not None
    blocks: Any = {0: Unloadable()}
    mover = ProcessMover(Task(blocks, region, 1, 1, None))
    os.close(region.descriptor)
    with pytest.raises(InvalidInputError) as caught:
        JobRunner([mover], deadline=600, grace=5)
    assert str(caught.value) == (
        "processes: expected 1 to start, found 0; the others did not live, and what they "
        f"said is above. {REMEDY}"
    )
    assert [r.getMessage() for r in caplog.records] == [
        "a process that transfers blocks ended before it was ready"
    ]
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("executable", ["/bin/false", "/nowhere/python"])
def test_a_python_that_does_not_start_stops_the_start_with_its_remedy(
    tmp_path: Path,
    shared: Callable[[int, int], Rows],
    monkeypatch: pytest.MonkeyPatch,
    executable: str,
) -> None:
    two = movers(store_of(tmp_path, 4096), shared(1, 4096), 2)
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(InvalidInputError) as caught:
        JobRunner(two, deadline=600, grace=5)
    assert str(caught.value).endswith(REMEDY)


@pytest.mark.usefixtures("nothing_left")
def test_a_task_that_cannot_be_handed_over_is_refused_with_its_remedy(
    shared: Callable[[int, int], Rows],
) -> None:
    region = Region.of(shared(1, 4096))
    assert region is not None
    blocks: Any = {0: lambda: None}
    try:
        with pytest.raises(InvalidInputError) as caught:
            ProcessMover(Task(blocks, region, 1, 1, None))
    finally:
        os.close(region.descriptor)
    assert str(caught.value).startswith("processes: expected storage_options that")
    assert str(caught.value).endswith(REMEDY)


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open so many files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = Path("/proc/self/fd")
    opened = {int(n) for n in os.listdir(fds) if os.path.lexists(fds / n)}  # not its own
    free = [number for number in range(len(opened) + count + 1) if number not in opened]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("left", range(16))
@pytest.mark.parametrize("processes", [0, 2])
def test_a_start_without_descriptors_leaves_nothing_and_says_its_remedy(
    tmp_path: Path, shared: Callable[[int, int], Rows], left: int, processes: int
) -> None:
    rows = shared(1, 4096)
    blocks = {0: store_of(tmp_path, 4096).blocks}
    refused = None
    with descriptors_left(left):
        try:
            made = launch(
                blocks, rows, processes=processes, threads=1, lookups=1, name="test"
            )
            assert isinstance(made[0], ProcessMover) == bool(processes)
            runner = JobRunner(made, deadline=600, grace=5)
        except InvalidInputError as error:
            refused = error
    if refused is None:
        assert left >= 2
        runner.shutdown()
    else:
        assert left < 15
        assert str(refused).startswith("processes: expected ")
        assert str(refused).endswith(REMEDY)


# ---- processes or threads


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("processes", "mapped", "movers", "line"),
    [
        (2, True, 2, "2 processes transfer blocks, 3 at once in each"),
        (0, True, 1, "5 threads of the engine transfer blocks"),
        (2, False, 1, "5 threads of the engine transfer blocks"),
    ],
)
def test_the_log_says_what_transfers(
    tmp_path: Path,
    shared: Callable[[int, int], Rows],
    caplog: pytest.LogCaptureFixture,
    processes: int,
    mapped: bool,
    movers: int,
    line: str,
) -> None:
    rows = shared(1, 4096) if mapped else np.zeros((1, 4096), np.uint8)
    blocks = {0: store_of(tmp_path, 4096).blocks}
    caplog.set_level("INFO", "kvstore.processes")
    made = launch(blocks, rows, processes=processes, threads=5, lookups=1, name="test")
    for mover in made:
        mover.close()
    assert len(made) == movers
    assert [r.getMessage() for r in caplog.records if "transfer" in r.msg] == [line]


# ---- what is left


@pytest.mark.usefixtures("nothing_left")
def test_nothing_is_left_after_shutdown_and_the_memory_can_be_unmapped(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(4, 4096)
    memory: Any = rows.base
    runner = JobRunner(movers(store_of(tmp_path, 4096), rows, 2), deadline=600, grace=600)
    done(runner, job(1, "store", 0, 1, 2, 3))
    os.kill(movers_of(OURS)[0], signal.SIGKILL)  # one is started again in between
    until(lambda: runner.finished() or len(movers_of(OURS)) < 2)
    until(lambda: runner.finished() or len(movers_of(OURS)) == 2)
    done(runner, job(2, "load", 0, 1, 2, 3))
    runner.shutdown()
    runner.shutdown()
    del rows
    memory.close()


def test_an_engine_with_threads_and_children_can_start_movers(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(4, 4096)
    over = threading.Event()
    busy = threading.Thread(target=over.wait)
    busy.start()
    outcomes: list[Outcome] = []

    def open_and_store() -> None:
        with running(store_of(tmp_path, 4096), rows) as runner:
            outcomes.append(done(runner, job(1, "store", 0, 1)))

    starter = threading.Thread(target=open_and_store)
    child = subprocess.Popen(["sleep", "600"])
    try:
        starter.start()
        starter.join(PATIENCE)
    finally:
        child.kill()
        child.wait()
        over.set()
        busy.join()
    assert [words(outcome) for outcome in outcomes] == [{"stored"}]


def test_a_mover_does_not_end_with_the_thread_that_started_it(
    tmp_path: Path, shared: Callable[[int, int], Rows]
) -> None:
    rows = shared(4, 4096)
    store = store_of(tmp_path, 4096)
    made: list[JobRunner] = []

    def start() -> None:
        made.append(JobRunner(movers(store, rows, 1), deadline=600, grace=600))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    [runner] = made
    before = movers_of(OURS)
    until(lambda: runner.finished() == [] and not thread.is_alive())
    assert words(done(runner, job(1, "store", 0, 1))) == {"stored"}
    assert movers_of(OURS) == before
    runner.shutdown()
