"""Checkpoints in object stores: a real S3 server, fsspec's memory, and URLs of files."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

import accel
from accel.__main__ import main
from accel.checkpoint import remote
from accel.errors import CheckpointError
from tests.checkpoint import stores
from tests.checkpoint.helpers import differences, filled, memory_below, save_fully, value_of
from tests.checkpoint.parts import Job
from tests.checkpoint.stores import BUCKET, BUSY, DENIED, EXPIRED, FAILS, Fault
from tests.distributed import run
from tests.interpreters import executable

url_to_fs = pytest.importorskip("fsspec.core").url_to_fs
numbers = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with stores.server() as url:
        yield url


@pytest.fixture
def prefix(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "")
    stores.use(endpoint)
    return f"s3://{BUCKET}/{next(numbers)}"


@pytest.fixture
def faulty(endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Proxy]:
    monkeypatch.setattr(remote, "_BLOCK", 5 << 20)
    with stores.proxy(endpoint) as (url, state):
        stores.use(url)
        yield state


def objects(url: str) -> list[str]:
    fs, path = url_to_fs(url, skip_instance_cache=True)  # another test's may have gone through its proxy
    return sorted(name.rpartition("/")[2] for name in fs.find(path))


@pytest.mark.parametrize("where", ["s3", "memory", "file"])
def test_everything_that_a_directory_can(
    where: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = {"s3": prefix, "memory": f"memory://{next(numbers)}", "file": tmp_path.as_uri()}[where]
    here = str(tmp_path) if where == "file" else root
    net, frozen = nn.Linear(300, 700), nn.Linear(20, 20).requires_grad_(False)
    assert accel.latest(root) is None
    for name in ("w1", "w[1]", "new [x]*?"):  # names are no patterns
        accel.save({"n": name}, f"{root}/names/{name}")
        assert accel.load(f"{root}/names/{name}")["n"] == name
        accel.verify(accel.latest(f"{root}/names/{name}"))  # type: ignore[arg-type]
    for step in (1, 2, 3):
        place = f"{root}/{'/' * (where != 'file')}step-{step}/"
        pending = accel.save({"m": net, "f": frozen, "n": step}, place, keep=2, wait=step != 2)
        assert (pending is None) == (step != 2)
    assert accel.latest(root) == accel.latest(root + "//" * (where != "file")) == f"{here}/step-3"
    with pytest.raises(CheckpointError, match="does not exist"):
        accel.load(f"{root}/step-1")
    last = accel.latest(root)
    assert last is not None
    accel.verify(last)
    found = accel.load(last, {"m": nn.Linear(300, 700), "n": 0})
    assert found["n"] == 3
    assert torch.equal(found["m"].weight, net.weight)
    for _ in range(2):
        accel.link(last, f"{root}/best")
    accel.save({"n": 4}, last)
    assert accel.load(f"{root}/best")["n"] == 3
    with pytest.raises(CheckpointError, match="the same store|one file system"):
        accel.link(last, "memory://other" if where == "file" else str(tmp_path / "other"))
    for size in ("300KB", "50GB"):
        accel.export(f"{root}/best", f"{root}/out", name="m", max_shard_size=size, overwrite=True)
        assert torch.equal(accel.load(f"{root}/out", {"m": nn.Linear(300, 700)})["m"].bias, net.bias)
        with accel.deferred_init(weights=f"{root}/out"):
            empty = nn.Linear(300, 700)
        assert torch.equal(accel.full_state_dict(accel.setup(empty).model)["weight"], net.weight)
        accel.teardown()
    assert [main(command) for command in (["inspect", root], ["verify", last])] == [0, 0]
    assert f"{here}/" in capsys.readouterr().out


def test_a_file_system_with_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of network drives, of which fsspec knows nothing but their protocols. Empty directories stay."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.registry import _registry, register_implementation

    class Directories(LocalFileSystem):
        protocol = ("tree",)

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return LocalFileSystem._strip_protocol(str(path).removeprefix("tree://"))

    register_implementation("tree", Directories, clobber=True)
    try:
        root = f"tree://{tmp_path}/run"
        for step in (1, 2, 3):
            accel.save({"n": step, "m": nn.Linear(2, 2)}, f"{root}/step-{step}", keep=2)
        assert sorted(path.parent.name for path in (tmp_path / "run").rglob("accel.json")) == ["step-2", "step-3"]
        assert not os.listdir(tmp_path / "run/step-1")
        assert accel.latest(root) == f"{root}/step-3"
        accel.link(f"{root}/step-3", f"{root}/best")
        accel.export(f"{root}/best", f"{root}/deep/out")
        assert accel.load(f"{root}/best")["n"] == 3
        accel.load(f"{root}/deep/out", {"m": nn.Linear(2, 2)})
    finally:
        _registry.pop("tree", None)  # type: ignore[attr-defined]
        remote._opened.cache_clear()


def on_two_ranks(endpoint: str, root: str, local: str) -> None:
    """Between backends, and between a store and the disk; the requests of saves are counted by each rank's proxy."""

    def setup(backend: str, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 3))
        model, optimizer, _ = accel.setup(net, torch.optim.AdamW(net.parameters()), backend=backend)
        return {"m": model, "o": optimizer}

    with stores.proxy(endpoint) as (url, seen):
        stores.use(url)
        state = setup("fsdp", 0)
        for _ in range(2):
            state["m"](torch.ones(4, 40)).sum().backward()
            state["o"].step()
            state["o"].zero_grad()
        whole = {name: tensor.clone() for name, tensor in accel.full_state_dict(state["m"]).items()}
        for name, wait in (("a", True), ("b", False)):
            seen.seen.clear()
            save_fully(state, f"{root}/{name}", wait)
            assert len(seen.seen) <= 17  # one of them looks whether the record is there
        accel.save(state, local)
        accel.teardown()
        for place in (f"{root}/a", f"{root}/b", local):
            other = setup("ddp", 1)
            accel.load(place, other)
            assert not differences(whole, dict(accel.full_state_dict(other["m"])))
            accel.teardown()
        accel.init()
        accel.verify(f"{root}/a")
        assert accel.latest(root) == f"{root}/b"
        with pytest.raises(CheckpointError, match="s3://no-such-bucket/x"):
            accel.save({"m": 1}, "s3://no-such-bucket/x")


