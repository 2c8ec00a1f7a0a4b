"""A small character GPT learns to write like Python's own manual, from the text that comes with Python.

python examples/gpt.py
torchrun --nproc-per-node 2 examples/gpt.py --precision bf16-mixed
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import accel

CONTEXT, WIDTH, HEADS, LAYERS = 64, 64, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, num_chars):
        super().__init__()
        self.chars, self.positions = nn.Embedding(num_chars, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_chars)

    def forward(self, chars):
        x = self.chars(chars) + self.positions.weight[: chars.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, chars, num_new, temperature=0.8):
        for _ in range(num_new):
            logits = self(chars[:, -CONTEXT:])[:, -1] / temperature
            chars = torch.cat([chars, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return chars


def save_curve(path, losses):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    figure.subplots().plot(losses)
    figure.axes[0].set(xlabel="step", ylabel="loss per character")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(args):
    accel.seed(0)
    text = "\n".join(topics.values())[: args.chars]
    alphabet = {char: number for number, char in enumerate(sorted(set(text)))}
    windows = torch.tensor([alphabet[char] for char in text]).unfold(0, CONTEXT + 1, CONTEXT)
    loader = DataLoader(windows, args.batch_size // accel.world_size(), shuffle=True, drop_last=True)
    model = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model, optimizer, loader = accel.setup(model, optimizer, loader, precision=args.precision)

    accel.print(f"{repr(model).partition('(')[0]}, {accel.world_size()} x {accel.device().type}")
    losses = []
    for epoch in range(args.epochs):
        for batch in tqdm(loader, f"epoch {epoch + 1}", leave=False, disable=not accel.is_main()):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(accel.all_reduce(loss, "mean").item())
        accel.print(f"epoch {epoch + 1}: loss {sum(losses[-len(loader) :]) / len(loader):.3f}")
    prompt = torch.tensor([[alphabet["\n"]]], device=accel.device())
    accel.print("".join(list(alphabet)[number] for number in model.generate(prompt, 300)[0]))
    if accel.is_main():
        save_curve(args.out, losses)
        print(f"\ncurve: {args.out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--chars", type=int, default=300_000, help="length of the text")
    parser.add_argument("--precision", default="auto", help="32-true or bf16-mixed; auto looks at ACCEL_PRECISION")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt.png"))
    main(parser.parse_args())
