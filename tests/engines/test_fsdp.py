"""The fsdp engine: what is particular to shards. The parity matrix is in test_contract.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.registry import registry
from tests import test_loop
from tests.distributed import live_tensors, refusals, run

WIDTH = 16


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("this block fails")
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Repeated blocks, a tied head, a scalar, a buffer that changes."""

    def __init__(self, width: int = WIDTH, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += tokens.float().mean()
        return self.head(x) * self.scale


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The global batch as (world, 8)."""
    generator = torch.Generator().manual_seed(step)
    size = (accel.world_size(), 8)
    return torch.randint(0, 10, size, generator=generator), torch.randint(0, 10, size, generator=generator)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
}


def build(seed: int = 7, optimizer: str = "adamw") -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    first = list(net.blocks[0].parameters())
    rest = [p for p in net.parameters() if all(p is not q for q in first)]
    return net, OPTIMIZERS[optimizer]([{"params": first, "lr": 0.02}, {"params": rest}])


def local_loss(model: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    return F.cross_entropy(model(x[accel.rank()]), y[accel.rank()])


def mean_loss(model: Any, step: int) -> torch.Tensor:
    x, y = batch(step)
    return sum((F.cross_entropy(model(a), b) for a, b in zip(x, y, strict=True)), torch.zeros(())) / len(x)


def train(model: Any, optimizer: Any, steps: range, loss: Callable[[Any, int], torch.Tensor] = local_loss) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def distance(state: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two model state dicts; what counts batches differs by how they are seen."""
    assert list(state) == list(other)
    return max(float((state[k] - other[k]).abs().max()) for k in state if k != "seen")


def optimizer_distance(state: dict[str, Any], other: dict[str, Any]) -> float:
    assert state["param_groups"] == other["param_groups"]
    assert state["state"].keys() == other["state"].keys()
    pairs = [(s[k], other["state"][i][k]) for i, s in state["state"].items() for k in s if s[k] is not None]
    return max(float((a - b).abs().max()) for a, b in pairs)


def start(options: Any = None, optimizer: str = "adamw", **kwargs: Any) -> tuple[Any, Any, Net, torch.optim.Optimizer]:
    net, raw = build(optimizer=optimizer)
    model, handle, _ = accel.setup(net, raw, backend=options or "fsdp", **kwargs)
    return model, handle, net, raw


# -- the unchanged loop -----------------------------------------------------------------------------------------------

# What computes with parameters outside the module, or needs a graph of a backward, is refused by torch or by accel.
REFUSED = {
    "regularised_by_parameters": "mixed torch.Tensor and DTensor",
    "gradients_assigned": "not have been used in the graph",
    "gradient_penalty": "create_graph",
    "lbfgs": "LBFGS",
}
WRAPS = {
    "root": accel.FSDP(),
    "inner": accel.FSDP(wrap=(nn.Sequential,)),
    "kept": accel.FSDP(wrap=lambda m: isinstance(m, nn.Sequential), reshard_after_forward=False),
}


def patterns(option: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in test_loop.PATTERNS:
        if name in REFUSED:
            with pytest.raises((accel.AccelError, RuntimeError), match=REFUSED[name]):
                test_loop.compare(name, WRAPS[option])
            accel.teardown()
        else:
            found[name] = test_loop.compare(name, WRAPS[option])
    return found


@pytest.mark.parametrize(("option", "world"), [("root", 2), ("inner", 2), ("kept", 2), ("inner", 4)])
def test_patterns(option: str, world: int) -> None:
    for found in run(world, patterns, option, timeout=180):
        assert not {k: v for k, v in found.items() if not v <= 1e-5}


# -- setup, state, teardown -------------------------------------------------------------------------------------------


def life(options: Any, optimizer: str) -> None:
    reference, ref_optimizer = build(optimizer=optimizer)
    initial = copy.deepcopy(reference.state_dict())
    schedulers = [torch.optim.lr_scheduler.StepLR(ref_optimizer, 2, 0.5)]

    def both(model: Any, handle: Any, scheduler: Any, steps: range) -> None:
        for step in steps:
            train(model, handle, range(step, step + 1))
            scheduler.step()
            train(reference, ref_optimizer, range(step, step + 1), mean_loss)
            schedulers[0].step()

    net, raw = build(seed=7 if accel.is_main() else 8, optimizer=optimizer)
    parameters = list(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 2, 0.5)
    model, handle, _ = accel.setup(net, raw, backend=options)
    assert distance(accel.full_state_dict(model), initial) == 0.0
    both(model, handle, scheduler, range(3))
    assert distance(accel.full_state_dict(model), reference.state_dict()) < 1e-5
    assert optimizer_distance(accel.full_state_dict(handle), ref_optimizer.state_dict()) < 1e-5
    assert accel.teardown(model) is net
    assert type(net) is Net
    assert type(net.blocks[0]) is Block
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert distance(net.state_dict(), reference.state_dict()) < 1e-5
    assert optimizer_distance(raw.state_dict(), ref_optimizer.state_dict()) < 1e-5
    copy.deepcopy(net)
    model, handle, _ = accel.setup(net, raw, backend="ddp")
    both(model, handle, scheduler, range(3, 5))
    accel.teardown(model)
    model, handle, _ = accel.setup(net, raw, backend=options)
    both(model, handle, scheduler, range(5, 7))
    accel.teardown(model)
    train(net, raw, range(7, 8), mean_loss)
    train(reference, ref_optimizer, range(7, 8), mean_loss)
    assert distance(net.state_dict(), reference.state_dict()) < 1e-5
    assert optimizer_distance(raw.state_dict(), ref_optimizer.state_dict()) < 1e-5


OPTIONS = {
    "default": accel.FSDP(),
    "offload": accel.FSDP(cpu_offload=True),
    "checkpointing": accel.FSDP(activation_checkpointing=True),
    "kept": accel.FSDP(reshard_after_forward=False),
}


def lives() -> None:
    for options in OPTIONS.values():
        life(options, "adamw")
        accel.teardown()
    life(accel.FSDP(), "sgd")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_from_setup_to_teardown_and_back_with_other_backends(world: int) -> None:
    run(world, lives, timeout=180)


def evaluation_then_training() -> float:
    reference, ref_optimizer = build()
    net, raw = build()
    old = list(net.parameters())
    model = accel.setup(net, backend="fsdp").model
    with torch.no_grad():
        assert not local_loss(model, 0).requires_grad
    # Of objects that setup replaced, of gathered ones, and of shards.
    local_loss(model, 0)
    optimizer = torch.optim.AdamW([{"params": raw.param_groups[0]["params"], "lr": 0.02}], lr=0.01)
    optimizer.add_param_group({"params": [p for p in old if all(p is not q for q in raw.param_groups[0]["params"])]})
    handle = accel.setup(model, optimizer).optimizers
    late = torch.optim.SGD(model.parameters(), lr=0.0)
    accel.setup(model, late)
    train(model, handle, range(4))
    train(reference, ref_optimizer, range(4), mean_loss)
    return distance(accel.full_state_dict(model), reference.state_dict())


def test_an_optimizer_after_an_evaluation_only_setup() -> None:
    assert max(run(2, evaluation_then_training)) < 1e-5


def inference_then_training() -> float:
    model, _, *_ = start()
    with torch.inference_mode():
        local_loss(model, 0)
    reference, _ = build()
    local_loss(model, 1).backward()
    mean_loss(reference, 1).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    return float((accel.clip_grad_norm_(model, 1.0) - norm).abs())


def test_a_first_forward_in_inference_mode() -> None:
    assert max(run(2, inference_then_training)) < 1e-5


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: torch.Tensor, *chosen: int) -> torch.Tensor:
        for number in chosen:
            x = self.blocks[number](x)
        return x + self.empty.sum()


def branches(differ: str) -> None:
    model = Branches()
    handles = accel.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="fsdp")
    other = accel.rank() if differ else 0
    for chosen in ((0, 1), (0, 1), (2,), (1, 0) if differ == "order" and other else (0, 1 + other)):
        with torch.set_grad_enabled(differ != "evaluation"):
            loss = handles.model(torch.ones(2, 4), *chosen).square().mean()
        if loss.requires_grad:
            loss.backward()
            handles.optimizers.step()
            handles.optimizers.zero_grad()


