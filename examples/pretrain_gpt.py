"""Pretrain a small GPT on the characters of a text file.

python examples/pretrain_gpt.py
torchrun --nproc-per-node 2 examples/pretrain_gpt.py --resume
ACCEL_BACKEND=deepspeed:3 torchrun --nproc-per-node 2 examples/pretrain_gpt.py
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import accel

CONTEXT = 64
WIDTH = 64
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, num_chars):
        super().__init__()
        self.chars = nn.Embedding(num_chars, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_chars)

    def forward(self, chars):
        positions = torch.arange(chars.shape[1], device=chars.device)
        x = self.chars(chars) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))

    @torch.no_grad()
    def generate(self, chars, num_new):
        for _ in range(num_new):
            logits = self(chars[:, -CONTEXT:])[:, -1]
            new = torch.multinomial((logits / 0.8).softmax(-1), 1)
            chars = torch.cat([chars, new], dim=1)
        return chars


def read_windows(path):
    """Return a text's characters, and its windows as character indices.

    The default text is Python's own manual.
    """
    if path is None:
        from pydoc_data.topics import topics

        text = "\n".join(topics.values())[:300_000]
    else:
        text = path.read_text()
    alphabet = sorted(set(text))
    index = {char: number for number, char in enumerate(alphabet)}
    numbers = torch.tensor([index[char] for char in text])
    return alphabet, numbers.unfold(0, CONTEXT + 1, CONTEXT)


def learning_rate(step, args):
    """Return the factor of the learning rate: warm-up, then cosine decay."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(progress, 1)))


def next_char_loss(model, batch):
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    losses = []
    for batch in loader:
        losses.append(next_char_loss(model, batch))
    model.train()
    return accel.all_reduce(torch.stack(losses).mean(), "mean").item()


def train(state, test_loader, args, run):
    """Train, and save a checkpoint every ``args.every`` steps."""
    model = state["model"]
    optimizer = state["optimizer"]
    begin = time.perf_counter()
    chars = 0
    while state["step"] < args.steps:
        for group in accel.accumulate(state["loader"], args.accumulate):
            for batch in group:
                loss = next_char_loss(model, batch)
                (loss / len(group)).backward()
                chars += args.batch_size * CONTEXT
            accel.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state["scheduler"].step()
            state["step"] += 1

            step = state["step"]
            if step % args.every == 0 or step == args.steps:
                speed = chars / (time.perf_counter() - begin)
                test_loss = evaluate(model, test_loader)
                accel.print(
                    f"step {step}: test loss {test_loss:.3f}, {speed:.0f} characters/s"
                )
                if run is not None:
                    run.log(
                        {"test_loss": test_loss, "speed": speed}, step=step
                    )
                accel.save(
                    state, args.out / f"step-{step}", keep=2, wait=False
                )
            if step == args.steps:
                break


def main(args):
    accel.seed(0)
    alphabet, windows = read_windows(args.text)
    split = len(windows) * 9 // 10
    loader = DataLoader(
        windows[:split], args.batch_size, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(windows[split:], args.batch_size, drop_last=True)
    model = GPT(len(alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # batch_size is the total over all processes.
    options = accel.LoaderOptions(split_batches=True, seed=0)
    model, optimizer, (loader, test_loader) = accel.setup(
        model,
        optimizer,
        [loader, test_loader],
        precision=args.precision,
        loader_options=options,
    )
    if args.compile:
        model.compile()
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate(step, args)
    )

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": loader,
        "step": 0,
    }
    last = accel.latest(args.out)
    if args.resume and last is not None:
        accel.load(last, state)
        accel.print(f"resumed at step {state['step']}")

    run = None
    if args.wandb and accel.is_main():
        import wandb

        run = wandb.init(project="gpt", dir=args.out, mode="offline")
    train(state, test_loader, args, run)
    if run is not None:
        run.finish()

    newline = torch.tensor([[alphabet.index("\n")]], device=accel.device())
    sample = model.generate(newline, 300)[0].tolist()
    accel.print("".join(alphabet[number] for number in sample))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text", type=Path, help="a text file (default: Python's manual)"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--warmup", type=int, default=20, help="steps of linear warm-up"
    )
    parser.add_argument(
        "--batch-size", type=int, default=32, help="total over processes"
    )
    parser.add_argument(
        "--accumulate", type=int, default=2, help="batches per step"
    )
    parser.add_argument(
        "--every", type=int, default=50, help="steps between checkpoints"
    )
    parser.add_argument(
        "--precision", default="auto", help="for example bf16-mixed"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--wandb",
        action="store_true",
        help="log to Weights & Biases, offline",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"))
    main(parser.parse_args())
