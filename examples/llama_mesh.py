"""Train a small Llama with tensor parallelism, FSDP and replicas.

torchrun --nproc-per-node 4 examples/llama_mesh.py
torchrun --nproc-per-node 4 examples/llama_mesh.py --replicas 2
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

import accel

CONTEXT = 64
WIDTH = 64
HEADS = 4
HIDDEN = 128
LAYERS = 3

# Shard the first layer of a pair by columns and the second by rows, because
# the pair then needs a single all-reduce.
PLAN = {
    "blocks.*.query": ColwiseParallel(),
    "blocks.*.key": ColwiseParallel(),
    "blocks.*.value": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.gate": ColwiseParallel(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "chars": RowwiseParallel(input_layouts=Replicate()),
}


def rotate(x, positions):
    """Apply rotary embeddings (arXiv 2104.09864) to (batch, heads, length, size)."""
    frequencies = 10000.0 ** (
        -torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1]
    )
    angles = positions[:, None] * frequencies
    even = x[..., ::2]
    odd = x[..., 1::2]
    first = even * angles.cos() - odd * angles.sin()
    second = even * angles.sin() + odd * angles.cos()
    return torch.stack([first, second], dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def heads(self, projected):
        # -1, because each rank has only some of the heads.
        return projected.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def forward(self, x, positions):
        h = self.norm1(x)
        q = rotate(self.heads(self.query(h)), positions)
        k = rotate(self.heads(self.key(h)), positions)
        v = self.heads(self.value(h))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, num_chars):
        super().__init__()
        self.chars = nn.Embedding(num_chars, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_chars, bias=False)

    def forward(self, chars):
        x = self.chars(chars)
        positions = torch.arange(chars.shape[1], device=chars.device)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def main(args):
    accel.seed(0)
    text = "\n".join(topics.values())[: args.chars]
    alphabet = {char: number for number, char in enumerate(sorted(set(text)))}
    windows = torch.tensor([alphabet[char] for char in text]).unfold(
        0, CONTEXT + 1, CONTEXT
    )
    # The embedding must split evenly over the ranks.
    num_chars = math.ceil(len(alphabet) / 8) * 8
    model = Llama(num_chars)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Ranks that share a layer read the same batch.
    num_readers = max(accel.world_size() // args.tensor_parallel, 1)
    loader = DataLoader(
        windows, args.batch_size // num_readers, shuffle=True, drop_last=True
    )

    plan = PLAN if args.tensor_parallel > 1 else None
    backend = accel.FSDP(
        replicas=args.replicas,
        tensor_parallel=args.tensor_parallel,
        plan=plan,
    )
    model, optimizer, loader = accel.setup(
        model, optimizer, loader, backend=backend
    )

    accel.print(f"mesh: {accel.mesh(model)}, {num_readers} different batches")
    weight = model.blocks[0].down.weight
    shard = weight.to_local() if hasattr(weight, "to_local") else weight
    accel.print(
        f"down: {tuple(weight.shape)}, this rank's shard: {tuple(shard.shape)}"
    )
    for epoch in range(args.epochs):
        losses = []
        for batch in loader:
            optimizer.zero_grad()
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten()
            )
            loss.backward()
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()
            losses.append(accel.all_reduce(loss.detach(), "mean").item())
        accel.print(
            f"epoch {epoch + 1}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )
    if args.out:
        accel.save({"model": model, "optimizer": optimizer}, args.out)
        accel.print(f"checkpoint: {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=2,
        help="ranks that share each layer",
    )
    parser.add_argument(
        "--replicas", type=int, default=1, help="copies of the model"
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="total over ranks"
    )
    parser.add_argument(
        "--chars", type=int, default=100_000, help="length of the text"
    )
    parser.add_argument(
        "--out", default="", help="directory for a checkpoint"
    )
    main(parser.parse_args())
