"""A sample of the generated training loops, and mistakes that the comparison must find."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

import accel
from tests import generated
from tests.backends import need
from tests.distributed import Outcome
from tests.generated import Distributed, Program, Reference, check, difference, draw, judge, report

SAMPLE = (25, 26, 27)  # they have most kinds of lines between them
ZERO = ("deepspeed:1", "deepspeed:2", "deepspeed:3")
BACKENDS = ("ddp", "sharded", "fsdp", *ZERO, "pipeline")


@pytest.mark.parametrize("backend", BACKENDS)
def test_sample(backend: str) -> None:
    need(backend, 2)
    for seed in SAMPLE:
        program = draw(seed, backend)
        result = check(program)
        assert result.kind == "equal", f"{program}\n{result.text}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeds_cover_everything(backend: str) -> None:
    programs = [draw(seed, backend) for seed in range(200)]
    assert programs == [draw(seed, backend) for seed in range(200)]
    lines = {line.strip() for p in programs for step in p.steps for line in step}
    text = "\n".join(lines)
    lacks = generated.UNSUPPORTED.get(backend, set())
    assert {*generated.ZERO, *generated.CLIP, "with accel.no_sync(model):"} <= lines
    assert {"save()", "load()", "resume()", "set_up_again()"} <= lines
    assert {"evaluation = evaluate()", "optimizers[1].step()"} <= lines
    assert {name for p in programs for name in p.features} == {*generated.FEATURES} - lacks
    for kind, template in generated.BACKWARDS.items():
        assert template[-1].split("{")[0] in text or kind in lacks, kind
    assert ("model.penalty()" in text) == ("penalty" not in lacks)
    assert ("side=[" in text) == backend.startswith(generated.BRANCHES_DIFFER)


def programs_with(text: str) -> list[Program]:
    """Return the first programs that have a text in their lines."""
    programs = [draw(seed, "ddp") for seed in range(100)]
    return [p for p in programs if text in str(p)][:4]


def without(program: Program, text: str) -> Program:
    """Return the program without the lines that contain a text."""
    steps = tuple(tuple(line for line in step if text not in line) for step in program.steps)
    return replace(program, steps=steps)


LINES = (
    "zero_grad",
    "requires_grad_",
    "second.backward",
    "penalty()).backward",
    "optimizers[1].step",
    "scheduler.step",
)
LINES += ("clip_grad_norm_", "clip_grad_value_", "load()", "resume()")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("text", LINES)
def test_every_line_matters(text: str) -> None:
    """If a line has no effect, the generator can't find a backend that gets the line wrong."""
    found = []
    for program in programs_with(text):
        expected = Reference(program).train()
        assert not difference(expected, Reference(program).train())
        found.append(difference(expected, Reference(without(program, text)).train()))
    assert sum(map(bool, found)) > 1, found


class Unsynchronized(Distributed):
    """Each rank trains a model of its own."""

    def set_up(self) -> None:
        self.model, self.optimizers = self.raw, self.raw_optimizers

    accel = generated.PlainAccel

    def state(self, stateful: Any) -> Any:
        return Reference.state(self, stateful)


def train_unsynchronized(program: Program, folder: str) -> list[dict[str, Any]]:
    return Unsynchronized(program, folder).train()


def wait_on_rank_1(program: Program, folder: str) -> list[dict[str, Any]]:
    while accel.rank():
        time.sleep(0.1)
    return []


def test_missing_synchronization_is_found() -> None:
    result = check(draw(0, "ddp"), train=train_unsynchronized)
    assert result.kind == "failed"
    assert result.text.startswith("rank 0: step 0: model.")


def test_another_learning_rate_is_found() -> None:
    program = replace(draw(0, "ddp"), scheduler="")
    expected = Reference(program).train()
    run = Reference(program)
    run.optimizers[0].param_groups[0]["lr"] *= 1.01
    assert "step 0: " in difference(expected, run.train())


def test_refusals_and_failures() -> None:
    step = {"model.weight": 1.0}
    good = Outcome(value=[step])
    refusal = Outcome(error=("BackendError", "AccelError"), message="unsupported\nmore")
    crash = Outcome(error=("RuntimeError",), message="crash")
    nan = Outcome(value=[{"model.weight": float("nan")}])
    results = [
        judge([step], [good, good]),
        judge([step], [refusal, refusal]),
        judge([step], [good, refusal]),
        judge([step], [refusal, crash]),
        judge([step], [good, nan]),
        judge([step], [good, Outcome(value=[{}])]),
    ]
    assert [r.kind for r in results] == ["equal", "refused", *["failed"] * 4]
    equal, refused, failed = results[:3]
    assert report("ddp", dict.fromkeys(range(19), equal) | {19: refused}, 1.0)
    assert not report("ddp", dict.fromkeys(range(18), equal) | {18: refused}, 1.0)
    assert not report("ddp", dict.fromkeys(range(99), equal) | {99: failed}, 1.0)


def test_a_hang_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated, "TIMEOUT", 2.0)
    result = check(draw(0, "ddp"), train=wait_on_rank_1)
    assert result.kind == "failed"
    assert "rank 1 did not answer" in result.text
    assert "wait_on_rank_1" in result.text
