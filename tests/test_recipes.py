"""The recipes of examples/by_feature run on one process and on two, and do what docs/recipes.md says of them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint import stores
from tests.distributed import run
from tests.interpreters import executable
from tests.programs import ROOT, clean_environ

FOLDER = ROOT / "examples/by_feature"
RECIPES = sorted(path.name for path in FOLDER.glob("*.py"))


def recipe(name: str, *arguments: str, backend: str | None = None) -> str:
    """What the program prints on this rank."""
    heard = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(heard):
        patch.setattr(sys, "argv", [name, *arguments])
        if backend is not None:
            patch.setenv("ACCEL_BACKEND", backend)
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return heard.getvalue()


def printed(world: int, name: str, *arguments: str, backend: str | None = None) -> str:
    """What the ranks print: all of it rank 0's."""
    main, *others = run(world, partial(recipe, backend=backend), name, *arguments)
    assert not any(others)
    return main


def numbers(pattern: str, text: str) -> list[float]:
    (found,) = re.findall(pattern, text)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


#: A pattern for two losses, and by how much the loss falls.
LOSSES = {
    "accumulation.py": (r"loss ([\d.]+) to ([\d.]+)", 5.0),
    "contrastive.py": (r"loss ([\d.]+) to ([\d.]+)", 1.5),
    "ema.py": (r"error ([\d.]+) to ([\d.]+)", 1.02),
    "gan.py": (r"data ([\d.]+) to ([\d.]+)", 4.0),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_fall(name: str, world: int, tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path / "out")) if name == "ema.py" else ()
    pattern, factor = LOSSES[name]
    first, last = numbers(pattern, printed(world, name, *arguments))
    assert last < first / factor


def test_rlhf_search_and_folds() -> None:
    first, last = numbers(r"reward ([\d.]+) to ([\d.]+)", printed(2, "rlhf.py"))
    assert first < 2
    assert last > 6
    out = printed(2, "search.py", "--trials", "3")
    errors = [float(error) for error in re.findall(r": error ([\d.]+)", out)]
    assert len(set(errors)) == 3
    assert numbers(r"with error ([\d.]+)", out) == [min(errors)]
    out = printed(2, "cross_validation.py")
    assert out.count(" on 50 samples\n") == 4
    assert numbers(r"mean accuracy ([\d.]+)", out)[0] > 0.8


def test_profiling_and_tracking(tmp_path: Path) -> None:
    out = printed(2, "profiling.py", "--out", str(tmp_path / "new/trace.json"))
    assert "gloo:all_reduce" in (tmp_path / "new/trace.json").read_text()
    assert "Self CPU time total" in out
    out = printed(2, "tracking.py", "--out", str(tmp_path))
    if importlib.util.find_spec("tensorboard") is None:
        assert "TensorBoard is not installed: pip install tensorboard\n" in out
    else:
        assert list((tmp_path / "tensorboard").iterdir())
        first, last = numbers(r"loss ([\d.]+) to ([\d.]+)", out)
        assert last < first


