"""Evaluation only: a checkpoint is loaded and measured on all processes, each sample once."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accel


def main(args):
    accel.seed(0)
    x = torch.randn(101, 8)  # no multiple of the batch size: the padding of the last batch is dropped again
    data = TensorDataset(x, (x.sum(1) > 0).long())
    net = nn.Linear(8, 2)
    if args.checkpoint is None:  # none is given: make one
        args.checkpoint = args.out
        with torch.no_grad():
            net.weight.copy_(torch.stack([-torch.ones(8), torch.ones(8)]))
            net.bias.zero_()
        accel.save({"model": net}, args.checkpoint)
        nn.init.normal_(net.weight)

    # No optimizer: any backend will do, also "single", with which nothing is exchanged.
    model, _, loader = accel.setup(net, dataloaders=DataLoader(data, batch_size=8))
    accel.load(args.checkpoint, {"model": model})
    model.eval()
    predictions, labels = [], []
    with torch.no_grad():
        for x, y in loader:
            predicted, expected = accel.gather_for_metrics((model(x).argmax(1), y))
            predictions.append(predicted)
            labels.append(expected)
    predictions, labels = torch.cat(predictions), torch.cat(labels)  # whole, and in the order of the dataset
    right = (predictions == labels).sum().item()
    accel.print(f"right {right} of {len(labels)} on {accel.world_size()} processes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", help="a directory that accel.save wrote")
    parser.add_argument("--out", default="runs/evaluate", help="where one is written if none is given")
    main(parser.parse_args())
