"""A small Llama on a mesh of processes: layers cut by tensor parallelism, their parts divided by fsdp, copies of all that.

torchrun --nproc-per-node 4 examples/llama_mesh.py
torchrun --nproc-per-node 4 examples/llama_mesh.py --tensor-parallel 1 --replicas 2
"""

import argparse
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader

import accel

CONTEXT, WIDTH, HEADS, HIDDEN, LAYERS = 64, 64, 4, 128, 3

#: Of each pair of layers the first is cut by columns and the second by rows: one sum over the ranks for both.
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


def rotated(x, positions):
    """Rotary embeddings (Su et al., arXiv 2104.09864) of x (batch, heads, length, size)."""
    frequencies = 10000.0 ** (-torch.arange(0, x.shape[-1], 2, device=x.device) / x.shape[-1])
    angles = positions[:, None] * frequencies
    even, odd = x[..., ::2], x[..., 1::2]
    turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
    return torch.stack(turned, dim=-1).flatten(-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x, positions):
        h = self.norm1(x)
        # As many heads as there are here: tensor parallelism gives each process some of them.
        q, k, v = (
            layer(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        q, k = rotated(q, positions), rotated(k, positions)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, num_chars):
        super().__init__()
        self.chars, self.head = nn.Embedding(num_chars, WIDTH), nn.Linear(WIDTH, num_chars, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)

    def forward(self, chars):
        x, positions = self.chars(chars), torch.arange(chars.shape[1], device=chars.device)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def main(args):
    accel.seed(0)
    text = "\n".join(topics.values())[: args.chars]
    alphabet = {char: number for number, char in enumerate(sorted(set(text)))}
    windows = torch.tensor([alphabet[char] for char in text]).unfold(0, CONTEXT + 1, CONTEXT)
    num_chars = -(-len(alphabet) // 8) * 8  # what the embedding is cut into must be equal parts
    model = Llama(num_chars)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    places = max(accel.world_size() // args.tensor_parallel, 1)
    loader = DataLoader(windows, args.batch_size // places, shuffle=True, drop_last=True)

    plan = PLAN if args.tensor_parallel > 1 else None
    backend = accel.FSDP(replicas=args.replicas, tensor_parallel=args.tensor_parallel, plan=plan)
    model, optimizer, loader = accel.setup(model, optimizer, loader, backend=backend)

    accel.print(f"mesh: {accel.mesh(model)}; places with batches of their own: {places}")
    weight = model.blocks[0].down.weight
    here = weight.to_local() if hasattr(weight, "to_local") else weight
    accel.print(f"down: {tuple(weight.shape)}, of which a process has {tuple(here.shape)}")
    for epoch in range(args.epochs):
        losses = []
        for batch in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()
            losses.append(accel.all_reduce(loss.detach(), "mean").item())
        accel.print(f"epoch {epoch + 1}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if args.out:
        accel.save({"model": model, "optimizer": optimizer}, args.out)
        accel.print(f"checkpoint: {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor-parallel", type=int, default=2, help="processes that have parts of each layer")
    parser.add_argument("--replicas", type=int, default=1, help="copies of the model")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--chars", type=int, default=100_000, help="length of the text")
    parser.add_argument("--out", default="", help="a directory for a checkpoint, which any other mesh or backend loads")
    main(parser.parse_args())
