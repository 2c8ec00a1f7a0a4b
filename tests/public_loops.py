"""Loops that other people published, with the lines of accel in them, on every backend: the table of docs/migrating.md.

    python -m tests.public_loops SOURCES [--only NAME ...] [--on BACKEND ...] [--table FILE]

SOURCES is a folder with checkouts of pytorch/examples, karpathy/nanoGPT and karpathy/minGPT, named ``examples``, ``nanoGPT``
and ``minGPT``. Nothing of theirs is here: a loop is given by edits, "after (or in the place of) the line that has X, write Y".
Edits are counted where they are accel's; what shrinks a run (fewer steps, tiny data in the place of downloads) is not.
Each loop runs in one process, then on two CPU processes for each backend, which together have its batches. Weights are compared
by the distance between them, over the distance that training has moved them.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
from torch import nn

import accel
from tests import preload  # noqa: F401
from tests.programs import by_hand, free_port

BACKENDS = ("ddp", "sharded", "fsdp", "deepspeed:1", "deepspeed:2", "deepspeed:3")
SECONDS = 240
#: Of the way that training has moved the weights.
CLOSE = 0.01


Edit = tuple[str, str]


@dataclass(frozen=True)
class Loop:
    """A program and its edits.

    Args:
        path: a file in SOURCES.
        lines: the lines of accel, each after the line with a text, or instead of it if the text begins with "=".
        args: the arguments; ``{batch}`` becomes the batch of each process, twice as large in one process alone.
        small: edits that make the run short.
        files: writes the data into the working directory.
        noise: each process draws its own random numbers or normalizes its own batch, so backends are compared with ddp.
        eps: of AdamW; the default makes steps out of gradients that are zero but for rounding.
        edited: the file with the edits, if it isn't the program.
        more: lines that a backend needs in addition.
        note: the mark of the page's note on those backends.
    """

    path: str
    lines: Sequence[Edit]
    args: str = ""
    small: Sequence[Edit] = ()
    files: Callable[[], None] = lambda: None
    noise: bool = False
    eps: float = 1e-8
    edited: str = ""
    more: Sequence[Edit] = ()
    note: str = ""


def text_files() -> None:
    """A corpus of a few words."""
    animals = ["the", "cat", "sat", "on", "a", "mat", "and", "ran", "to", "see", "dogs"]
    words = np.random.default_rng(0).choice(animals, 400)
    for name in ("train", "valid", "test"):
        Path(f"{name}.txt").write_text(" ".join(words) + "\n")
    Path("input.txt").write_text("O God, O God! " + " ".join(words))


def tokens() -> None:
    """What nanoGPT's prepare.py writes."""
    folder = Path("data/tiny")
    folder.mkdir(parents=True)
    for name in ("train", "val"):
        np.random.default_rng(0).integers(0, 64, 2000).astype(np.uint16).tofile(folder / f"{name}.bin")


def cora() -> None:
    """A small graph in the form of the Cora data set."""
    folder, draw = Path("cora"), np.random.default_rng(0)
    folder.mkdir()
    rows = [f"{n} {' '.join(map(str, draw.integers(0, 2, 12)))} {'abc'[n % 3]}" for n in range(60)]
    (folder / "cora.content").write_text("\n".join(rows))
    pairs = {(int(a), int(b)) for a, b in draw.integers(0, 60, (120, 2))}
    (folder / "cora.cites").write_text("\n".join(f"{a} {b}" for a, b in sorted(pairs)))


def sine() -> None:
    """What generate_sine_wave.py writes, shorter."""
    torch.save(np.sin(np.arange(20.0) / 3 + np.arange(8.0)[:, None]), "traindata.pt")


def style() -> None:
    """An image, and folders for what is saved."""
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3)).astype("uint8")).save("style.png")


IMPORT = ("import torch", "import accel")
BATCH = "--batch-size {batch}"


def setup_after(text: str, loader: str = "", model: str = "model", optimizer: str = "optimizer") -> list[Edit]:
    """Return the two edits of most programs."""
    given = ", ".join(filter(None, (model, optimizer, loader)))
    return [IMPORT, (text, f"{model}, {optimizer}, {loader or '_'} = accel.setup({given})")]


def example(name: str, text: str, args: str = "", loader: str = "", model: str = "model", **options: Any) -> Loop:
    """Return a program of pytorch/examples with the two edits."""
    path = name if name.endswith(".py") else f"{name}/main.py"
    return Loop(f"examples/{path}", setup_after(text, loader, model), args, **options)