def test_two_ranks(endpoint: str, prefix: str, tmp_path: Path) -> None:
    run(2, on_two_ranks, endpoint, prefix, str(tmp_path / "c"))
    accel.load(f"{prefix}/b", {"m": nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 3))})


def test_damage_is_found(prefix: str) -> None:
    accel.save(filled(1.0), f"{prefix}/1")
    accel.save(filled(2.0), f"{prefix}/2")
    fs, path = url_to_fs(f"{prefix}/2")
    name = f"{path}/{objects(f'{prefix}/2')[0]}"
    content = fs.cat_file(name)
    calls: list[Any] = [lambda url: accel.load(url, filled(0.0)), accel.verify]
    for broken, words in ((content[:-1], "was truncated"), (content[:-1] + b"x", "is damaged between")):
        fs.pipe_file(name, broken)
        for call in calls:
            with pytest.raises(CheckpointError, match=words):
                call(f"{prefix}/2")
    fs.rm_file(name)
    with pytest.raises(CheckpointError, match="not complete"):
        accel.load(f"{prefix}/2", filled(0.0))
    assert accel.latest(prefix) == f"{prefix}/1"


@pytest.mark.parametrize(("before", "on_disk"), [(True, False), (False, False), (True, True)])
def test_two_jobs_in_one_place(before: bool, on_disk: bool, prefix: str, tmp_path: Path) -> None:
    prefix = str(tmp_path / "c") if on_disk else prefix
    if before:
        accel.save(filled(0.0), prefix)
    first, second, third = (Job(prefix, [filled(value)]) for value in (1.0, 2.0, 3.0))
    files = first.write()
    second.finish(second.write())
    late = third.write()
    fourth = Job(prefix, [filled(4.0)])
    last = fourth.write()
    assert value_of(prefix) == 2
    with pytest.raises(CheckpointError, match="complete file of every rank. Save to a directory that only this job"):
        first.finish(files)
    with pytest.raises(CheckpointError, match="was written by a different job during this save"):
        third.finish(late)
    assert not [*tmp_path.glob("c/.*")]
    assert value_of(prefix) == 2
    fourth.finish(last)
    assert value_of(prefix) == 4
    assert len(objects(prefix)) == 2


