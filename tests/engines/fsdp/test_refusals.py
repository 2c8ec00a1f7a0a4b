"""What cannot be sharded is refused, and so is what would see a part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import accel
from accel.engines.fsdp.plan import blocks
from tests import models
from tests.distributed import refusals, run
from tests.engines.fsdp.training import Block, Net, build, local_loss, train


def refused(kind: str) -> None:
    net, optimizer = build()
    options: Any = accel.FSDP()
    if kind in ("Adafactor", "LBFGS", "SparseAdam"):
        optimizer = getattr(torch.optim, kind)(net.parameters())
    elif kind == "kernels":
        optimizer = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})(
            net.parameters()
        )
    elif kind == "SGD":
        optimizer = type("SGD", (torch.optim.SGD,), {"step": lambda self: None})(net.parameters(), lr=0.1, fused=True)
    elif kind == "Rprop":
        optimizer = torch.optim.Rprop(net.parameters(), differentiable=True)
    elif kind == "hook":
        net.embed.weight.register_hook(lambda g: g)
    elif kind == "dtype":
        net.blocks[1].up.bfloat16()
    elif kind == "container":
        options = accel.FSDP(wrap=(nn.ModuleList,))
    elif kind == "max_norm":
        net.embed.max_norm = 1.0
    elif kind == "no forward":
        accel.setup(nn.ModuleDict({"net": net}), optimizer, backend=options)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    try:
        accel.setup(net, optimizer, backend=options)
    finally:
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert type(net) is Net
        assert all(type(p) is nn.Parameter for g in optimizer.param_groups for p in g["params"])
        optimizer.state_dict()


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("Adafactor", "OptimizerError", "Adafactor cannot train sharded parameters"),
        ("LBFGS", "OptimizerError", "LBFGS cannot train sharded parameters"),
        ("Rprop", "OptimizerError", "Rprop cannot train sharded parameters"),
        ("SparseAdam", "OptimizerError", "SparseAdam cannot train sharded parameters"),
        ("kernels", "OptimizerError", "AdamW8bit cannot train sharded parameters"),
        ("SGD", "OptimizerError", "SGD(fused=True) cannot train sharded parameters"),
        ("hook", "BackendError", "embed.weight has gradient hooks"),
        ("dtype", "BackendError", "blocks.1.norm.weight (float32), blocks.1.up.weight (bfloat16)"),
        ("container", "BackendError", "blocks, which has no forward"),
        ("max_norm", "BackendError", "embed has max_norm"),
        ("no forward", "BackendError", "a ModuleDict has no forward"),
    ],
)
def test_what_cannot_be_sharded_is_refused_and_left_as_it_was(kind: str, error: str, text: str) -> None:
    for message in refusals(2, refused, kind, error=error):
        assert text in message


def test_blocks_that_share_a_parameter_are_gathered_with_the_whole() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))) for _ in range(3)))
    assert {name for name, _ in blocks(net, None)} == {"0", "1", "2"}
    assert {name for name, _ in blocks(net, (nn.Sequential,))} == {"0", "1", "2", "0.1", "1.1", "2.1"}
    net[2][1][0].weight = net[0][0].weight
    assert {name for name, _ in blocks(net, None)} == {"1"}
    assert {name for name, _ in blocks(net, (nn.Sequential,))} == {"1", "1.1", "0.1"}


def test_options_are_checked() -> None:
    for wrong in ({"wrap": "Block"}, {"wrap": Block}, {"param_dtype": torch.float16}, {"reduce_dtype": torch.int8}):
        with pytest.raises(accel.BackendError, match=next(iter(wrong))):
            accel.FSDP(**wrong)


def old_objects() -> None:
    net, raw = build()
    old = list(net.parameters())
    model, handle, _ = accel.setup(net, raw, backend="fsdp")
    local_loss(model, 0).backward()
    grads = [p.grad for p in model.parameters()]
    assert all(p.grad is g for p, g in zip(old, grads, strict=True))
    assert [tuple(p.shape) for p in old] == [tuple(p.shape) for p in model.parameters()]
    norm = nn.utils.clip_grad_norm_([p for p in old if p.dim()], 1e-3).full_tensor()
    assert norm > 1e-3
    assert nn.utils.get_total_norm([p.grad for p in model.parameters() if p.dim()]).full_tensor() < 1.01e-3
    for use in (lambda p: p + 1, torch.sum, lambda p: torch._foreach_add([p], 1), lambda p: F.linear(torch.ones(1), p)):
        with pytest.raises(accel.BackendError, match="taken from the module before accel.setup"):
            use(old[1])
    stranger = torch.optim.SGD(old, lr=0.1)
    with pytest.raises(accel.BackendError, match="taken from the module before accel.setup"):
        stranger.step()
    old[2].requires_grad_(False)
    assert not list(model.parameters())[2].requires_grad
    old[2].requires_grad = True
    assert list(model.parameters())[2].requires_grad
    # Between a forward and its backward the module has shards.
    handle.zero_grad()
    loss = local_loss(model, 1)
    assert all(isinstance(p, DTensor) for p in model.parameters() if p.dim())
    loss.backward()
    net.embed.weight.requires_grad_(False)
    handle.zero_grad()
    before = accel.full_state_dict(model)["embed.weight"]
    train(model, handle, range(2, 4))
    assert torch.equal(accel.full_state_dict(model)["embed.weight"], before)


def test_parameter_objects_that_were_replaced_work_or_raise() -> None:
    run(2, old_objects)


def numbers() -> None:
    """DTensor alone would give the number of this rank's part: float(weight.norm()) and the like."""
    torch.manual_seed(0)
    raw = nn.Linear(6, 6)
    whole = raw.weight.detach().clone()
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="fsdp")
    model(torch.ones(2, 6)).sum().backward()
    for tensor in (model.weight, model.weight.grad):
        for read in (
            lambda t: t.norm().item(),
            lambda t: float(t.sum().detach()),
            lambda t: t.abs().max().item(),
        ):
            with pytest.raises(accel.BackendError, match="full_tensor"):
                read(tensor)
        any_nan = tensor.isnan().any()
        if any_nan.placements[0].is_replicate():  # torch 2.14 reduces it by itself
            assert not bool(any_nan)
        else:
            with pytest.raises(accel.BackendError, match="full_tensor"):
                bool(any_nan)
    assert torch.equal(model.weight.detach().full_tensor(), whole)
    assert abs(model.weight.detach().norm().full_tensor().item() - float(whole.norm())) < 1e-6
    assert abs(float(model.weight.detach().full_tensor()[-1, -1]) - float(whole[-1, -1])) < 1e-6
    accel.teardown(model)
    assert dict(handlers) == before