def test_ranks_that_use_other_blocks_of_equal_size() -> None:
    run(2, branches, "")
    for differ in ("order", "training", "evaluation"):
        messages = refusals(2, branches, differ, error="RankMismatchError", breaks=True)
        assert all("the gathering of blocks." in message for message in messages)


def state_verbs() -> list[str]:
    model, handle, net, raw = start()
    train(model, handle, range(2))
    full, full_optimizer = accel.full_state_dict(model), accel.full_state_dict(handle)
    assert full["head.weight"] is full["embed.weight"]
    assert not accel.full_state_dict(handle, rank0_only=True) or accel.is_main()
    said = []
    calls = [model.state_dict, handle.state_dict, net.state_dict, net.blocks[1].state_dict, raw.state_dict]
    for call in [*calls, lambda: copy.deepcopy(model)]:
        with pytest.raises(accel.AccelError, match="accel.full_state_dict") as caught:
            call()
        said.append(str(caught.value))
    other, other_optimizer = build(seed=3)
    train(other, other_optimizer, range(5, 7), mean_loss)
    model.load_state_dict(other.state_dict())
    handle.load_state_dict(copy.deepcopy(other_optimizer.state_dict()))
    assert distance(accel.full_state_dict(model), other.state_dict()) == 0.0
    assert optimizer_distance(accel.full_state_dict(handle), other_optimizer.state_dict()) == 0.0
    train(model, handle, range(2))
    train(other, other_optimizer, range(2), mean_loss)
    assert distance(accel.full_state_dict(model), other.state_dict()) < 1e-5
    with pytest.raises(RuntimeError, match=r"Missing key.*scale"):
        model.load_state_dict({k: v for k, v in full.items() if k != "scale"})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(full | {"blocks.0.norm.weight": torch.ones(3)})
    with pytest.raises(accel.BackendError, match="assign"):
        model.load_state_dict(full, assign=True)
    model.load_state_dict(full)
    handle.load_state_dict(full_optimizer)
    return said


