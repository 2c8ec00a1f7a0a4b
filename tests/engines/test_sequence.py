"""``sequence_parallel``: shards of each sequence on neighbouring ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention  # a name of its own
from torch.utils.checkpoint import checkpoint

import accel
from tests.distributed import refusals, run
from tests.engines import llama
from tests.models import distance

LENGTH, WORDS = 16, 32


class Block(nn.Module):
    """``kind``: how attention is called."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(width)
        self.kv = 2 if kind == "grouped" else 4
        self.qkv = nn.Linear(width, width + 2 * self.kv * width // 4, bias=False)  # the gradient of keys' bias is 0
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH) * 0.1) if kind == "bias" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, width = x.shape
        q, k, v = self.qkv(self.norm(x)).split([width, *[self.kv * width // 4] * 2], 2)
        q, k, v = (y.view(b, t, -1, width // 4).transpose(1, 2) for y in (q, k, v))
        if self.kind == "grouped":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif self.kind == "bias":
            y = F.scaled_dot_product_attention(q, k, v, self.bias)
        elif self.kind == "by hand":
            y = (q @ k.mT).softmax(-1) @ v
        else:
            y = attention(q, k, v, is_causal=self.kind != "both ways")
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """Positions given or numbered here; a loss of its own, or none."""

    def __init__(self, kind: str = "causal", again: str = "", width: int = 16) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, kind) for _ in range(2))
        self.head = nn.Linear(width, WORDS)
        self.again = again

    def forward(self, ids: torch.Tensor, places: Any = None, targets: Any = None) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]) if places is None else places)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.again == "reentrant") if self.again else block(x)
        out = self.head(x)
        return out if targets is None else F.cross_entropy(out.flatten(0, 1), targets.flatten())


def batch(step: int, replica: int, replicas: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (4, LENGTH + 1), generator=generator).chunk(replicas)[replica]
    targets = ids[:, 1:].clone()
    targets[0, 5:] = -100
    return ids[:, :-1], torch.arange(LENGTH)[None], targets


def build(kind: str, again: str = "", precision: str = "32-true") -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    model = GPT(kind, again)
    if precision == "bf16-mixed":  # AdamW would make whole steps of roundings
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Any, ways: str, batch_of: Callable[[int], Any]) -> None:
    for step in range(4):
        if "freeze" in ways and step in (1, 3):
            model.blocks[0].qkv.weight.requires_grad_(step == 3)
        optimizer.zero_grad()
        micros = 2 if "accumulate" in ways or "no_sync" in ways else 1
        for micro in range(micros):
            quiet = "no_sync" in ways and micro == 0 and type(model) is not GPT
            with accel.no_sync(model) if quiet else contextlib.nullcontext():
                (model(*batch_of(2 * step + micro)) / micros).backward()
        if "clip" in ways:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@functools.cache