def test_a_number_of_a_part_is_refused() -> None:
    run(2, numbers)


def cuts() -> None:
    """Along the divided dimension an index, a slice and the like are copies, to which DTensor alone lets writes go."""
    torch.manual_seed(0)
    raw = nn.Linear(6, 7)
    model, _, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend="fsdp")
    model(torch.ones(2, 6)).sum().backward()
    whole = accel.full_state_dict(model)
    weight = model.weight

    def assign() -> None:
        with torch.no_grad():
            weight[0] = 3.0

    writes: list[Callable[[], Any]] = [
        assign,
        lambda: weight.data[1].zero_(),
        lambda: weight.data[:2].zero_(),
        lambda: weight.data[-2:, :3].mul_(0.5),
        lambda: weight.detach().narrow(0, 1, 3).fill_(1.0),
        lambda: weight.data.chunk(2)[0].zero_(),
        lambda: weight.data.split([3, 4])[1].zero_(),
        lambda: weight.data.diagonal().zero_(),
        lambda: weight.grad[0].zero_(),
    ]
    for write in writes:
        with pytest.raises(accel.BackendError, match="copy, so that writes to it are lost"):
            write()
    # One rank alone would wait for the others, or end in gloo.
    if accel.is_main():
        with pytest.raises(accel.BackendError, match="full_tensor"):
            print(weight.data[0])
    # What is no copy can be written to: columns, and all rows.
    weight.data[:, 2].zero_()
    weight.data[:].mul_(0.5)
    whole["weight"][:, 2] = 0
    assert torch.equal(accel.full_state_dict(model)["weight"], whole["weight"] * 0.5)
    # Reading with a graph cannot lose a write.
    assert torch.equal(weight[1].detach().full_tensor(), whole["weight"][1] * 0.5)


def test_a_row_of_a_part_is_no_place_to_write() -> None:
    run(2, cuts)