def test_whole_states_go_in_and_out() -> None:
    run(2, state_verbs)


def shards() -> dict[str, Any]:
    model, handle, _, raw = start()
    train(model, handle, range(2))
    engine = registry.of_handle(model)
    whole = {n: v for n, v in accel.full_state_dict(model).items() if n != "head.weight"}
    names = [n for n, _ in model.named_parameters()]
    order = [engine.holdings.parameter_names[id(p)] for g in raw.param_groups for p in g["params"]]
    for i, entries in accel.full_state_dict(handle)["state"].items():
        whole |= {f"{order[i]}/{k}": v for k, v in entries.items() if k != "step"}
    listed = engine.holdings.shards(None) + engine.holdings.shards(raw)
    covered = {}
    for s in listed:
        assert s.shape == tuple(whole[s.name].shape)
        assert torch.equal(whole[s.name].reshape(-1)[s.start : s.start + s.tensor.numel()], s.tensor.reshape(-1))
        assert s.tensor.numel()
        covered[s.name] = (s.start, s.tensor.numel())
    assert engine.holdings.values(raw)["groups"][0]["params"] == [n for n in names if n.startswith("blocks.0.")]
    # A fresh optimizer's slots, filled with another's shards, are that optimizer's state.
    manifest = {n: (tuple(v.shape), v.dtype) for n, v in whole.items()}
    before, values = accel.full_state_dict(handle), engine.holdings.values(raw)
    contents = {s.name: s.tensor.clone() for s in engine.holdings.shards(raw)}
    raw.state.clear()
    for slot in engine.holdings.slots(raw, {n: m for n, m in manifest.items() if "/" in n}):
        slot.tensor.copy_(contents[slot.name])
    engine.holdings.fill(raw, values)
    assert optimizer_distance(accel.full_state_dict(handle), before) == 0.0
    for slot in engine.holdings.slots(None, manifest):
        slot.tensor.zero_()
    engine.holdings.filled()
    assert not any(bool(v.any()) for v in accel.full_state_dict(model).values())
    return {n: (covered.get(n, (0, 0)), v.numel()) for n, v in whole.items()}


@pytest.mark.parametrize("world", [2, 4])
def test_the_shards_of_all_ranks_are_everything_once(world: int) -> None:
    ranks = run(world, shards)
    for name, (_, numel) in ranks[0].items():
        ranges = sorted(r[name][0] for r in ranks if r[name][0][1])
        if name not in ("scale", "seen", "scale/exp_avg", "scale/exp_avg_sq"):
            assert [first for first, _ in ranges] == [sum(n for _, n in ranges[:i]) for i in range(len(ranges))]
            assert sum(n for _, n in ranges) == numel, name


