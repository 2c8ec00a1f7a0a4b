"""Checkpoints in an object store: a URL stands wherever a directory does.

torchrun --nproc-per-node 2 object_store.py --root s3://bucket/run      (needs s3fs, and the credentials of the store)
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(args):
    accel.seed(0)
    x = torch.randn(128, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    model, optimizer, loader = accel.setup(model, optimizer, loader)

    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "loss": 0.0}
    last = accel.latest(args.root)
    if last is not None:
        accel.load(last, state)
        accel.print(f"resumed from {last}: loss {state['loss']:.4f}")
    pending = None
    for epoch in range(state["epoch"], state["epoch"] + 3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        state |= {"epoch": epoch + 1, "loss": accel.all_reduce(loss, "mean").item()}
        pending = accel.save(state, f"{args.root}/epoch-{epoch}", keep=2, wait=False)  # uploads while the loop goes on
    pending.result()  # the last one is durable
    accel.print(f"saved {accel.latest(args.root)}: loss {state['loss']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", default=Path("runs/object_store").absolute().as_uri(), help="s3://, gs://, file://, ..."
    )
    main(parser.parse_args())
