"""``activation_checkpointing`` on every engine that has it: the weights of a plain loop."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import accel
from tests.backends import need
from tests.distributed import run
from tests.engines import llama
from tests.models import distance, rows

WIDTH = 16


class Block(nn.Module):
    """With dropout, statistics of batches, a buffer that it writes, and a residual connection."""

    def __init__(self, computed: list[int]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.computed = nn.Dropout(0.25), computed
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.computed.append(1)
        self.seen.add_(0.125)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.computed: list[int] = []
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(self.computed) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(x)
        return out


def train(backend: Any, precision: str) -> tuple[Net, int]:
    """Weights and buffers after steps with accumulation, ``no_sync`` and a frozen block; how often blocks computed."""
    net = Net()
    keys = list(net.state_dict())
    model, optimizer, _ = accel.setup(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), backend=backend, precision=precision
    )
    place = accel.data_parallel_place(model)[0]
    torch.manual_seed(place)
    for step in range(3):
        if step == 1:
            model.blocks[1].up.weight.requires_grad_(False)
        optimizer.zero_grad()
        with accel.no_sync(model):
            accel.backward(model(rows(step, 8, 4)).square().mean())
        accel.backward(model(rows(10 * step + place, 8, 4)).square().mean())
        accel.clip_grad_norm_(model, 1.0)
        optimizer.step()
    assert list(accel.full_state_dict(model)) == keys
    calls = len(net.computed)
    accel.teardown(model)
    assert list(net.state_dict()) == keys
    assert not any("forward" in vars(module) for module in net.modules())
    return net, calls


PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
#: Engines, and a precision beside fp32.
BACKENDS: list[tuple[Any, dict[str, Any], str]] = [
    (accel.DDP, {}, "16-mixed"),
    (accel.FSDP, {}, "bf16-mixed"),
    (accel.FSDP, {"tensor_parallel": 2, "plan": PLAN}, ""),
    (accel.Sharded, {}, ""),
    (accel.DeepSpeed, {"stage": 2}, ""),
    (accel.DeepSpeed, {"stage": 3}, "bf16-mixed"),
    (accel.Horovod, {}, ""),
]


def same_weights(kind: Any, options: dict[str, Any], other: str) -> None:
    for precision in filter(None, ("32-true", other)):
        plain, once = train(kind(**options), precision)
        for choice in (True, (Block,)) if precision == "32-true" else (True,):
            net, calls = train(kind(**options, activation_checkpointing=choice), precision)
            assert calls == 2 * once, (choice, precision)
            assert not distance(net, plain), (choice, precision)
            assert not distance(list(net.buffers()), list(plain.buffers())), (choice, precision)


@pytest.mark.parametrize(("kind", "options", "other"), BACKENDS, ids=lambda v: getattr(v, "__name__", str(v)[:20]))
def test_weights_and_buffers(kind: Any, options: dict[str, Any], other: str) -> None:
    need(kind.__name__.lower(), 2)
    run(2, same_weights, kind, options, other)


def test_copies_compute_with_their_own_weights() -> None:
    net = Net()
    model = accel.setup(net, backend=accel.Single(activation_checkpointing=True)).model
    x = rows(0, 4, WIDTH)
    for copied in (copy.deepcopy(model), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            for parameter in copied.blocks[0].parameters():
                parameter.zero_()
        assert torch.equal(copied.blocks[0](x), x)
    accel.teardown(model)
    assert not any("forward" in vars(module) for module in net.modules())


def with_caches() -> None:
    """Models of transformers fill a cache of keys and values while they train."""
    plain, raw = llama.build().train(), llama.build().train()
    options = accel.DDP(activation_checkpointing=True)
    model, optimizer, _ = accel.setup(raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=options)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for m, o in ((model, optimizer), (plain, other)):
        for _ in range(2):
            o.zero_grad()
            loss = m(input_ids=ids, attention_mask=mask, labels=ids).loss
            loss.backward(retain_graph=True)
            loss.backward()
            o.step()
    assert distance(raw.state_dict(), plain.state_dict()) < 1e-6
    said = [m.generate(ids[:1], max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (raw, plain)]
    assert torch.equal(*said)


def test_caches_of_transformers() -> None:
    pytest.importorskip("transformers")
    run(1, with_caches)