def test_killed_at_any_moment(endpoint: str, prefix: str) -> None:
    """The last commit is whole; the next save works, and sweeps the files that the dead ones left."""
    script = f"from tests.checkpoint import kills, stores\nstores.use({endpoint!r})\n"
    script += f"assert kills.attack(4, {prefix!r}, lambda _: None) == 0"
    done = subprocess.run([executable(), "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    accel.save(filled(-1.0), prefix)
    assert value_of(prefix) == -1
    assert len(objects(prefix)) == 2


def test_what_passes_is_tried_again(faulty: stores.Proxy, prefix: str) -> None:
    accel.save(filled(1.0), prefix)
    part = "PUT .*safetensors.*partNumber=2"
    faults = [
        Fault("PUT .*safetensors", (503, BUSY), times=2),
        Fault("PUT .*accel.json", (503, FAILS), times=1),
        Fault("PUT .*accel.json", "lose the answer", times=1),
        Fault("GET .*safetensors", "cut", times=1),
        Fault("GET .*safetensors", "flip", times=1),
        Fault("(GET|HEAD) ", (503, BUSY), times=2),
        Fault(part, (503, FAILS), times=1),
        Fault(part, "cut", times=1),
    ]
    for number, fault in enumerate(faults):
        faulty.faults[:] = [fault]
        accel.save(filled(float(number), 2_500_000 if fault.where == part else 1000), prefix)
        assert value_of(prefix) == number
        assert fault.times == 0
        assert len(objects(prefix)) == 2


ADVICE = r"\. Check the credentials, the permissions and the connection to the store"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("PUT ", (403, EXPIRED)), f"token has expired.*{ADVICE}"),
        (Fault("PUT .*safetensors", (403, DENIED)), f"Access Denied{ADVICE}"),
        (Fault("PUT .*accel.json", (403, DENIED)), f"Access Denied{ADVICE}"),
        (Fault("PUT .*accel.json", (200, b"")), "the store accepted the file, but it can't be read back"),  # a portal
    ],
    ids=str,
)
def test_what_does_not_pass_changes_nothing(fault: Fault, words: str, faulty: stores.Proxy, prefix: str) -> None:
    accel.save(filled(1.0), prefix)
    faulty.faults.append(fault)
    for wait in (True, False):
        with pytest.raises(CheckpointError, match=f"{words}.*{prefix}/"):
            save_fully(filled(2.0), prefix, wait)
    with pytest.raises(CheckpointError, match="the last background save failed"):
        accel.save(filled(2.0), prefix)
    faulty.faults[:] = [Fault("GET .*accel.json", (403, DENIED))]
    with pytest.raises(CheckpointError, match=f"{prefix} can't be read: .*{ADVICE}"):
        accel.latest(prefix)
    faulty.faults.clear()
    assert value_of(prefix) == 1
    accel.save(filled(4.0), prefix)
    assert value_of(prefix) == 4
    assert len(objects(prefix)) == 2


def test_an_expired_token_without_words(faulty: stores.Proxy, prefix: str) -> None:
    """S3 answers so to a HEAD, the first request of each call. The next call looks for credentials again."""
    accel.save(filled(1.0), prefix)
    before = remote.remote(prefix)
    faulty.faults[:] = [Fault("HEAD ", (400, b""))]
    for call in (lambda url: accel.save(filled(2.0), url), value_of, accel.latest, accel.verify):
        with pytest.raises(CheckpointError, match=f"Bad Request{ADVICE}.*{prefix}/"):
            call(prefix)
    faulty.faults.clear()
    assert remote.remote(prefix) is not before
    assert value_of(prefix) == 1


def test_bytes_that_the_network_changes(faulty: stores.Proxy, prefix: str) -> None:
    """A chunk that is wrong once is read again. One that was wrong when it was written is found."""
    accel.save(filled(3.0, 2_500_000), f"{prefix}/1")
    begun = len(faulty.seen)
    accel.load(f"{prefix}/1", filled(0.0, 2_500_000))
    reads = sum("GET" in line and "safetensors" in line for line in faulty.seen[begun:])
    for skip in range(reads):
        faulty.faults[:] = [fault := Fault("GET .*safetensors", "flip", times=1, skip=skip)]
        assert value_of(f"{prefix}/1") == 3.0
        assert fault.times == 0
    faulty.faults[:] = [Fault("GET .*safetensors", "flip", skip=reads - 1)]
    with pytest.raises(CheckpointError, match="is damaged between|Checksum"):
        value_of(f"{prefix}/1")
    faulty.faults[:] = [Fault("PUT .*safetensors", "flip", times=1)]
    accel.save(filled(2.0), f"{prefix}/2")
    with pytest.raises(CheckpointError, match="damaged|Checksum"):
        value_of(f"{prefix}/2")
    assert value_of(f"{prefix}/1") == 3.0


def test_what_is_missing_is_named(prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(url: str, words: str) -> None:
        for call in (lambda u: accel.save(filled(1.0), u), accel.load, accel.latest, accel.verify):
            with pytest.raises(CheckpointError, match=words):
                call(url)

    refused("s3://no-such-bucket/x", "bucket does not exist.*s3://no-such-bucket/x|s3://no-such-bucket/x.*not")
    refused("gs://bucket/x", "install gcsfs")
    refused("NOSUCH://bucket/x", "nosuch://bucket/x")
    refused("dir://x", "can't open dir://x")
    accel.save({"n": 1}, prefix)
    assert accel.load(prefix) == {"n": 1}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    remote._opened.cache_clear()
    refused(f"{prefix}/x", f"NoCredentialsError.*{ADVICE}")
    assert not os.listdir(tmp_path)


def test_a_server_that_is_not_reached(endpoint: str) -> None:
    """fsspec's file system of http calls both "not found"."""
    for call in (accel.verify, accel.load):
        with pytest.raises(CheckpointError, match=f"Cannot connect to host.*{ADVICE}: http://127.0.0.1:9/c"):
            call("http://127.0.0.1:9/c")
        with pytest.raises(CheckpointError, match="does not exist"):
            call(f"{endpoint}/{BUCKET}/none")


def test_uploads_take_little_memory(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BLOCK", 5 << 20)
    values = filled(1.0, 13_000_000)
    accel.save(filled(0.0), prefix)
    with memory_below(32 << 20):
        accel.save(values, prefix)
