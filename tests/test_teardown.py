"""The end of engines, where the ranks' garbage collectors and programs let go of models at different moments."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel import api, process
from accel.registry import registry
from tests.backends import BACKENDS, engine_of, need
from tests.distributed import outcomes, refusals, run, wait_for
from tests.models import distance, mlp
from tests.programs import by_hand, free_port, scripts

TRAINING = [backend for backend in BACKENDS if engine_of(backend).synchronizes]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.Linear(6, 3))


def train(backend: Any, lr: float, seed: int) -> tuple[Any, Any]:
    """The handles of a model after two steps on the same data."""
    torch.manual_seed(seed)
    raw = net()
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters(), lr=lr), backend=backend)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(4, 5)), torch.ones(4, 3)).backward()
        optimizer.step()
    return model, optimizer


@contextlib.contextmanager
def collecting_on_rank_1_only() -> Iterator[None]:
    gc.collect()
    if accel.rank() == 0:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect() -> None:
    if accel.rank() == 1:
        gc.collect()


def values(state: Any) -> list[Any]:
    return [v.tolist() for v in state.values()]


# -- engines that live on some ranks only ---------------------------------------------------------------------------------


def search(backend: Any) -> tuple[bool, list[Any]]:
    """A search of learning rates; whether the best model is right after ``teardown()``, and its weights."""
    with collecting_on_rank_1_only():
        for trial in range(12 if backend in ("deepspeed", accel.DeepSpeed(stage=3)) else 6):
            model, optimizer = train(backend, 10 ** -(trial % 5 + 1), trial)
            if trial == 4:
                best = model
            collect()
        del model, optimizer
        collect()
        full, raw = values(accel.full_state_dict(best)), accel.unwrap(best)
        accel.teardown()
        return values(raw.state_dict()) == full, full


@pytest.mark.parametrize("backend", TRAINING, ids=str)
def test_the_best_of_many_models_keeps_its_weights(backend: Any) -> None:
    need(backend, 2)
    (right, first), (also, second) = run(2, search, backend)
    assert right
    assert also
    assert first == second


def keep_on_one_rank(backend: Any) -> tuple[str, bool, bool, str]:
    """What ``teardown()`` says where rank 0 alone holds a model; whether the other model, and this one, are right then."""
    first, optimizer = train(backend, 0.1, 0)
    second, _ = train(backend, 0.1, 1)
    expected = [values(accel.full_state_dict(m)) for m in (first, second)]
    raws = [accel.unwrap(first), accel.unwrap(second)]
    raw_optimizer = object.__getattribute__(optimizer, "_accel_raw")
    if accel.rank() == 1:
        del first, optimizer, raw_optimizer
        raws[0] = net()
        gc.collect()
    said = refused = ""
    try:
        accel.teardown()
    except accel.AccelError as error:
        said = str(error)
    right = [values(raw.state_dict()) == e for raw, e in zip(raws, expected, strict=True)]
    if accel.rank() == 0:
        for p in raws[0].parameters():
            p.grad = torch.ones_like(p)
        try:
            raw_optimizer.step()
        except accel.OptimizerError as error:
            refused = str(error)
    return said, right[1], right[0], refused


@pytest.mark.parametrize("backend", TRAINING, ids=str)
def test_a_model_that_one_rank_alone_holds_ends_by_itself(backend: Any) -> None:
    """What the rank has of it is right; where that is a part, every rank raises."""
    need(backend, 2)
    (said, right, whole, refused), (also, other, _, _) = run(2, keep_on_one_rank, backend)
    assert right
    assert other
    assert bool(said) == bool(also) == (not whole)
    if backend in ("sharded", "deepspeed", accel.DeepSpeed(stage=1)):
        assert "has only this rank's part of its state" in refused
    if said:
        label = re.search(r"Sequential #\d+", said)
        assert label
        assert label[0] in also
        assert "rank 1 let go of the model" in said


def end_different_models(backend: Any) -> list[bool]:
    models = [train(backend, 0.1, seed)[0] for seed in range(2)]
    expected = [values(accel.full_state_dict(m)) for m in models]
    mine = models[accel.rank()]
    for call in (accel.teardown, accel.full_state_dict):
        with pytest.raises(accel.RankMismatchError, match=r"rank 0 is in .* #(\d+).*rank 1 is in .* #(?!\1)\d+"):
            call(mine)
    # Nothing has changed.
    return [values(accel.teardown(m).state_dict()) == e for m, e in zip(models, expected, strict=True)]


@pytest.mark.parametrize("backend", ["fsdp", accel.DeepSpeed(stage=3), "pipeline"], ids=str)
def test_ranks_that_end_different_models_of_one_class_all_raise(backend: Any) -> None:
    need(backend, 2)
    assert run(2, end_different_models, backend) == [[True, True]] * 2


def end_after_different_steps(directory: str) -> list[str]:
    """Rank 1 is interrupted in front of a step that rank 0 makes."""
    said = []
    for alone in (True, False):
        model, optimizer = train("fsdp", 0.1, 0)
        accel.save({"model": model, "optimizer": optimizer}, directory)
        model(torch.ones(4, 5)).sum().backward()
        if accel.rank() == 0:
            optimizer.step()
        with pytest.raises(accel.AccelError) as caught:
            accel.teardown(model) if alone else accel.teardown()
        said.append(str(caught.value))
        if alone:
            accel.load(directory, {"model": model, "optimizer": optimizer})
            accel.teardown(model)
    return said


def test_parts_after_different_steps_are_not_put_together(tmp_path: Path) -> None:
    for one, every in run(2, end_after_different_steps, str(tmp_path)):
        assert re.search("rank 0 is in 'accel.teardown after 3 steps.*rank 1 is in 'accel.teardown after 2 steps", one)
        assert "after 3 steps on rank 0, after 2 steps on rank 1" in every


def step_different_models(backend: Any) -> None:
    optimizers = [train(backend, 0.1, seed)[1] for seed in range(2)]
    optimizers[accel.rank()].step()


@pytest.mark.parametrize("backend", ["sharded", "horovod", "xla"], ids=str)
def test_ranks_that_step_different_models_of_one_class_all_raise(backend: Any) -> None:
    need(backend, 2)
    for message in refusals(2, step_different_models, backend, error="RankMismatchError"):
        assert len(set(re.findall(r"Sequential #\d+", message))) == 2


def save_different_models(directory: str) -> None:
    models = [train("fsdp", 0.1, seed)[0] for seed in range(2)]
    accel.save({"model": models[accel.rank()]}, directory)


def test_ranks_that_save_different_models_of_one_class_all_raise(tmp_path: Any) -> None:
    for message in refusals(2, save_different_models, str(tmp_path), error="CheckpointError"):
        assert len(set(re.findall(r"Sequential #\d+", message))) == 2


# -- what the collector must not decide -------------------------------------------------------------------------------------


def clip_beside_a_dropped_pipeline() -> float:
    with collecting_on_rank_1_only():
        pipeline, first = train("pipeline", 0.1, 0)
        model, _ = train("ddp", 0.1, 1)
        del pipeline, first
        collect()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_clipping_asks_no_ranks_for_a_model_that_is_gone() -> None:
    first, second = run(2, clip_beside_a_dropped_pipeline)
    assert first == second > 0


def overflow(lr: float) -> float:
    raw = net()
    model, optimizer, _ = accel.setup(
        raw, torch.optim.SGD(raw.parameters(), lr=lr), backend="ddp", precision="16-mixed"
    )
    accel.backward((model(torch.ones(4, 5)) * float("inf")).sum())
    optimizer.step()
    return registry.loss_scale.value


def scales() -> list[float]:
    with collecting_on_rank_1_only():
        first = overflow(0.1)
        collect()
        return [first, overflow(0.1)]


def test_the_loss_scale_is_the_same_on_all_ranks() -> None:
    first, second = run(2, scales)
    assert first == second
    assert first[0] == first[1] > 0  # of a new model it is a new one


def scaled_then_plain(backend: Any) -> float:
    """A model in 16-mixed, then one in 32-true, whose setup the first one outlives on rank 0 alone."""
    with collecting_on_rank_1_only():
        for precision in ("16-mixed", "32-true"):
            raw = net()
            reference = copy.deepcopy(raw)
            plain = torch.optim.SGD(reference.parameters(), lr=0.1)
            model, optimizer, _ = accel.setup(
                raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=backend, precision=precision
            )
            collect()
            for step in range(2):
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                accel.backward(model(x[accel.rank() :: 2]).square().mean())
                optimizer.step()
                plain.zero_grad()
                reference(x).square().mean().backward()
                plain.step()
        return distance(accel.full_state_dict(model), reference.state_dict())


@pytest.mark.parametrize("backend", ["ddp", "fsdp", "sharded"])
def test_no_loss_is_scaled_for_a_model_that_one_rank_has_let_go_of(backend: str) -> None:
    assert max(run(2, scaled_then_plain, backend)) < 1e-5


def collected_in_setup() -> tuple[float, bool]:
    """The model before goes on rank 1 while the next one is built; then a step overflows."""
    kept = [train_scaled(1.0)]
    build = api._build

    def build_and_collect(*args: Any) -> Any:
        engine = build(*args)
        if accel.rank() == 1:
            kept.clear()
            gc.collect()
        return engine

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(api, "_build", build_and_collect)
        model = train_scaled(float("inf"))
    torch.manual_seed(3)
    return registry.loss_scale.value, values(accel.full_state_dict(model)) == values(net().state_dict())


def train_scaled(factor: float) -> Any:
    torch.manual_seed(3)
    raw = net()
    model, optimizer, _ = accel.setup(
        raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="ddp", precision="16-mixed"
    )
    accel.backward((model(torch.ones(4, 5)) * factor).sum())
    optimizer.step()
    return model


def test_models_share_the_loss_scale_whatever_is_collected_in_a_setup() -> None:
    (scale, skipped), (other, also) = run(2, collected_in_setup)
    assert scale == other
    assert skipped
    assert also


class Fickle(nn.Linear):
    def reset_parameters(self) -> None:
        if accel.rank() == 1 and getattr(self, "deferred", False):
            raise ValueError("rank 1 has no values today")
        super().reset_parameters()


def serials() -> list[str]:
    with accel.deferred_init():
        bad = Fickle(3, 3)
    bad.deferred = True  # type: ignore[assignment]
    with pytest.raises((ValueError, accel.RankMismatchError), match="rank 1 has no values today"):
        accel.setup(bad, backend="ddp")
    return [registry.of_handle(accel.setup(net(), backend="ddp").model).label for _ in range(2)]


def test_a_failed_setup_leaves_the_ranks_with_the_same_serials() -> None:
    first, second = run(2, serials)
    assert first == second
    assert len(set(first)) == 2


def run_a_cell_twice() -> int:
    backbone = nn.Linear(4, 4)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            model = nn.Sequential(backbone, nn.Linear(4, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, _ = accel.setup(model, optimizer)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        return len(registry.engines)
    finally:
        gc.enable()


@pytest.mark.parametrize("world", [1, 2])
def test_a_cell_runs_twice_around_one_backbone(world: int) -> None:
    assert run(world, run_a_cell_twice) == [1] * world


def without_optimizer(backend: Any) -> list[Any]:
    with collecting_on_rank_1_only():
        for seed in range(3):
            torch.manual_seed(seed)
            raw = net()
            model = accel.setup(raw, backend=backend).model
            with torch.no_grad():
                model(torch.ones(4, 5))
            collect()
        del model
        accel.teardown()
        return values(raw.state_dict())


@pytest.mark.parametrize("backend", ["ddp", "fsdp", accel.DeepSpeed(stage=3)], ids=str)
def test_models_that_are_only_called_come_back_too(backend: Any) -> None:
    need(backend, 2)
    first, second = run(2, without_optimizer, backend)
    torch.manual_seed(2)
    assert first == second == values(net().state_dict())


def alone_in_an_error() -> str:
    """Rank 1 comes to ``teardown()`` with an error, and rank 0 is in another call."""
    model, _ = train("fsdp", 0.1, 0)
    if accel.rank() == 0:
        accel.full_state_dict(model)
        return ""
    try:
        raise ValueError("rank 1 has had enough")
    finally:
        accel.teardown()


def test_a_rank_that_tears_down_after_an_error_frees_the_others() -> None:
    first, second = outcomes(2, alone_in_an_error, breaks=True)
    assert "RankMismatchError" in first.error
    assert "rank 1 is in 'accel.teardown'" in first.message
    assert "rank 1 has had enough" in second.trace


# -- the end of the process -------------------------------------------------------------------------------------------------

PROGRAM = """
import atexit, os
import torch
from torch import nn