@pytest.mark.parametrize("library", ["torch", "diffusers"])
def test_averages_equal_those_of_ddp(library: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")

    def on(backend: str) -> str:
        arguments = ("--library", library, "--out", str(tmp_path / backend))
        return printed(2, "ema.py", *arguments, backend=backend)

    outputs = {backend: on(backend) for backend in ("ddp", "sharded", "fsdp", "deepspeed:3")}
    assert set(outputs.values()) == {outputs["ddp"]}
    before, after = numbers(r"error ([\d.]+) to ([\d.]+)", outputs["ddp"])
    assert after < before


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed:3"])
def test_the_adapters_alone_are_saved(backend: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    out = printed(2, "lora.py", "--out", str(tmp_path / "lora"), backend=backend)
    first, last = numbers(r"loss ([\d.]+) to ([\d.]+)", out)
    assert last < first / 3
    assert "difference after loading 0.0e+00" in out
    files = [file.stat().st_size for file in tmp_path.rglob("*.safetensors")]
    assert len(files) > 1
    assert max(files) < 8000  # the base has 18 kB
    weights = peft.utils.load_peft_weights(str(tmp_path / "lora/adapter"), device="cpu")
    assert {name.split(".")[2] for name in weights} == {"0", "2", "4"}
    assert weights["base_model.model.0.lora_B.weight"].abs().max() > 0


def test_batch_size() -> None:
    # A program of its own, because accel restarts the process group that it created.
    command = [executable(), "-m", "accel", "run", "--processes", "2", str(FOLDER / "batch_size.py")]
    environ = clean_environ() | {"PYTHON_EXEC": executable()}
    program = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert program.returncode == 0, program.stderr
    out = program.stdout
    assert re.findall(r"trying (\d+)", out) == ["64", "32", "16"]
    first, last = numbers(r"batch size 16: loss ([\d.]+) to ([\d.]+)", out)
    assert last < first / 2


@pytest.mark.parametrize("world", [1, 2])
def test_local_sgd(world: int) -> None:
    out = printed(world, "local_sgd.py")
    first, last = numbers(r"error ([\d.]+) to ([\d.]+)", out)
    assert last < first / 5
    averages, before, after = numbers(r"(\d+) averages; largest difference before ([\d.e+-]+), after ([\d.e+-]+)", out)
    assert averages == 64 // world
    assert after == 0
    assert (before > 1e-3) == (world > 1)


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    out = printed(2, "early_stopping.py", "--out", str(tmp_path / "best"))
    stopped, best, error = numbers(r"after epoch (\d+); best is epoch (\d+), error ([\d.]+)", out)
    assert stopped == best + 5 < 199
    assert numbers(r"came back ([\d.]+)", out) == pytest.approx([error], abs=2e-4)


def test_each_sample_is_evaluated_once(tmp_path: Path) -> None:
    out = [printed(world, "evaluate.py", "--out", str(tmp_path / str(world))) for world in (1, 2)]
    assert out == [f"right 101 of 101 on {world} processes\n" for world in (1, 2)]


def test_resume_on_fewer_processes(tmp_path: Path) -> None:
    whole = printed(2, "resume.py", "--out", str(tmp_path / "whole"))
    assert printed(2, "resume.py", "--out", str(tmp_path / "cut"), "--stop-at", "13") == ""
    out = printed(1, "resume.py", "--out", str(tmp_path / "cut"))
    assert out.startswith("resumed at step 10\n")  # of 8 in an epoch
    assert numbers(r"loss ([\d.]+)", out) == pytest.approx(numbers(r"loss ([\d.]+)", whole), abs=2e-6)


def recipe_with(endpoint: str, name: str, *arguments: str) -> str:
    stores.use(endpoint)
    return recipe(name, *arguments)


def test_a_bucket_takes_checkpoints() -> None:
    with stores.server() as endpoint:
        root = f"s3://{stores.BUCKET}/run"
        first, *_ = run(2, recipe_with, endpoint, "object_store.py", "--root", root)
        second, *_ = run(2, recipe_with, endpoint, "object_store.py", "--root", root)
    ((saved, loss),) = re.findall(r"saved (s3://\S+/epoch-2): loss ([\d.]+)", first)
    assert f"resumed from {saved}: loss {loss}\n" in second
    assert "/epoch-5: loss" in second


@pytest.fixture
def memory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        yield f"{root}/run"


def test_checkpoints_in_memory(memory: str, tmp_path: Path) -> None:
    def train(out: str, *arguments: str) -> str:
        return printed(2, "memory_checkpoint.py", "--memory", memory, "--out", str(tmp_path / out), *arguments)

    (whole,) = numbers(r"loss ([\d.]+)", train("whole"))
    assert not os.path.exists(memory)
    assert train("cut", "--stop-at", "13") == ""
    assert train("cut", "--stop-at", "16") == f"resumed from {memory}/step-13\n"
    assert os.listdir(memory) == ["step-16"]
    shutil.rmtree(memory)  # the node was restarted
    out = train("cut")
    assert out.startswith(f"resumed from {tmp_path}/cut/step-10\n")
    assert numbers(r"loss ([\d.]+)", out) == pytest.approx([whole], abs=2e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_is_short_tested_and_told_of(name: str) -> None:
    source = (FOLDER / name).read_text()
    assert len(source.splitlines()) <= 60
    assert f'"{name}"' in Path(__file__).read_text()
    assert f"examples/by_feature/{name}`" in (ROOT / "docs/recipes.md").read_text()