MNIST = f"--save-model --epochs 2 --log-interval 1 {BATCH}"
DCGAN = "--dataset fake --workers 0 --niter 1 --ngf 2 --ndf 2 --nz 4 --manualSeed 1 --batchSize {batch}"
STYLE = "train --dataset . --style-image style.png --save-model-dir saved --checkpoint-model-dir kept"
STYLE += f" --checkpoint-interval 2 --epochs 1 {BATCH}"
LANGUAGE = "--data . --emsize 8 --nhid 8 --nlayers 1 --epochs 2 --bptt 100 --batch_size 2 --dropout 0 --lr 0.1"
LANGUAGE += " --use-optimizer"
EPISODES = [("=for i_episode in count(1)", "for i_episode in range(1, 4):")]
CORA = [
    ("=with requests.get(", "if False:"),
    ("=idx_test, idx_val", "idx_test, idx_val, idx_train = idx[:20], idx[20:40], idx[40:]"),
]
NANOGPT = "--dataset=tiny --device=cpu --dtype=float32 --compile=False --eval_iters=1 --eval_interval=2 --block_size=8"
NANOGPT += " --batch_size=4 --n_layer=2 --n_head=2 --n_embd=16 --max_iters=4 --warmup_iters=1"
NANOGPT += " --gradient_accumulation_steps=2 --learning_rate=0.01"
SMALL_GPT = "--trainer.max_iters=3 --trainer.batch_size={batch} --trainer.num_workers=0 --model.model_type=None"
SMALL_GPT += " --model.n_layer=2 --model.n_head=2 --model.n_embd=16 --model.embd_pdrop=0.0 --model.resid_pdrop=0.0"
SMALL_GPT += " --model.attn_pdrop=0.0"
#: An order of samples that doesn't depend on the number of processes.
IN_ORDER = "=sampler=torch.utils.data.RandomSampler", "sampler=torch.utils.data.SequentialSampler(self.train_dataset),"
PAIRS = [
    ("=from data import", "from torchvision import datasets"),
    ("=train_set = get_training_set", "train_set = datasets.Pairs()"),
    ("=test_set = get_test_set", "test_set = datasets.Pairs()"),
]
WITH_OPTIMIZER = [
    ("fc, _, _ =", "optimizer = torch.optim.SGD(fc.parameters(), 0.1)\nfc, optimizer, _ = accel.setup(fc, optimizer)"),
    ("=fc, _, _ =", "# with an optimizer:"),
    ("=for param in fc.parameters()", "optimizer.step()"),
    ("=param.data.add_", ""),
    ("=print('Loss:", "fc = accel.teardown(fc)"),
]
FORWARD = "self.layers = self.layers + [", "self.layers[-1], *_ = accel.setup(self.layers[-1], self.layers[-1].opt)"
SHORT_SINE = [
    ("=data = torch.load(", "data = torch.load('traindata.pt', weights_only=False)"),
    ("=future = 1000", "future = 4"),
    ("lr=0.8", "plt.savefig = lambda *a, **k: None"),
]
ADAM = [("=optimizer = optim.LBFGS", "optimizer = optim.Adam(seq.parameters(), lr=0.01)")]
GAN = setup_after("optimizerD = optim.Adam", "dataloader", "netD", "optimizerD")
GAN += setup_after("optimizerG = optim.Adam", "", "netG", "optimizerG")[1:]
ON_CPU = [("=device = 0", 'device = "cpu"'), ("=train_set = MyTrainDataset", "train_set = MyTrainDataset(64)")]


def language_model(args: str, **options: Any) -> Loop:
    return example("word_language_model", "optimizer = torch.optim.AdamW", args, files=text_files, **options)


def min_gpt(program: str, args: str, **options: Any) -> Loop:
    lines, edited = setup_after("model.train()", "train_loader", optimizer="self.optimizer"), "minGPT/mingpt/trainer.py"
    return Loop(program, lines, f"{SMALL_GPT} {args}", [IN_ORDER], eps=1e-3, edited=edited, **options)