# -- an optimizer of whole matrices -----------------------------------------------------------------------------------


def matrices() -> tuple[nn.Sequential, list[torch.optim.Optimizer]]:
    """Rows that the ranks share unevenly, or of which some get none; one layer is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))
    net[2].requires_grad_(False)
    trained = [p for p in net.parameters() if p.requires_grad]
    muon = torch.optim.Muon([p for p in trained if p.dim() == 2], lr=0.02)
    return net, [muon, torch.optim.AdamW([p for p in trained if p.dim() != 2], lr=0.01)]


def muon(directory: str) -> tuple[float, float, bool]:
    """The differences from one process in weights and momenta; a checkpoint in the middle goes on in other objects."""
    (plain, references), (net, raws) = matrices(), matrices()
    original = torch.optim._muon._zeropower_via_newtonschulz  # type: ignore[attr-defined]
    model, optimizers, _ = accel.setup(net, raws, backend="fsdp")
    world, rank = accel.world_size(), accel.rank()
    for step in range(6):
        if step == 3:
            accel.save({"model": model, "optimizers": list(optimizers)}, directory)
            accel.teardown(model)
            net, raws = matrices()
            model, optimizers, _ = accel.setup(net, raws, backend="fsdp")
            accel.load(directory, {"model": model, "optimizers": list(optimizers)})
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
        for m, found, mine in ((plain, references, x), (model, optimizers, x[rank::world])):
            for o in found:
                o.zero_grad()
            m(mine).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            for o in found:
                o.step()
    weights = distance(accel.full_state_dict(model), plain.state_dict())
    momenta = optimizer_distance(accel.full_state_dict(optimizers[0]), references[0].state_dict())
    accel.teardown(model)
    return weights, momenta, torch.optim._muon._zeropower_via_newtonschulz is original  # type: ignore[attr-defined]


@pytest.mark.parametrize("world", [2, 4])
def test_muon_orthogonalises_whole_matrices(world: int, tmp_path: Path) -> None:
    for weights, momenta, undone in run(world, muon, str(tmp_path)):
        assert weights <= 1e-5
        assert momenta <= 1e-5
        assert undone


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(kind: str) -> None:
    net, optimizer = build()
    options: Any = accel.FSDP()
    if kind in ("Adafactor", "LBFGS", "Rprop", "SparseAdam"):
        optimizer = getattr(torch.optim, kind)(net.parameters())
    elif kind == "kernels":
        optimizer = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "bitsandbytes.optim.adamw"})(
            net.parameters()
        )
    elif kind == "Adagrad":
        optimizer = torch.optim.Adagrad(net.parameters(), fused=True)
    elif kind == "hook":
        net.embed.weight.register_hook(lambda g: g)
    elif kind == "dtype":
        net.blocks[1].up.bfloat16()
    elif kind == "container":
        options = accel.FSDP(wrap=(nn.ModuleList,))
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
        ("Adagrad", "OptimizerError", "Adagrad(fused=True) cannot train sharded parameters"),
        ("hook", "BackendError", "embed.weight has gradient hooks"),
        ("dtype", "BackendError", "blocks.1.norm.weight (float32), blocks.1.up.weight (bfloat16)"),
        ("container", "BackendError", "blocks, which has no forward"),
        ("no forward", "BackendError", "a ModuleDict has no forward"),
    ],
)
def test_what_cannot_be_sharded_is_refused_and_left_as_it_was(kind: str, error: str, text: str) -> None:
    for message in refusals(2, refused, kind, error=error):
        assert text in message


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
    # Between a forward and its backward the module has gathered parameters.
    handle.zero_grad()
    loss = local_loss(model, 1)
    gathered = net.embed.weight
    gathered.requires_grad_(False)
    loss.backward()
    assert not net.embed.weight.requires_grad
    before = accel.full_state_dict(model)["embed.weight"]
    handle.zero_grad()
    train(model, handle, range(2, 4))
    assert torch.equal(accel.full_state_dict(model)["embed.weight"], before)


def test_parameter_objects_that_were_replaced_work_or_raise() -> None:
    run(2, old_objects)


def numbers() -> None:
    """DTensor alone would give the number of this rank's part: float(weight.norm()) and the like."""
    from torch.distributed.tensor import DTensor

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
            lambda t: bool(t.isnan().any()),
        ):
            with pytest.raises(accel.BackendError, match="full_tensor"):
                read(tensor)
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


