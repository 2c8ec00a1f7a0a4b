"""``sequence_parallel``: shards of each sequence on neighbouring ranks."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention  # a name of its own
from torch.utils.checkpoint import checkpoint

import accel
from tests.distributed import refusals, run
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


def train(model: Any, optimizer: Any, place: tuple[int, int], cut: Any, ways: str, precision: str = "32-true") -> None:
    for step in range(4):
        if "freeze" in ways and step in (1, 3):
            model.blocks[0].qkv.weight.requires_grad_(step == 3)
        optimizer.zero_grad()
        micros = 2 if "accumulate" in ways or "no_sync" in ways else 1
        for micro in range(micros):
            quiet = "no_sync" in ways and cut is not None and micro == 0
            with accel.no_sync(model) if quiet else contextlib.nullcontext():
                if cut is None:
                    for replica in range(place[1]):  # one process: all that the replicas have
                        ids, places, targets = batch(2 * step + micro, replica, place[1])
                        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                            loss = model(ids, places, targets)
                        (loss / micros / place[1]).backward()
                else:
                    ids, places, targets = cut(batch(2 * step + micro, *place))
                    (model(ids, places, targets) / micros).backward()
        if "clip" in ways:
            accel.clip_grad_norm_(model, 0.1) if cut else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@functools.cache
def reference(kind: str, ways: str, replicas: int, precision: str) -> nn.Module:
    model, optimizer = build(kind, "", precision)
    train(model, optimizer, (0, replicas), None, ways, precision)
    return model


CASES = [
    ("causal", "", "clip no_sync freeze", "32-true"),
    ("both ways", "", "accumulate freeze", "32-true"),
    ("grouped", "", "no_sync", "32-true"),
    ("bias", "reentrant", "accumulate clip", "32-true"),
    ("grouped", "new", "clip freeze", "32-true"),
    ("causal", "", "accumulate", "bf16-mixed"),
]


def parity(backend: Any, cases: list[Any]) -> list[str]:
    failures = []
    for kind, again, ways, precision in cases:
        raw, optimizer = build(kind, again, precision)
        model, handle, _ = accel.setup(raw, optimizer, backend=backend, precision=precision)
        place = accel.data_parallel_place(model)
        assert place == (accel.rank() // backend.sequence_parallel, accel.world_size() // backend.sequence_parallel)
        train(model, handle, place, functools.partial(accel.shard_sequence, model), ways)
        accel.teardown(model)
        found = distance(raw, reference(kind, ways, place[1], precision))
        if not found <= (2e-3 if precision == "bf16-mixed" else 1e-5):
            failures.append(f"{kind} {again} {ways} {precision}: {found:.1e}")
    return failures


ENGINES: list[Any] = [
    accel.DDP(sequence_parallel=2),
    accel.Sharded(sequence_parallel=2),
    accel.FSDP(sequence_parallel=2, activation_checkpointing=True),
    *(accel.DeepSpeed(stage=stage, sequence_parallel=2) for stage in (1, 3)),
]


def test_parity() -> None:
    """N steps give the weights of one process on whole sequences, whatever the engine."""
    pytest.importorskip("deepspeed")
    assert run(2, parity, ENGINES[0], CASES, timeout=240) == [[]] * 2
    for backend in ENGINES[1:]:
        assert run(2, parity, backend, CASES[:1], timeout=240) == [[]] * 2


def test_parity_on_four_ranks() -> None:
    cases = [case for case in CASES if "grouped" not in case]
    assert run(4, parity, accel.DDP(sequence_parallel=4), cases) == [[]] * 4
    assert run(4, parity, accel.FSDP(sequence_parallel=2), CASES[2:5]) == [[]] * 4


def tokens(replica: int, replicas: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padded:  # on the right, where a causal model needs no mask
        batch["labels"][2, 10:], batch["labels"][3, 5:] = -100, -100
    else:
        batch["attention_mask"] = torch.ones_like(ids)
    return {name: value.chunk(replicas)[replica] for name, value in batch.items()}


def build_named(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH + 2}
    model = getattr(transformers, kind)
    torch.manual_seed(0)
    return model(model.config_class(**sizes, **heads, pad_token_id=0)).eval()  # without dropout


def train_named(model: Any, place: tuple[int, int], cut: Any, padded: bool) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)  # the gradient of keys' bias is 0
    if cut is not None:
        model, optimizer, _ = accel.setup(accel.unwrap(model), optimizer)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if cut is None:
            loss = sum(model(**tokens(n, place[1], padded)).loss for n in range(place[1])) / place[1]
        else:
            loss = model(**cut(tokens(*place, padded))).loss
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
        raw, plain = build_named(kind), build_named(kind)
        if checkpointing:
            raw.train().gradient_checkpointing_enable()
        model = accel.setup(raw, backend=backend).model
        place = accel.data_parallel_place(model)
        losses = train_named(model, place, functools.partial(accel.shard_sequence, model), padded)
        expected = train_named(plain, place, None, padded)
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
        assert model(shard, mask, is_causal=causal).allclose(local, atol=1e-5)
        model.eval()
        with torch.no_grad():
            assert model(shard, mask, is_causal=causal).allclose(local, atol=1e-5)
            with accel.whole_sequences(model):
                assert model(x, mask, is_causal=causal).allclose(expected, atol=1e-5)
        assert torch.backends.mha.get_fastpath_enabled()
        accel.teardown(model)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert attention is F.scaled_dot_product_attention


def test_modules_of_torch() -> None:
    run(2, modules)


def mistakes() -> None:
    two = accel.DDP(sequence_parallel=2)
    raw, _ = build("causal")
    model = accel.setup(raw, backend=two).model
    ids, places, targets = batch(0, 0, 1)
    shard, place, _ = accel.shard_sequence(model, (ids, places, targets))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    padded = {"input_ids": ids, "attention_mask": mask}
    by_hand = accel.setup(GPT("by hand"), backend=two).model
    cases: list[tuple[Any, str]] = [
        (lambda: model(ids), "which are not shards. Call"),
        (lambda: accel.shard_sequence(model, ids[:, :7]), "can't divide 7 tokens over 2 ranks. Pad"),
        (lambda: accel.shard_sequence(model, padded), "doesn't support padding in attention_mask"),
        (lambda: by_hand(shard, place), "called no scaled_dot_product_attention"),
        (lambda: accel.setup(GPT(), backend=accel.DDP(sequence_parallel=3)), "sequence_parallel=3 doesn't divide"),
    ]
    accel.shard_sequence(by_hand, (ids, places))
    for act, message in cases:
        with pytest.raises(accel.BackendError, match=message):
            act()
    with accel.whole_sequences(model):
        assert torch.equal(model(ids), raw(ids))


def test_mistakes() -> None:
    run(2, mistakes)
    with pytest.raises(accel.BackendError, match="expected a whole number of at least 1"):
        accel.DDP(sequence_parallel=0)


def other_batches() -> None:
    model = accel.setup(GPT(), backend=accel.DDP(sequence_parallel=2)).model
    accel.shard_sequence(model, torch.full((2, LENGTH), accel.rank()))


def test_other_batches_of_one_sequence() -> None:
    for message in refusals(2, other_batches, error="RankMismatchError", breaks=True):
        assert "tensor 0 has other values on rank 1 than on rank 0" in message