ADADELTA = "optimizer = optim.Adadelta", MNIST, "train_loader"
LOOPS: dict[str, Loop] = {
    "mnist": example("mnist", *ADADELTA),
    "mnist_rnn": example("mnist_rnn", *ADADELTA, noise=True),
    "siamese_network": example("siamese_network", *ADADELTA, noise=True),
    "mnist_forward_forward": Loop(
        "examples/mnist_forward_forward/main.py",
        [IMPORT, FORWARD],
        "--epochs 2 --train_size 16 --test_size 16 --save-model",
        note="a",
    ),
    "vae": example("vae", "optimizer = optim.Adam", f"--epochs 2 {BATCH}", "train_loader", noise=True),
    "dcgan": Loop("examples/dcgan/main.py", GAN, DCGAN, noise=True),
    "imagenet": example(
        "imagenet",
        "val_loader = torch.utils.data.DataLoader",
        f"--dummy --epochs 2 --workers 0 --seed 1 {BATCH}",
        "train_loader",
        noise=True,
    ),
    "super_resolution": example(
        "super_resolution",
        "optimizer = optim.Adam",
        "--upscale_factor 2 --threads 0 --batchSize {batch}",
        "training_data_loader",
        small=PAIRS,
        noise=True,
    ),
    "fast_neural_style": example(
        "fast_neural_style/neural_style/neural_style.py",
        "optimizer = Adam",
        STYLE,
        "train_loader",
        "transformer",
        files=style,
    ),
    "word_language_model, LSTM": language_model(LANGUAGE),
    "word_language_model, Transformer": language_model(f"{LANGUAGE} --model Transformer", eps=1e-3),
    "regression": Loop(
        "examples/regression/main.py",
        [IMPORT, ("fc = torch.nn.Linear", "fc, _, _ = accel.setup(fc)")],
        small=[("=for batch_idx in count(1)", "for batch_idx in range(1, 6):")],
        more=WITH_OPTIMIZER,
        note="b",
    ),
    "time_sequence_prediction": example(
        "time_sequence_prediction/train.py",
        "optimizer = optim.LBFGS",
        "--steps 2",
        model="seq",
        small=SHORT_SINE,
        files=sine,
        more=ADAM,
        note="c",
    ),
    "reinforce": example(
        "reinforcement_learning/reinforce.py", "optimizer = optim.Adam", model="policy", small=EPISODES
    ),
    "actor_critic": example("reinforcement_learning/actor_critic.py", "optimizer = optim.Adam", small=EPISODES),
    "gcn": example("gcn", "optimizer = Adam(", "--epochs 3", model="gcn", small=CORA, files=cora),
    "gat": example("gat", "optimizer = Adam(", "--epochs 3", model="gat_net", small=CORA[1:], files=cora),
    "ddp-tutorial-series, single_gpu": example(
        "distributed/ddp-tutorial-series/single_gpu.py",
        "train_data = prepare_dataloader",
        "2 1 --batch_size {batch}",
        "train_data",
        small=ON_CPU,
    ),
    "nanoGPT": Loop(
        "nanoGPT/train.py",
        [*setup_after("checkpoint = None"), ("=ddp = int(os.environ", "ddp = False")],
        NANOGPT,
        files=tokens,
        eps=1e-3,
    ),
    "minGPT, chargpt": min_gpt("minGPT/projects/chargpt/chargpt.py", "--data.block_size=8", files=text_files),
    "minGPT, adder": min_gpt("minGPT/projects/adder/adder.py", "--data.ndigit=1"),
}

# -- what is not installed or would be downloaded --------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    """Images in the place of a data set; whatever a program asks of them."""

    def __init__(self, *args: Any, train: bool = True, image_size: Any = (1, 28, 28), **kwargs: Any) -> None:
        draw = torch.Generator().manual_seed(int(train))
        self.flat = any("Lambda" in type(t).__name__ for t in getattr(kwargs.get("transform"), "steps", ()))
        self.data = torch.rand(16, *image_size, generator=draw)
        self.targets = torch.arange(16) % 4 if image_size[-1] == 28 else torch.arange(16) % 10

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image = self.data[index].flatten() if self.flat else self.data[index]
        return image, int(self.targets[index])


