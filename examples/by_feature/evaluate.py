"""Evaluate a checkpoint on all ranks. Each sample counts once."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def save_weights(net, path):
    """Save a model that classifies every sample correctly."""
    with torch.no_grad():
        net.weight[0] = -1
        net.weight[1] = 1
        net.bias.zero_()
    accel.save({"model": net}, path)
    nn.init.normal_(net.weight)


def main(args):
    accel.seed(0)
    # 101 samples can't be split evenly, so accel pads the last batch.
    x = torch.randn(101, 8)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    net = nn.Linear(8, 2)
    save_weights(net, args.out)

    loader = DataLoader(data, batch_size=8)
    model, _, loader = accel.setup(net, dataloaders=loader)
    accel.load(args.out, {"model": model})
    model.eval()
    correct = 0
    count = 0
    with torch.no_grad():
        for x, y in loader:
            hits = accel.gather_for_metrics(model(x).argmax(1) == y)
            correct += hits.sum().item()
            count += len(hits)
    accel.print(
        f"{correct} of {count} correct on {accel.world_size()} processes"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/evaluate")
    main(parser.parse_args())