def reference(kind: str, ways: str, replicas: int, precision: str) -> nn.Module:
    """One process on all that the replicas have, of which each has equally many targets."""
    model, optimizer = build(kind, "", precision)

    def everything(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids, places, targets = zip(*(batch(step, replica, replicas) for replica in range(replicas)), strict=True)
        return torch.cat(ids), places[0], torch.cat(targets)

    # Steps change weights here, so autocast must not keep their copies in bf16.
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
        train(model, optimizer, ways, everything)
    return model


CASES = [
    ("causal", "", "clip no_sync freeze", "32-true"),
    ("both ways", "", "accumulate freeze", "32-true"),
    ("grouped", "", "no_sync", "32-true"),
    ("bias", "reentrant", "accumulate clip", "32-true"),
    ("grouped", "new", "clip freeze", "32-true"),
    ("causal", "", "accumulate", "bf16-mixed"),
]


def parity(backend: Any, cases: list[Any]) -> None:
    for kind, again, ways, precision in cases:
        raw, optimizer = build(kind, again, precision)
        model, handle, _ = accel.setup(raw, optimizer, backend=backend, precision=precision)
        place = accel.data_parallel_place(model)
        assert place == (accel.rank() // backend.sequence_parallel, accel.world_size() // backend.sequence_parallel)
        train(model, handle, ways, lambda step: accel.shard_sequence(model, batch(step, *place)))  # noqa: B023
        accel.teardown(model)
        found = distance(raw, reference(kind, ways, place[1], precision))
        assert found <= (2e-3 if precision == "bf16-mixed" else 1e-5), (kind, again, ways, precision, found)


ENGINES: list[Any] = [
    accel.DDP(sequence_parallel=2),
    accel.Sharded(sequence_parallel=2),
    accel.FSDP(sequence_parallel=2, activation_checkpointing=True),
    *(accel.DeepSpeed(stage=stage, sequence_parallel=2) for stage in (1, 3)),
]


def test_parity() -> None:
    """N steps give the weights of one process on whole sequences, whatever the engine."""
    pytest.importorskip("deepspeed")
    run(2, parity, ENGINES[0], CASES, timeout=240)
    for backend in ENGINES[1:]:
        run(2, parity, backend, CASES[:1], timeout=240)


def test_parity_on_four_ranks() -> None:
    run(4, parity, accel.DDP(sequence_parallel=4), [case for case in CASES if "grouped" not in case])
    run(4, parity, accel.FSDP(sequence_parallel=2), CASES[2:5])


def tokens(replica: int, replicas: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:  # on the right, where a causal model needs no mask
        batch["labels"][2, 10:], batch["labels"][3, 5:] = -100, -100
    else:
        batch["attention_mask"] = torch.ones_like(ids)
    return {name: value.chunk(replicas)[replica] for name, value in batch.items()}


def train_named(model: Any, optimizer: Any, batches: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum(model(**each).loss for each in batches) / len(batches)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def transformers_models(backend: Any) -> None:
    for kind, padded, checkpointing in (
        ("LlamaForCausalLM", False, False),
        ("LlamaForCausalLM", True, True),
        ("BertForMaskedLM", False, False),
    ):
        raw, plain = (llama.build(kind, LENGTH + 2) for _ in range(2))
        if checkpointing:
            raw.train().gradient_checkpointing_enable()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (raw, plain)]  # the gradient of keys' bias is 0
        model, optimizer, _ = accel.setup(raw, optimizers[0], backend=backend)
        place, places = accel.data_parallel_place(model)
        shard = accel.shard_sequence(model, tokens(place, places, padded))
        losses = train_named(model, optimizer, [shard])
        expected = train_named(plain, optimizers[1], [tokens(n, places, padded) for n in range(places)])
        mean = accel.all_gather(torch.tensor([losses])).mean(0)
        assert mean.allclose(torch.tensor(expected), atol=1e-5), (kind, padded, mean, expected)
        assert distance(accel.full_state_dict(model), dict(plain.state_dict())) <= 1e-5, (kind, padded)
        if kind == "LlamaForCausalLM" and not checkpointing:
            ids = tokens(0, 1, False)["input_ids"][:1, :4]
            with accel.whole_sequences(model), torch.no_grad():
                generated = model.generate(ids, max_new_tokens=4, do_sample=False)
            assert torch.equal(generated, plain.generate(ids, max_new_tokens=4, do_sample=False))
        accel.teardown(model)


def test_models_of_transformers() -> None:
    """Causal with grouped heads, and both ways, padded and checkpointed: losses, weights and texts of one process."""
    pytest.importorskip("transformers")
    run(2, transformers_models, accel.DDP(sequence_parallel=2))
    run(4, transformers_models, accel.FSDP(sequence_parallel=2))


def mean_loss(backend: Any) -> None:
    raw, _ = build("causal")
    plain, _ = build("causal")
    optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    model, optimizer, _ = accel.setup(raw, optimizer, backend=backend)
    place = accel.data_parallel_place(model)
    shards = [accel.shard_sequence(model, batch(m, *place)) for m in range(2)]
    total = sum((targets != -100).sum() for *_, targets in shards)
    value = torch.zeros(())
    for ids, places, targets in shards:
        losses = F.cross_entropy(model(ids, places).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = accel.mean_loss(losses, total)
        loss.backward()
        value += loss.detach()
    optimizer.step()
    batches = [batch(m, n, place[1]) for m in range(2) for n in range(place[1])]
    ids, places, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
    expected = F.cross_entropy(plain(ids, places[:1]).flatten(0, 1), targets.flatten())
    expected.backward()
    assert value.allclose(expected, atol=1e-6)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    accel.teardown(model)
    assert distance(raw, plain) <= 1e-6


@pytest.mark.parametrize(("world", "backend"), [(1, "ddp"), (2, accel.DDP(sequence_parallel=2)), (2, "sharded")])
def test_the_mean_over_all_tokens(world: int, backend: Any) -> None:
    run(world, mean_loss, backend)


def modules() -> None:
    """Run nn.TransformerEncoder in training and in evaluation, which has a fast path in torch."""
    for causal in (False, True):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=causal)
        raw = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH) if causal else None
        x = torch.randn(2, LENGTH, 16)
        expected = raw(x, mask, is_causal=causal)
        model = accel.setup(raw, backend=accel.DDP(sequence_parallel=2)).model
        shard, local = accel.shard_sequence(model, x), expected.chunk(2, 1)[accel.rank()]
        assert distance(model(shard, mask, is_causal=causal), local) < 1e-5
        with torch.no_grad():
            assert distance(model.eval()(shard, mask, is_causal=causal), local) < 1e-5
            with accel.whole_sequences(model):
                assert distance(model(x, mask, is_causal=causal), expected) < 1e-5
        accel.teardown(model)
    assert torch.backends.mha.get_fastpath_enabled()
    assert attention is F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_modules_of_torch() -> None:
    run(2, modules)


def mistakes() -> None:
    two = accel.DDP(sequence_parallel=2)
    raw, _ = build("causal")
    model = accel.setup(raw, backend=two).model
    ids, places, _ = batch(0, 0, 1)
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}
    by_hand = accel.setup(GPT("by hand"), backend=two).model
    shard, place = accel.shard_sequence(by_hand, (ids, places))
    cases: list[tuple[Any, str]] = [
        (lambda: model(ids), "which are not shards. Call"),
        (lambda: accel.shard_sequence(model, ids[:, :7]), "can't divide 7 tokens over 2 ranks. Pad"),
        (lambda: accel.shard_sequence(model, padded), "doesn't support padding in attention_mask"),
        (lambda: by_hand(shard, place), "called no scaled_dot_product_attention"),
        (lambda: accel.setup(GPT(), backend=accel.DDP(sequence_parallel=3)), "sequence_parallel=3 doesn't divide"),
    ]
    for act, message in cases:
        with pytest.raises(accel.BackendError, match=message):
            act()
    with accel.whole_sequences(model):
        assert torch.equal(model(ids), raw(ids))


def test_mistakes() -> None:
    run(2, mistakes)


def other_batches() -> None:
    model = accel.setup(GPT(), backend=accel.DDP(sequence_parallel=2)).model
    accel.shard_sequence(model, torch.full((2, LENGTH), accel.rank()))


def test_other_batches_of_one_sequence() -> None:
    for message in refusals(2, other_batches, error="RankMismatchError", breaks=True):
        assert "tensor 0 has different values on rank 1 than on rank 0" in message