# -- gradients --------------------------------------------------------------------------------------------------------


def dropped(how: str) -> float:
    """Gradients accumulated without reduction are dropped, then one step is made."""
    model, handle, net, raw = start(optimizer="sgd")
    reference, ref_optimizer = build(optimizer="sgd")
    drop: dict[str, Callable[[], None]] = {
        "handle": handle.zero_grad,
        "raw optimizer": raw.zero_grad,
        "module": net.zero_grad,
        "zeros": lambda: handle.zero_grad(set_to_none=False),
        "module zeros": lambda: net.zero_grad(set_to_none=False),
        "by hand": lambda: [setattr(p, "grad", None) for p in model.parameters()] and None,
    }
    for first in range(2):
        with accel.no_sync(model):
            if first:
                local_loss(model, 90).backward()
            local_loss(model, 91).backward()
        drop[how]()
        with accel.no_sync(model):
            local_loss(model, 1).backward()
        local_loss(model, 2).backward()
        handle.step()
        handle.zero_grad()
        (mean_loss(reference, 1) + mean_loss(reference, 2)).backward()
        ref_optimizer.step()
        ref_optimizer.zero_grad()
    return distance(accel.full_state_dict(model), reference.state_dict())


def all_dropped() -> dict[str, float]:
    ways = ("handle", "raw optimizer", "module", "zeros", "module zeros", "by hand")
    found = {}
    for how in ways:
        found[how] = dropped(how)
        accel.teardown()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_dropping_gradients_drops_what_was_not_reduced(world: int) -> None:
    for found in run(world, all_dropped):
        assert not {k: v for k, v in found.items() if not v < 1e-5}


def edited() -> None:
    model, _, _, _ = start()
    with accel.no_sync(model):
        local_loss(model, 0).backward()
    with torch.no_grad():
        next(p for p in model.parameters() if p.dim()).grad.mul_(0.5)
    local_loss(model, 1).backward()


def test_editing_a_gradient_that_is_not_there_yet_raises() -> None:
    for message in refusals(2, edited, error="BackendError"):
        assert "was changed by hand while gradients accumulated unreduced" in message


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("this backward fails")


def exceptions() -> float:
    model, handle, net, _ = start()
    reference, ref_optimizer = build()
    train(model, handle, range(1))
    train(reference, ref_optimizer, range(1), mean_loss)
    net.blocks[1].fails = True
    with pytest.raises(ValueError, match="this block fails"):
        local_loss(model, 1)
    net.blocks[1].fails = False
    train(model, handle, range(1, 2))
    train(reference, ref_optimizer, range(1, 2), mean_loss)
    hook = net.blocks[1].register_forward_hook(lambda m, a, out: Failing.apply(out))
    with pytest.raises(ValueError, match="this backward fails"):
        local_loss(model, 2).backward()
    hook.remove()
    with pytest.raises(accel.BackendError, match="an exception ended a backward"):
        handle.step()
    with pytest.raises(accel.BackendError, match="an exception ended a backward"):
        local_loss(model, 2).backward()
    train(model, handle, range(2, 4))
    train(reference, ref_optimizer, range(2, 4), mean_loss)
    return distance(accel.full_state_dict(model), reference.state_dict())


def test_an_exception_leaves_the_engine_usable_once_gradients_are_dropped() -> None:
    assert max(run(2, exceptions)) < 1e-5


def backward_after_a_step() -> None:
    model, handle, _, _ = start()
    first, second = local_loss(model, 0), local_loss(model, 1)
    first.backward()
    handle.step()
    second.backward()


def test_a_backward_after_the_step_that_changed_its_weights_raises_as_in_one_process() -> None:
    for message in refusals(2, backward_after_a_step, error="RuntimeError"):
        assert "modified by an inplace operation" in message