def hooks_and_inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    old = list(net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer, _ = accel.setup(net, optimizer, backend="fsdp")
    shards = list(model.parameters())
    hooks = [p.register_hook(lambda g: g * 0.5) for p in shards]
    for inputs in (None, shards[2:], old[:1], shards[3], None):
        optimizer.zero_grad()
        model(torch.arange(8.0).view(2, 4)).square().mean().backward(inputs=inputs)
        optimizer.step()
    hooks[0].remove()
    optimizer.zero_grad()
    model(torch.arange(8.0).view(2, 4)).square().mean().backward(inputs=list(model.parameters()))
    optimizer.step()
    return {k: v.cpu() for k, v in accel.full_state_dict(model).items()}


def test_tensor_hooks_and_backward_with_inputs() -> None:
    (single,) = run(1, hooks_and_inputs)
    for full in run(2, hooks_and_inputs):
        for name, value in single.items():
            torch.testing.assert_close(full[name], value)


def step_before_a_backward(backend: Any, biases: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD([p for n, p in net.named_parameters() if "bias" in n or not biases], lr=0.1)
    model: Any = net
    if backend is not None:
        model, optimizer, _ = accel.setup(net, optimizer, backend=backend)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    out = model(x).sum()
    optimizer.step()
    if biases:  # of which no backward needs the values
        out.backward()
        optimizer.step()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    return dict(net.state_dict()) if backend is None else accel.full_state_dict(model)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_backward_of_a_forward_before_the_step_is_an_error_where_torch_has_one(reshard: bool) -> None:
    """FSDP2 alone computes with the weights from before."""
    run(2, step_before_a_backward, accel.FSDP(reshard_after_forward=reshard), False)
    expected = step_before_a_backward(None, True)
    for found in run(2, step_before_a_backward, accel.FSDP(reshard_after_forward=reshard), True):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def fields(module: nn.Module) -> list[tuple[type, set[str], list[int]]]:
    """Of each module its class, its attributes, and how many hooks and the like it has."""
    tables = (vars(m) for m in module.modules())
    sizes = [[len(value) for value in table.values() if isinstance(value, dict)] for table in tables]
    return [(type(m), set(vars(m)), size) for m, size in zip(module.modules(), sizes, strict=True)]


def failing_inside_torch(everywhere: bool, inside: bool) -> str:
    class Sealed(Net):
        """Refuses subclasses, of which FSDP2 makes one at the end of its work, where it is told to."""

        closed = everywhere or accel.rank() == 1

        def __init_subclass__(cls) -> None:
            if Sealed.closed:
                raise TypeError("this class is final")

    net = Sealed()
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    whole, state, before = copy.deepcopy((net.state_dict(), optimizer.state_dict())), dict(optimizer.state), fields(net)
    objects = list(net.parameters())
    options: Any = accel.FSDP(wrap=(Block, Sealed)) if inside else "fsdp"
    with pytest.raises(accel.BackendError) as caught:
        accel.setup(nn.Sequential(net, nn.Linear(2, 2)) if inside else net, optimizer, backend=options)
    Sealed.closed = False
    assert all(p is q for p, q in zip(net.parameters(), objects, strict=True))
    assert fields(net) == before
    assert models.distance((net.state_dict(), optimizer.state_dict()["state"]), (whole[0], whole[1]["state"])) == 0.0
    assert all(optimizer.state[p] is state[p] for p in objects)
    net.load_state_dict(whole[0])
    handle, stepper, _ = accel.setup(net, optimizer, backend="fsdp")
    train(handle, stepper, range(2))
    return str(caught.value)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_what_torch_refuses_is_said_on_every_rank_and_changes_nothing(everywhere: bool, inside: bool) -> None:
    for message in run(2, failing_inside_torch, everywhere, inside):
        assert "torch's fully_shard refuses" in message
        assert "TypeError: this class is final" in message


class TrainsItself(nn.Linear):
    """Steps inside of a method, more than once."""

    def fit(self, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            torch.mm(x, self.weight.T).square().sum().backward()
            optimizer.step()


def fit() -> None:
    net = TrainsItself(4, 4)
    model, optimizer, _ = accel.setup(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="fsdp")
    model.fit(torch.ones(2, 4), optimizer)


def test_a_method_that_goes_on_after_a_backward_is_named() -> None:
    for message in refusals(2, fit, error="BackendError"):
        assert "TrainsItself" in message
        assert "after a backward in a method" in message


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(6, 8), nn.Linear(8, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.up(self.embedding(tokens)), self.embedding.weight)


def uses_weights_of_a_block() -> None:
    cases = ((Attending, nn.Linear, torch.randn(2, 3, 8)), (Tied, nn.Embedding, torch.tensor([[1, 2, 3]])))
    for kind, wrapped, x in cases:
        torch.manual_seed(0)
        net = kind()
        expected = net(x)
        model, _, _ = accel.setup(copy.deepcopy(net), backend=accel.FSDP(wrap=(wrapped,)))
        with pytest.raises(
            accel.BackendError, match="uses weights of a block outside of .*name the class whose forward"
        ):
            model(x)
        accel.teardown(model)
        for wrap in (None, (kind,)):
            model, _, _ = accel.setup(copy.deepcopy(net), backend=accel.FSDP(wrap=wrap))
            assert torch.allclose(model(x), expected, atol=1e-6)
            accel.teardown(model)


def test_a_forward_that_uses_weights_of_a_block_is_told_what_to_choose() -> None:
    run(2, uses_weights_of_a_block)


def test_options_as_text() -> None:
    assert repr(accel.FSDP()).startswith("FSDP(wrap=None, plan=None, ")
    assert repr(accel.FSDP(wrap=(nn.Linear,))).startswith("FSDP(wrap=['Linear'], ")


def stepped_in_backward() -> None:
    """As in torch's tutorial, an optimizer for each parameter, which steps where its gradient is there."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model, optimizers, _ = accel.setup(net, [torch.optim.SGD([p], 0.1) for p in net.parameters()], backend="fsdp")
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(accel.BackendError, match="an optimizer steps inside a backward"):
        model(torch.ones(2, 4)).sum().backward()


def test_an_optimizer_that_steps_inside_a_backward_is_refused() -> None:
    run(2, stepped_in_backward)