class Digits(Images):
    """As MNIST, whose images have no channels until they are read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data, self.targets = self.data.repeat(2, 1, 1, 1)[:32, 0], torch.arange(32) % 10

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image if self.flat else image[None], label


class Pairs(Images):
    """Small images, and large ones."""

    def __init__(self) -> None:
        super().__init__(image_size=(1, 8, 8))

    def __getitem__(self, index: int) -> Any:
        return self.data[index], self.data[index].repeat(1, 2, 2)


class ResNet(nn.Module):
    """As torchvision's is built, in small."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()
        self.layer1 = nn.Sequential(nn.Conv2d(64, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 1000)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def vgg16(*args: Any, **kwargs: Any) -> Any:
    """As many layers as torchvision's has."""
    layers = [nn.Conv2d(3, 3, 3, padding=1) if i % 2 == 0 else nn.ReLU() for i in range(23)]
    return types.SimpleNamespace(features=nn.Sequential(*layers))


class Transform:
    """Keeps what it was made with, and does nothing."""

    def __init__(self, *steps: Any, **kwargs: Any) -> None:
        self.steps = steps[0] if steps and isinstance(steps[0], list) else []

    def __call__(self, image: Any) -> Any:
        """Return an image as a tensor."""
        if isinstance(image, torch.Tensor):
            return image
        return torch.from_numpy(np.array(image)).float().movedim(-1, 0) / 255


class Cart:
    """An environment with the interface of CartPole, of a few steps."""

    spec = types.SimpleNamespace(reward_threshold=1e9)

    def reset(self, seed: int | None = None) -> Any:
        self.steps = 0
        return np.ones(4, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        state = np.array([action, self.steps, -1, 1], np.float32) / 3
        return state, 1.0 + action, self.steps == 5, False, {}


def stand_ins() -> None:
    """Put small modules in the places of torchvision, gymnasium and requests."""
    transforms = ("Compose", "ToTensor", "Normalize", "Resize", "CenterCrop", "Lambda")
    transforms += ("RandomResizedCrop", "RandomHorizontalFlip")
    contents: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {
            "MNIST": Digits,
            "FakeData": lambda *a, **k: Images(image_size=(3, 64, 64)),
            "ImageFolder": lambda *a, **k: Images(image_size=(3, 16, 16)),
            "Pairs": Pairs,
        },
        "torchvision.transforms": {name: type(name, (Transform,), {}) for name in transforms},
        "torchvision.models": {"resnet18": ResNet, "vgg16": vgg16, "VGG16_Weights": mock.Mock()},
        "torchvision.utils": {"save_image": lambda *a, **k: None},
        "gymnasium": {"make": lambda *a, **k: Cart()},
        "requests": {},
    }
    for name, content in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        vars(module).update(content)
        package, _, last = name.partition(".")
        if last:
            setattr(sys.modules[package], last, module)


# -- a run, in a process of its own ----------------------------------------------------------------------------------------


def edited(source: str, edits: Iterable[Edit]) -> str:
    """The source with each edit at the first line that has its text, indented like that line."""
    lines = source.split("\n")
    for text, new in edits:
        instead, text = text.startswith("="), text.removeprefix("=")
        at = next((i for i, line in enumerate(lines) if text in line), None)
        if at is None:
            raise ValueError(f"no line has {text!r}: these edits are for other sources")
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        end = at + 1
        while not instead and (statement := "\n".join(lines[at:end])).count("(") > statement.count(")"):
            end += 1
        lines[at if instead else end : end] = [indent + line for line in new.split("\n")]
    return "\n".join(lines)


def perform(name: str, sources: Path, more: bool, folder: Path, out: Path) -> NoReturn:
    """Run a loop in a folder of its own, then end; what its models began with and are, or what went wrong, is in ``out``."""
    loop, handles, begun = LOOPS[name], list[Any](), list[Any]()
    (folder / "results").mkdir(parents=True)
    os.chdir(folder)
    with open("log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    stand_ins()
    torch.manual_seed(0)
    random.seed(0)
    rate, betas, _, *others = torch.optim.AdamW.__init__.__defaults__
    torch.optim.AdamW.__init__.__defaults__ = (rate, betas, loop.eps, *others)
    vars(nn.functional)["dropout"] = lambda x, *args, **kwargs: x  # each process would draw its own
    real = accel.setup

    def setup(model: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append({n: t.detach().clone() for n, t in model.state_dict().items()})
        made = real(model, *args, **kwargs)
        handles.append((made.model, model))
        return made

    vars(accel)["setup"] = setup
    loop.files()
    problem, states = "", []
    try:
        execute(loop, sources, [*loop.small, *loop.lines, *(loop.more if more else ())])
        states = [{n: t.clone() for n, t in whole_state(*pair).items()} for pair in handles]
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    torch.save({"error": problem, "begun": begun, "states": states}, out)
    os._exit(bool(problem))


def execute(loop: Loop, sources: Path, edits: Sequence[Edit]) -> None:
    """Run the edited program as the main module."""
    program, place = sources / loop.path, sources / (loop.edited or loop.path)
    main = types.ModuleType("__main__")
    vars(main).update(__file__=str(program))
    sys.modules["__main__"] = main
    sys.argv = [str(program), *loop.args.replace("{batch}", "4" if accel.world_size() > 1 else "8").split()]
    sys.path[:0] = [str(program.parent), str(sources / "minGPT")]
    if (program.parent / "configurator.py").exists():  # which nanoGPT reads in the working directory
        os.symlink(program.parent / "configurator.py", "configurator.py")
    text = edited(place.read_text(), edits)
    if place != program:
        name = ".".join(place.relative_to(sources).with_suffix("").parts[1:])
        sys.modules[name] = types.ModuleType(name)
        exec(compile(text, place, "exec"), vars(sys.modules[name]))
        text = program.read_text()
    exec(compile(text, program, "exec"), vars(main))


def whole_state(handle: Any, raw: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model that the loop may have torn down."""
    try:
        return accel.full_state_dict(handle)
    except accel.AccelError:
        return raw.state_dict()


# -- all runs, and the table -----------------------------------------------------------------------------------------------


def run(name: str, sources: Path, backend: str, world: int, more: bool = False) -> Any:
    """What rank 0 of a run has written, or the first error."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.pt") for rank in range(world)]
        children, port = [], free_port()
        settings = {"LOCAL_WORLD_SIZE": str(world), "ACCEL_BACKEND": backend, "ACCEL_DEVICES": "cpu"}
        for rank, out in enumerate(outs):
            if not (child := os.fork()):  # what is imported stays so
                os.environ.update(by_hand(rank, world, port) | settings, LOCAL_RANK=str(rank))
                perform(name, sources, more, Path(folder, f"rank{rank}"), out)
            children.append(child)
        limit = time.monotonic() + SECONDS
        while children and time.monotonic() < limit:
            children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
            time.sleep(0.05)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        found = [torch.load(out) if out.exists() else {"error": "no result"} for out in outs]
        if any(one["error"] for one in found) and os.environ.get("VERBOSE"):
            print(Path(folder, "rank0", "log").read_text()[-6000:], file=sys.stderr)
    return next((one for one in found if one["error"]), found[0])


def distance(one: Sequence[Any], other: Sequence[Any], begun: Sequence[Any]) -> float:
    """Between the weights of two runs, over the way from where they began."""

    def flat(states: Sequence[Any]) -> torch.Tensor:
        tensors = [t for state in states for _, t in sorted(state.items()) if t.is_floating_point()]
        return torch.cat([t.double().flatten() for t in tensors])

    return float((flat(one) - flat(other)).norm() / (flat(one) - flat(begun)).norm().clamp_min(1e-30))


def row(name: str, sources: Path, backends: Sequence[str]) -> list[str]:
    """A line of the table; errors are printed beside it."""
    loop = LOOPS[name]
    cells, failed = results(name, sources, ["single", *backends])
    for backend in failed:
        print(f"{name} on {backend}: {cells[backend]}", file=sys.stderr, flush=True)
    again, still = results(name, sources, ["single", *failed], more=True) if failed and loop.more else ({}, failed)
    for backend in failed:
        lines = f"{len(loop.more)} more" if backend in again and backend not in still else "refused"
        cells[backend] = f"{lines} ({loop.note})"
    shared = sum(other.path == loop.path for other in LOOPS.values()) > 1
    title = f"`{loop.path}`" + (f", {name.partition(', ')[2]}" if shared else "")
    return [title, str(sum(text.count("\n") + 1 for _, text in loop.lines)), *(cells[b] for b in backends)]


def results(name: str, sources: Path, backends: Sequence[str], more: bool = False) -> tuple[dict[str, str], list[str]]:
    """What becomes of a loop on each backend, the first of which is one process; on which it fails."""
    found = {b: run(name, sources, b, 1 if b == "single" else 2, more) for b in backends}
    failed = [b for b in backends if found[b]["error"]]
    reference = [b for b in backends if b not in failed][1 if LOOPS[name].noise else 0 :][:1]
    cells = {b: " ".join(found[b]["error"].split())[:160] if b in failed else "runs" for b in backends}
    for b in backends:
        if b not in failed and b != "single" and reference and b not in reference:
            apart = distance(found[b]["states"], found[reference[0]]["states"], found[b]["begun"])
            cells[b] = "equal" if apart < CLOSE else f"differs by {apart:.2g}"
    return cells, failed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--only", nargs="*", default=list(LOOPS), metavar="NAME")
    parser.add_argument("--on", nargs="*", default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--table", type=Path, help="write it here too")
    options = parser.parse_args()
    sources = options.sources.resolve()
    torch.set_num_threads(1)
    head = ["loop", "lines", *(f"`{backend}`" for backend in options.on)]
    table = [head, ["---"] * len(head)]
    for name in options.only:
        table.append(row(name, sources, options.on))
        print(" | ".join(table[-1]), flush=True)
    everywhere = sum({"equal", "runs"}.issuperset(cells[2:]) for cells in table[2:])
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
    text += f"\n{everywhere} of {len(options.only)} loops run on every backend with these lines.\n"
    print(text.splitlines()[-1])
    if options.table:
        options.table.write_text(text)


if __name__ == "__main__":
    main()