def other_optimizers() -> dict[str, float]:
    found = {}
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"):
        for kwargs in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            if "fused" in kwargs and name != "Adam":
                continue
            kind = getattr(torch.optim, name)
            net, reference = build()[0], build()[0]
            optimizer = kind(net.parameters(), lr=0.01, **kwargs)
            ref_optimizer = kind(reference.parameters(), lr=0.01, **kwargs)
            model, handle, _ = accel.setup(net, optimizer, backend="fsdp")
            train(model, handle, range(3))
            train(reference, ref_optimizer, range(3), mean_loss)
            found[f"{name} {kwargs}"] = distance(accel.full_state_dict(model), reference.state_dict())
            accel.teardown(model)
    return found


def test_torch_optimizers() -> None:
    for found in run(2, other_optimizers):
        assert not {k: v for k, v in found.items() if not v < 1e-4}


# -- precision --------------------------------------------------------------------------------------------------------


def precisions() -> dict[str, float]:
    found = {}
    for precision, options in (("16-mixed", accel.FSDP()), ("32-true", accel.FSDP(param_dtype=torch.bfloat16))):
        model, handle, _, _ = start(options, "sgd", precision=precision)
        reference, ref_optimizer = build(optimizer="sgd")
        registry.loss_scale.value = 256.0
        for step in range(4):
            handle.zero_grad()
            out = local_loss(model, step)
            assert out.dtype is torch.float32
            accel.backward(out)
            handle.step()
            train(reference, ref_optimizer, range(step, step + 1), mean_loss)
        found[f"{precision} {options.param_dtype}"] = distance(accel.full_state_dict(model), reference.state_dict())
        accel.teardown()
    return found


def test_half_precision_is_near_to_full() -> None:
    for found in run(2, precisions):
        assert all(v < 2e-2 for v in found.values()), found


def overflow() -> tuple[bool, float, float]:
    """One rank's gradient overflows in its own shard: all ranks skip the step."""
    model, handle, _, _ = start(None, "sgd", precision="16-mixed")
    registry.loss_scale.value = 256.0
    accel.backward(local_loss(model, 0))
    if accel.rank() == 1:
        next(p for p in model.parameters() if p.dim()).grad.to_local().view(-1)[0] = float("inf")
    before, scale = accel.full_state_dict(model), registry.loss_scale.value
    handle.step()
    skipped = distance(accel.full_state_dict(model), before) == 0.0
    handle.zero_grad()
    accel.backward(local_loss(model, 1))
    handle.step()
    return skipped, registry.loss_scale.value / scale, distance(accel.full_state_dict(model), before)


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks() -> None:
    for skipped, factor, moved in run(2, overflow):
        assert skipped
        assert factor == 0.5
        assert moved > 0.0


def plain_backward(unsynchronised: bool) -> None:
    model, handle, _, _ = start(None, "sgd", precision="16-mixed")
    if unsynchronised:
        with accel.no_sync(model):
            local_loss(model, 0).backward()
    else:
        local_loss(model, 0).backward()
    handle.step()


@pytest.mark.parametrize("unsynchronised", [False, True])
def test_an_unscaled_loss_is_refused(unsynchronised: bool) -> None:
    for message in refusals(2, plain_backward, unsynchronised, error="PrecisionError"):
        assert "accel.backward(loss)" in message


# -- models built without memory --------------------------------------------------------------------------------------


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(4))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def reset_parameters(self) -> None:
        pass