def threads():
    names = [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")]
    print("left:", sum("gloo" in name for name in names))

atexit.register(threads)
import accel
kept = []
for trial in range(9):
    raw = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    backend = ("sharded", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3))[trial % 3]
    model, optimizer, _ = accel.setup(raw, torch.optim.AdamW(raw.parameters()), backend=backend)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if trial < 3:
        kept.append(model)
import gc
gc.disable()
ring = [torch.distributed.group.WORLD]
ring.append(ring)
del ring
"""


def test_no_thread_of_gloo_outlives_the_process_groups() -> None:
    """One that is the last to let go of a tensor while the interpreter ends aborts the process."""
    for name in ("fairscale", "deepspeed"):
        pytest.importorskip(name)
    port = free_port()
    environs = [by_hand(rank, 2, port) | {"LOCAL_RANK": str(rank)} for rank in range(2)]
    for result in scripts(PROGRAM, *environs):
        assert "left: 0" in result.stdout, result.stdout + result.stderr


class Stuck:
    """An exchange of which gloo does not tell that the connection broke."""

    def is_completed(self) -> bool:
        return False


def end_with_a_stuck_exchange() -> list[int]:
    """How many threads of gloo are left by an end, and by one during such an exchange."""
    left = []
    for stuck in ([], [Stuck()]):
        accel.init()
        process.current().begun_exchanges += stuck
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_MOMENT", 0.1)
            accel.teardown()
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        left.append(sum("gloo_runloop" in name for name in names))
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_no_end_waits_for_a_thread_of_gloo_that_nothing_wakes() -> None:
    for result in outcomes(2, end_with_a_stuck_exchange, breaks=True):
        before, after = result.value or (0, 0)
        assert after > before, result


def end_alone_later(ended: str) -> None:
    """A divided model that was collected is nothing that a later teardown waits for."""
    train("sharded", 0.1, 0)
    gc.collect()
    accel.teardown()
    model, _ = train("ddp", 0.1, 0)
    if accel.rank() == 0:
        accel.teardown()
        Path(ended).touch()
    else:
        wait_for(Path(ended).exists)


def test_a_model_that_is_gone_makes_no_later_teardown_collective(tmp_path: Path) -> None:
    for result in outcomes(2, end_alone_later, str(tmp_path / "ended"), breaks=True):
        assert not result.error, result.trace


def late_groups(backend: Any) -> None:
    """Groups of the raw optimizer count at once, by the objects that were the parameters before setup too."""
    raw = mlp(4, 8, 3)
    own = list(raw.parameters())
    optimizer = torch.optim.Adam(own[:2], lr=0.1)
    model, handle, _ = accel.setup(raw, optimizer, backend=backend)
    optimizer.add_param_group({"params": own[2:]})
    assert [len(group["params"]) for group in accel.full_state_dict(handle)["param_groups"]] == [2, 2]
    optimizer.add_param_group({"params": [stranger := nn.Parameter(torch.ones(3))]})
    for refused in (lambda: accel.full_state_dict(handle), lambda: accel.teardown(model)):
        with pytest.raises(accel.OptimizerError, match=r"param_groups\[2\]\['params'\]\[0\] of shape \(3,\)"):
            refused()
    del optimizer.param_groups[2], stranger
    accel.teardown(model)
    assert [p for group in optimizer.param_groups for p in map(id, group["params"])] == list(map(id, own))


@pytest.mark.parametrize("backend", ["sharded", "fsdp", "pipeline", accel.DeepSpeed(stage=2), accel.DeepSpeed(stage=3)])
def test_groups_that_were_added_since_the_last_step(backend: Any) -> None:
    need(backend, 2)
    run(2, late_groups, backend)
