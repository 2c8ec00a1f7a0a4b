"""Fine-tune a transformers model with LoRA adapters from peft.

The example creates a tiny model, so it runs without a download. For a real
model, use ``AutoModelForCausalLM.from_pretrained(name)`` and its tokenizer.

torchrun --nproc-per-node 2 examples/finetune.py
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import accel

END = 0
PROMPTS = ["1, 2, 3, ", "4, 5, 6, ", "7, 8, 9, "]


def build_model():
    torch.manual_seed(0)  # the same base model on every rank and in every run
    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=END,
        eos_token_id=END,
        tie_word_embeddings=False,
    )
    adapters = LoraConfig(
        r=8,
        lora_alpha=32,
        target_modules=["c_attn", "c_fc"],
        modules_to_save=["lm_head"],
        fan_in_fan_out=True,
    )
    return get_peft_model(GPT2LMHeadModel(config), adapters)


def build_lines():
    """Return lines that count upwards, as lists of character codes."""
    lines = []
    for start in range(1, 10):
        for length in range(3, 11):
            numbers = range(start, start + length)
            text = ", ".join(str(number) for number in numbers)
            lines.append([ord(char) for char in text] + [END])
    return lines


def pad(lines):
    """Return input ids and labels. The labels of padding are -100."""
    longest = max(len(line) for line in lines)
    ids = torch.full((len(lines), longest), END)
    labels = torch.full((len(lines), longest), -100)
    for row, line in enumerate(lines):
        ids[row, : len(line)] = torch.tensor(line)
        labels[row, : len(line)] = torch.tensor(line)
    return ids, labels


def is_adapter(name):
    return "lora_" in name or "modules_to_save" in name


def main(args):
    model = build_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(
        build_lines(), batch_size=8, shuffle=True, collate_fn=pad
    )
    model, optimizer, loader = accel.setup(model, optimizer, loader)

    for epoch in range(args.epochs):
        for ids, labels in loader:
            optimizer.zero_grad()
            logits = model(input_ids=ids).logits[:, :-1]
            labels = labels[:, 1:]
            losses = F.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            # The mean over ranks isn't the mean over tokens, so sum first.
            loss = accel.mean_loss(losses, (labels != -100).sum())
            loss.backward()
            optimizer.step()
        mean = accel.all_reduce(loss.detach(), "mean").item()
        accel.print(f"epoch {epoch}: loss {mean:.4f}")

    model.eval()
    # Each rank completes its share of the prompts. FSDP and ZeRO-3 communicate
    # in a forward pass, so every rank needs the same number (pad=True).
    completed = []
    for prompt in accel.split(PROMPTS, pad=True):
        ids = torch.tensor(
            [[ord(char) for char in prompt]], device=accel.device()
        )
        mask = torch.ones_like(ids)
        output = model.generate(
            ids,
            attention_mask=mask,
            pad_token_id=END,
            min_new_tokens=6,
            max_new_tokens=6,
        )
        completed.append(
            "".join(chr(number) for number in output[0].tolist())
        )
    completed = accel.all_gather(completed, objects=True)[: len(PROMPTS)]
    accel.print(*completed, sep="\n")

    full = accel.full_state_dict(model)  # call it on every rank
    if accel.is_main():
        accel.unwrap(model).save_pretrained(
            args.out / "adapter", state_dict=full
        )

    # Or save the adapters with accel, and load them into a new base model.
    accel.save({"model": model}, args.out / "checkpoint", filter=is_adapter)
    fresh = accel.setup(build_model()).model.eval()
    accel.load(args.out / "checkpoint", {"model": fresh}, strict=False)
    with torch.no_grad():
        difference = fresh(input_ids=ids).logits - model(input_ids=ids).logits
    accel.print(
        f"difference after loading {difference.abs().max().item():.1e}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    main(parser.parse_args())