class Scaled(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.constant_(self.bias, 0.25)


class Mixed(nn.Module):
    """A tied head, attention with a private reset, a module whose reset covers its children."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.extra = Scaled(8, 8)


def deferred(backend: str) -> None:
    torch.manual_seed(5)
    eager = Mixed()
    with accel.deferred_init():
        net = Mixed()
    assert all(p.is_meta for p in net.parameters())
    assert not any(b.is_meta for b in net.buffers())
    raw = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = list(net.parameters())
    torch.manual_seed(5 if accel.is_main() else 6)
    model, handle, _ = accel.setup(net, raw, backend=backend)
    assert distance(accel.full_state_dict(model), eager.state_dict()) == 0.0
    model.extra(torch.ones(2, 8)).sum().backward()
    handle.step()
    assert not torch.equal(accel.full_state_dict(model)["extra.weight"], eager.extra.weight)
    accel.teardown(model)
    assert [id(p) for p in net.parameters()] == [id(p) for p in parameters]
    assert not any(p.is_meta for p in parameters)


@pytest.mark.parametrize(("backend", "world"), [("fsdp", 1), ("fsdp", 2), ("ddp", 2), ("single", 1)])
def test_a_deferred_model_starts_as_an_eager_one(backend: str, world: int) -> None:
    run(world, deferred, backend)


def deferred_refusal(kind: type[nn.Module], backend: str) -> None:
    with accel.deferred_init():
        net = nn.Sequential(kind())
    accel.setup(net, backend=backend)


@pytest.mark.parametrize("backend", ["fsdp", "ddp"])
def test_a_parameter_that_nothing_initialises_is_refused_by_name(backend: str) -> None:
    for message in refusals(2, deferred_refusal, Bare, backend, error="BackendError"):
        assert "no reset_parameters(): 0.gain" in message
    for message in refusals(2, deferred_refusal, Forgetful, backend, error="BackendError"):
        assert "gave no values to 0.gain" in message


def deferred_peak() -> tuple[int, int]:
    """The most bytes that were whole at once while a model got its first values, and the model's bytes."""
    peak = 0
    original = nn.Linear.reset_parameters
    with accel.deferred_init():
        net = Tower(blocks=6)

    def watch(module: nn.Linear) -> None:
        nonlocal peak
        original(module)
        parts = [p for m in net.modules() for p in m._parameters.values() if type(p) is nn.Parameter and not p.is_meta]
        peak = max(peak, sum(p.nbytes for p in parts))

    nn.Linear.reset_parameters = watch
    try:
        accel.setup(net, backend="fsdp")
    finally:
        nn.Linear.reset_parameters = original
    return peak, sum(p.nbytes for p in Tower(blocks=6).parameters())


def test_a_deferred_model_is_never_whole() -> None:
    for peak, num_bytes in run(2, deferred_peak):
        assert 0 < peak <= num_bytes / 6


# -- memory -----------------------------------------------------------------------------------------------------------


class Tower(nn.Sequential):
    def __init__(self, blocks: int = 4, width: int = 64) -> None:
        super().__init__()
        for _ in range(blocks):
            self.append(Block(width))


def bytes_per_rank(frozen: bool) -> float:
    net, optimizer = _tower(frozen)
    num_bytes = sum(p.nbytes for p in net.parameters())
    model, handle, _ = accel.setup(net, optimizer, backend="fsdp")
    for step in range(2):
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        handle.step()
    engine = registry.of_handle(model)
    here = [s.tensor for s in engine.holdings.shards(None) + engine.holdings.shards(handle._accel_raw)]
    here += [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    gathered = sum(p._unsharded_param.untyped_storage().nbytes() for p in engine._parts.sharded.params)
    assert gathered == 0
    assert all(
        p._sharded_param_data.untyped_storage().nbytes() <= p._sharded_param_data.nbytes
        for p in engine._parts.sharded.params
    )
    return sum(t.nbytes for t in here) / num_bytes


def _tower(frozen: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = Tower()
    if frozen:
        for block in list(net)[:3]:
            block.requires_grad_(False)
    return net, torch.optim.AdamW(net.parameters())


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_per_rank(world: int) -> None:
    """Parameters, gradients and AdamW's two moments: 4 N over the ranks; what is frozen costs its shard only."""
    for found in run(world, bytes_per_rank, False):
        assert abs(found - 4 / world) <= 0.02 * 4 / world
    for found in run(world, bytes_per_rank, True):
        assert abs(found - 1.75 / world) <= 0.02 * 1.75 / world


def flips() -> tuple[float, list[int]]:
    model, handle, net, _ = start()
    reference, ref_optimizer = build()
    sizes = []
    for step in range(200):
        for module in (net, reference):
            module.blocks[step % 3].requires_grad_(step % 2 == 0)
        train(model, handle, range(step, step + 1))
        train(reference, ref_optimizer, range(step, step + 1), mean_loss)
        if step in (20, 110, 194):
            sizes.append(live_tensors())
    return distance(accel.full_state_dict(model), reference.state_dict()), sizes


def test_a_hundred_flips_of_trainability() -> None:
    for found, sizes in run(2, flips):
        assert found < 1e-4
        assert max(sizes) - min(sizes) <= 12, sizes
