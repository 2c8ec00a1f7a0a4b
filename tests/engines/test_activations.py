"""``activation_checkpointing`` and ``activation_offload`` on every engine that has them: the weights of a plain loop."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accel
from accel.engines.base import activations
from tests.distributed import run
from tests.models import distance, rows

WIDTH = 16


class Block(nn.Module):
    """With dropout, statistics of batches, a buffer that it reads and writes, and a residual connection."""

    def __init__(self, computed: list[int]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.drop, self.computed = nn.Dropout(0.25), computed
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.computed.append(1)
        self.seen.add_(0.125)
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x))))) * self.seen


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


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
#: By the package that they need, the engines, with the precisions to run beside fp32.
BACKENDS: dict[str, list[tuple[Any, dict[str, Any], str]]] = {
    "torch": [
        (accel.DDP, {}, "16-mixed"),
        (accel.FSDP, {}, "bf16-mixed"),
        (accel.FSDP, {"tensor_parallel": 2, "plan": PLAN}, ""),
    ],
    "fairscale": [(accel.Sharded, {}, "")],
    "deepspeed": [(accel.DeepSpeed, {"stage": 2}, ""), (accel.DeepSpeed, {"stage": 3}, "bf16-mixed")],
    "horovod": [(accel.Horovod, {}, "")],
}


@contextlib.contextmanager
def everything_moved(least: int = 256) -> Iterator[list[tuple[Any, int]]]:
    """Inside, activations on the CPU go to the host's memory too: in it, other memory. The storages, and their sizes."""
    made: list[tuple[Any, int]] = []

    class Noted(activations._Moved):  # type: ignore[misc]
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append((weakref.ref(self), self.host.numel()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "_HOSTS", frozenset())
        patch.setattr(activations, "_LEAST", least)
        patch.setattr(activations, "_Moved", Noted)
        yield made


def same_weights(backends: list[tuple[Any, dict[str, Any], str]]) -> None:
    again, both = {"activation_checkpointing": True}, {"activation_checkpointing": (Block,), "activation_offload": True}
    with everything_moved() as made:
        for kind, options, other in backends:
            for precision in filter(None, ("32-true", other)):
                plain, once = train(kind(**options), precision)
                for more in (again, {"activation_offload": True}, both) if precision == "32-true" else (both,):
                    made.clear()
                    net, calls = train(kind(**options, **more), precision)
                    what = f"{kind.__name__} {options} {more} {precision}"
                    assert calls == once * (1 + ("activation_checkpointing" in more)), (what, calls, once)
                    assert not distance(net, plain), what
                    assert not distance(list(net.buffers()), list(plain.buffers())), what
                    assert bool(made) == ("activation_offload" in more), what
                    # No weight, also where it was gathered; under autocast there are copies of them.
                    assert precision != "32-true" or all(size < net.blocks[0].up.weight.nbytes for _, size in made), (
                        what
                    )


@pytest.mark.parametrize("package", BACKENDS)
def test_weights_and_buffers_are_those_of_the_plain_engine(package: str) -> None:
    pytest.importorskip(package)
    run(2, same_weights, BACKENDS[package])


# -- what stands in the user's module ----------------------------------------------------------------------------------


def test_copies_and_replicas_compute_with_their_own_weights() -> None:
    net = Net()
    model = accel.setup(net, backend=accel.Single(activation_checkpointing=True)).model
    x = rows(0, 4, WIDTH)
    for copied in (copy.deepcopy(model), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            copied.blocks[0].seen.fill_(-0.125)
        assert torch.equal(copied.blocks[0](x), x)
        assert not isinstance(copied.blocks[0].forward, activations.Recomputed)
    forward: Any = net.blocks[0].forward
    replica = net.blocks[
        0
    ]._replicate_for_data_parallel()  # as DataParallel makes them: in it is the original's forward
    replica.seen = torch.zeros(())
    replica.computed = []
    assert forward.of(replica)(x).shape == x.shape
    assert replica.computed
    accel.teardown(model)
    assert not any("forward" in vars(module) for module in net.modules())


def test_what_cannot_be_computed_again_is_refused() -> None:
    with pytest.raises(
        accel.BackendError, match=r"activation_checkpointing='Block'\): expected True, False or a tuple"
    ):
        accel.DDP(activation_checkpointing="Block")  # type: ignore[arg-type]
    with pytest.raises(accel.BackendError, match="finds no blocks in this Linear"):
        accel.setup(nn.Linear(2, 2), backend=accel.Single(activation_checkpointing=True))
    net = Net()
    model = accel.setup(net, backend=accel.Single(activation_checkpointing=True)).model
    for change in (lambda: net.eval(), lambda: _written(net)):
        loss = model(rows(0, 8, 4)).sum()
        change()
        with pytest.raises(accel.BackendError, match=r"parameters, or train\(\) and eval\(\), changed"):
            loss.backward()
        net.train()
    accel.teardown(model)
    with pytest.raises(accel.BackendError, match="there is no such option"):
        accel.Pipeline(activation_checkpointing=True)  # type: ignore[call-arg]


def _written(net: Net) -> None:
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)


# -- offload -----------------------------------------------------------------------------------------------------------


def test_nothing_is_to_be_moved_on_the_cpu_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    activations._say_useless.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            accel.teardown(accel.setup(Net(), backend=accel.Single(activation_offload=True)).model)
    assert [r.message for r in caplog.records if "activation_offload" in r.message] == [
        "activation_offload=True does nothing on cpu: activations lie in the host's memory already"
    ]


def test_storages_are_moved_once_and_parameters_never() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    head = nn.Linear(WIDTH, WIDTH)
    x, module = rows(0, 4, 8, WIDTH), nn.ModuleList([attention, head])

    def losses() -> torch.Tensor:
        h = torch.tanh(x)
        kept = h.square() + h * head(h) + attention(h, h, h, need_weights=False)[0]
        return kept.sum()

    def gradients(loss: torch.Tensor) -> list[Any]:
        loss.backward(retain_graph=True)
        loss.backward()
        found = [p.grad for p in module.parameters()]
        module.zero_grad()
        return found

    plain = gradients(losses())
    with everything_moved() as made:
        loss = activations.offloaded(module, losses)()
        living = [moved() for moved, _ in made]
        # What the backward needs first is on the device still.
        assert sum(moved.here is not None for moved in living) == activations._NEAR < len(living) < 12
        assert {size for _, size in made}.isdisjoint(p.nbytes for p in module.parameters())
        del living
        assert not distance(gradients(loss), plain)
        del loss
        assert not any(moved() for moved, _ in made)  # no cycle, also without the garbage collector


@pytest.mark.parametrize("least", [1, 1 << 30], ids=["moved", "kept"])
def test_what_was_written_to_since_is_an_error_as_in_torch(least: int) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8))
    with everything_moved(least):
        for write in (lambda inner: inner.add_(1), lambda _: net[2].weight.mul_(2)):
            inner = activations.offloaded(net, net[:2])(rows(0, 4, 8))
            out = activations.offloaded(net, net[2])(inner)
            with torch.no_grad():
                write(inner)
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                out.sum().backward()
        x = rows(0, 4, 8).requires_grad_()
        found = []
        for forward in (activations.offloaded(net, net), net):
            (first,) = torch.autograd.grad(forward(x).pow(3).sum(), x, create_graph=True)
            found += [first, *torch.autograd.grad(first.square().sum(), x)]
        assert not distance(found[:2], found[2:])


def with_caches() -> None:
    """Models of transformers fill a cache of keys and values while they train, unless they are told not to."""
    import transformers

    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for kind, more in (("Llama", {}), ("Mistral", {"sliding_window": 4})):
        config = getattr(transformers, f"{kind}Config")(**sizes, **more)
        torch.manual_seed(0)
        plain = getattr(transformers, f"{kind}ForCausalLM")(config)
        raw = copy.deepcopy(plain)
        model, optimizer, _ = accel.setup(
            raw, torch.optim.SGD(raw.parameters(), lr=0.1), backend=accel.DDP(activation_checkpointing=True)
        )
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
        accel.teardown()


def test_a_cache_of_keys_and_values_is_filled_once() -> None:
    pytest.importorskip("transformers")
    run(1, with_caches)
