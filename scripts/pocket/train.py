"""Trains the pocket GLM-5 and saves it as a checkpoint that Detour and transformers load.

    python scripts/pocket/train.py OUT --preset gpu --minutes 8 --workers 12    one H200
    python scripts/pocket/train.py OUT --preset cpu --minutes 120               one CPU core

Three phases, by share of the time: dense attention learns the tasks; the indexers learn to follow
it; all learn on with sparse attention. Killed, it goes on where it was. Time stands still while
the file of --pause-file exists.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import LONGEST_SUM, SHARES, Batches, Encoder, Pack
from markup import write
from model import PocketGlm, checkpoint_tensors
from muon import Muon
from presets import PRESETS, Preset
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

SAVED = 120.0  # seconds between checkpoints
BALANCE = 0.002
CHECKED = 16  # conversations of each kind
TEST_SEED = 1 << 40
OPEN = ("embed_tokens", "lm_head", "gate.weight")  # matrices that Adam trains, with all vectors


@dataclass
class Training:
    """What is kept when a run is killed."""

    model: PocketGlm
    optimizers: list[torch.optim.Optimizer]
    seconds: float = 0.0
    steps: int = 0

    def save(self, file: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "seconds": self.seconds,
            "steps": self.steps,
        }
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)

    def load(self, file: Path) -> None:
        state = torch.load(file, map_location=self.model.lm_head.weight.device)
        self.model.load_state_dict(state["model"])
        for one, saved in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(saved)
        self.seconds, self.steps = state["seconds"], state["steps"]


def begin(preset: Preset, device: str) -> Training:
    torch.manual_seed(0)
    model = PocketGlm(preset.config).to(device)
    named = dict(model.named_parameters())
    inner = [
        name for name, one in named.items() if one.dim() > 1 and not name.endswith(OPEN)
        and ".indexer." not in name and not any(part in name for part in OPEN)
    ]  # fmt: skip
    indexer = [name for name in named if ".indexer." in name]
    rest = [name for name in named if name not in {*inner, *indexer}]
    rate = preset.adam_rate
    adams = [
        torch.optim.AdamW([named[n] for n in some], speed, betas=(0.9, 0.98), weight_decay=0.01)
        for some, speed in ((rest, rate), (indexer, 3 * rate))
    ]
    training = Training(model, [Muon([named[n] for n in inner], preset.muon_rate), *adams])
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["first_lr"] = group["lr"]
    return training


def schedule(done: float, shares: tuple[float, float]) -> tuple[str, float, float]:
    """The phase at this share of the time, how far it is, and the learning rate's factor."""
    first, second = shares[0], shares[0] + shares[1]
    if done < first:
        part = done / first
        return "dense", part, min(1.0, (1 - part) / 0.5 * 0.85 + 0.15)
    if done < second:
        part = (done - first) / shares[1]
        return "distil", part, min(1.0, 1.2 - part)
    part = min(1.0, (done - second) / (1 - second))
    return "sparse", part, 0.2 * (1 - part)


def answer_loss(model: PocketGlm, pack: Pack, phase: str) -> tuple[Tensor, Tensor]:
    """What the tokens cost, and the indexers' loss."""
    device = model.lm_head.weight.device
    ids, weights = pack.ids.to(device), pack.weights.to(device).flatten()
    with torch.autocast(device.type, torch.bfloat16):
        hidden, index_loss = model(ids[:, :-1], phase)
        counted = weights.nonzero()[:, 0]
        logits = model.lm_head(hidden.flatten(0, 1)[counted])
    wanted, weights = ids[:, 1:].flatten()[counted], weights[counted]
    losses = F.cross_entropy(logits.float(), wanted, reduction="none")
    return (losses * weights).sum() / weights.sum(), index_loss


def learn(training: Training, pack: Pack, phase: str, factor: float) -> tuple[float, float]:
    """One step; returns both losses."""
    model = training.model
    for name, one in model.named_parameters():
        one.requires_grad_(phase != "distil" or ".indexer." in name)
    loss, index_loss = answer_loss(model, pack, phase)
    total = index_loss if phase == "distil" else loss + index_loss
    if total.requires_grad:  # short conversations teach the indexers nothing
        total.backward()
    for optimizer in training.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["first_lr"] * factor * min(1.0, (training.steps + 1) / 20)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if phase != "distil":
        for mixture in model.mixtures():
            mixture.balance(BALANCE)
    training.steps += 1
    return loss.item(), index_loss.item()


@torch.no_grad()
def accuracy(model: PocketGlm, encoder: Encoder, room: int, phase: str) -> str:
    """By kind, the share of conversations of which each token of each answer comes first, given
    those before it."""
    source, told = random.Random(TEST_SEED), []
    for kind in SHARES:
        length, right = LONGEST_SUM if kind == "sums" else room, []
        while len(right) < CHECKED:
            pack = encoder.pack(source, length, 8 * length, kind)
            device = model.lm_head.weight.device
            with torch.autocast(device.type, torch.bfloat16):
                hidden, _ = model(pack.ids[:, :-1].to(device), phase)
                best = model.lm_head(hidden).argmax(-1).cpu()
            right += ((best == pack.ids[:, 1:]) | (pack.weights < 1)).all(-1).tolist()
        told.append(f"{kind} {100 * sum(right) / len(right):.0f}%")
    return ", ".join(told)


def export(model: PocketGlm, folder: Path) -> None:
    text = json.dumps(model.config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    tensors = checkpoint_tensors(model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def run(folder: Path, preset: Preset, device: str, options: argparse.Namespace) -> None:
    file, kept = str(folder / "tokenizer.json"), folder / "training.pt"
    training = begin(preset, device)
    if kept.exists():
        training.load(kept)
    else:
        write(folder)
    encoder = Encoder(Tokenizer.from_file(file))
    batches = Batches(file, preset.rooms, preset.batch, training.steps)
    loader = iter(DataLoader(batches, batch_size=None, num_workers=options.workers))
    whole, told, saved = 60 * options.minutes, training.seconds, training.seconds
    while training.seconds < whole:
        while options.pause_file and Path(options.pause_file).exists():
            time.sleep(1)
        started = time.monotonic()
        phase, part, factor = schedule(training.seconds / whole, preset.shares)
        batches.reach.value = min(1.0, part / 0.5) if phase == "dense" else 1.0
        losses = learn(training, next(loader), phase, factor)
        training.seconds += time.monotonic() - started
        if training.seconds - told > options.told:
            told = training.seconds
            seen = accuracy(training.model, encoder, options.room, phase)
            index = f", index {losses[1]:.3f}" if phase != "dense" else ""
            print(
                f"{told / 60:5.1f} min, step {training.steps}, {phase} {100 * part:.0f}%: "
                f"loss {losses[0]:.3f}{index}; {seen}",
                flush=True,
            )
        if training.seconds - saved > SAVED:
            saved = training.seconds
            training.save(kept)
            export(training.model, folder)
    training.save(kept)
    export(training.model, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--pause-file", default="")
    parser.add_argument("--told", type=float, default=120.0, help="seconds between lines")
    parser.add_argument("--room", type=int, default=256, help="tokens of what it is tested on")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run(options.folder, PRESETS[options.preset], device, options)


if __name__ == "__main__":
    main()
