"""The programs of examples/ train on one process and on several, and print what they should."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import run
from tests.programs import ROOT

FOLDER = ROOT / "examples"
RECIPES = sorted(path.name for path in (FOLDER / "by_feature").glob("*.py"))


def on_rank(name: str, *arguments: str, backend: str | None = None) -> str:
    """Return the output of a program on this rank."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", [name, *arguments])
        if backend is not None:
            patch.setenv("ACCEL_BACKEND", backend)
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return output.getvalue()


def printed(world: int, name: str, *arguments: str, backend: str | None = None) -> str:
    """Return the output of rank 0. The others must print nothing."""
    main, *others = run(world, partial(on_rank, backend=backend), name, *arguments)
    assert not any(others)
    return main


def numbers(pattern: str, text: str) -> list[float]:
    """Return the groups of the only match."""
    (found,) = re.findall(pattern, text)
    return [float(number) for number in ([found] if isinstance(found, str) else found)]


#: A pattern for a number at the start and at the end, and by how much the number falls.
FALLS = {
    "accumulation.py": (r"loss ([\d.]+) to ([\d.]+)", 5.0),
    "gan.py": (r"data ([\d.]+) to ([\d.]+)", 4.0),
    "local_sgd.py": (r"loss ([\d.]+) to ([\d.]+)", 5.0),
    "tracking.py": (r"loss ([\d.]+) to ([\d.]+)", 2.0),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", FALLS)
def test_losses_fall(name: str, world: int, tmp_path: Path) -> None:
    arguments = ("--out", str(tmp_path)) if name == "tracking.py" else ()
    out = printed(world, f"by_feature/{name}", *arguments)
    pattern, factor = FALLS[name]
    first, last = numbers(pattern, out)
    assert last < first / factor
    if name == "tracking.py":
        assert list((tmp_path / "tensorboard").iterdir())
    if name == "local_sgd.py":
        before, after = numbers(r"before ([\d.e+-]+), after ([\d.e+-]+)", out)
        assert after == 0
        assert (before > 1e-3) == (world > 1)


def test_digits_equal_plain_pytorch() -> None:
    """Two processes and three backends print the same lines as one process."""
    lines = printed(1, "train.py", "--epochs", "3")
    assert lines.count(" of 357 correct\n") == 3
    assert numbers(r"epoch 2: (\d+) of", lines)[0] > 320
    for backend in ("ddp", "fsdp", "deepspeed:3"):
        assert printed(2, "train.py", "--epochs", "3", backend=backend) == lines
    plain = printed(1, "train_torch.py", "--epochs", "3")  # in a different order of samples
    assert abs(numbers(r"epoch 2: (\d+) of", plain)[0] - numbers(r"epoch 2: (\d+) of", lines)[0]) < 18


def test_gpt_switches_backends(tmp_path: Path) -> None:
    """A run resumes with different backends, precisions and numbers of processes."""
    options = ("--every", "10", "--out", str(tmp_path), "--resume")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 800)
    losses = []
    stages = [(2, "fsdp", "32-true"), (2, "deepspeed:3", "bf16-mixed"), (1, "single", "32-true")]
    for number, (world, backend, precision) in enumerate(stages):
        steps = 10 * number + 10
        arguments = ("--text", str(text), "--steps", str(steps), "--precision", precision, *options)
        out = printed(world, "pretrain_gpt.py", *arguments, backend=backend)
        assert ("resumed at step" in out) == (number > 0)
        losses += numbers(rf"step {steps}: test loss ([\d.]+), \d+ characters/s", out)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "deepspeed:3"])
def test_adapters_alone_are_saved(backend: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    out = printed(2, "finetune.py", "--out", str(tmp_path), backend=backend)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 2
    assert out.count("\n1, 2, 3, ") == 1
    assert "difference after loading 0.0e+00" in out
    saved = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.safetensors"))
    assert 0 < saved < 100_000  # the base has 460 kB
    weights = peft.utils.load_peft_weights(str(tmp_path / "adapter"), device="cpu")
    assert any(".lora_B." in name and value.abs().max() > 0 for name, value in weights.items())


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", ["zero3.py", "fsdp.py"])
def test_sharded_models_train(name: str, world: int, tmp_path: Path) -> None:
    out = printed(world, name, "--out", str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 1.5
    if name == "fsdp.py":
        assert (tmp_path / "weights/model.safetensors").stat().st_size > 400_000


def test_a_mesh_of_four() -> None:
    """Each layer is sharded along both dimensions of the mesh."""
    out = printed(4, "llama_mesh.py", "--chars", "20000")
    assert "mesh: DeviceMesh((" in out
    assert "down: (64, 128), this rank's shard: (32, 64)" in out
    first, last = numbers(r"loss ([\d.]+) to ([\d.]+)", out)
    assert last < first - 0.5


def test_rewards_rise() -> None:
    first, last = numbers(r"reward ([\d.]+) to ([\d.]+)", printed(2, "by_feature/rlhf.py"))
    assert first < 2
    assert last > 6


@pytest.mark.parametrize("library", ["torch", "diffusers"])
def test_averages_equal_those_of_ddp(library: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    outputs = {}
    for backend in ("ddp", "sharded", "fsdp", "deepspeed:3"):
        arguments = ("--library", library, "--out", str(tmp_path / backend))
        outputs[backend] = printed(2, "by_feature/ema.py", *arguments, backend=backend)
    assert set(outputs.values()) == {outputs["ddp"]}
    before, after = numbers(r"error ([\d.]+) to ([\d.]+)", outputs["ddp"])
    assert after < before


def test_each_sample_is_evaluated_once(tmp_path: Path) -> None:
    out = printed(2, "by_feature/evaluate.py", "--out", str(tmp_path))
    assert out == "101 of 101 correct on 2 processes\n"


def test_resume_on_fewer_processes(tmp_path: Path) -> None:
    full = printed(2, "by_feature/resume.py", "--out", str(tmp_path / "full"))
    stopped = ("--out", str(tmp_path / "stopped"))
    assert printed(2, "by_feature/resume.py", *stopped, "--stop-at", "13") == ""
    out = printed(1, "by_feature/resume.py", *stopped)
    assert out.startswith("resumed at step 10\n")  # of 8 in an epoch
    assert numbers(r"loss ([\d.]+)", out) == pytest.approx(numbers(r"loss ([\d.]+)", full), abs=2e-6)


def test_recipes_are_on_the_page() -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert not [name for name in RECIPES if f"examples/by_feature/{name}" not in page]
