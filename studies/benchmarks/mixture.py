"""Weights of text sources for a tiny GPT: `Penalty()` without options, next to plain training.

    .venv/bin/python studies/benchmarks/mixture.py --page docs/results/mixture.md

Five sources of bytes; the validation text is of two of them, and a third is shuffled bytes. g is the mean loss of a
batch that has as many sequences of each source, weighted by softmax(u); f is the loss on validation text. v is a
causal transformer of 2 layers. The texts are in `$BILEVEL_DATA/text`; `--synthetic` needs none.
"""

from __future__ import annotations

import argparse
import lzma
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bilevel import Penalty, Problem, Solution, solve

SOURCES, TARGETS = ("c", "rfc", "reviews", "math_problems"), 2
NOISE = "shuffled bytes"
# Sequences of each source in a batch of g, and of both targets in a batch of f.
EACH, BATCH = 4, 20
# Bytes of a source to train on, and of each target to validate and to test on.
TRAIN, VALID, TEST = 1_000_000, 100_000, 50_000


class Block(nn.Module):
    """Causal attention and two linear maps. Attention is written out: the fused one has no second derivative."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        many, length, width = x.shape
        qkv = self.qkv(self.before(x)).reshape(many, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        score = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        x = x + self.out((score.softmax(-1) @ v).transpose(1, 2).reshape(many, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class GPT(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, *, symbols: int = 256, width: int = 64, layers: int = 2, context: int = 64) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(symbols, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.end, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for leaf in self.parameters():
            if leaf.ndim > 1:
                nn.init.normal_(leaf, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.places.weight[: x.shape[1]]
        return self.head(self.end(self.blocks(x)))


def losses(model: nn.Module, sequences: Tensor) -> Tensor:
    """Return the mean loss of each sequence, in nats a byte."""
    scores = model(sequences[:, :-1])
    return functional.cross_entropy(scores.mT, sequences[:, 1:], reduction="none").mean(1)


class Draws:
    """Batches without an end, the same in every pass of the same seed: `each` random sequences of each text."""

    def __init__(self, texts: Sequence[Tensor], each: int, context: int, seed: int, count: int = 200) -> None:
        self.texts, self.each, self.context, self.seed, self.count = texts, each, context, seed, count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        window = torch.arange(self.context + 1)
        for _ in range(self.count):
            starts = [torch.randint(len(t) - self.context - 1, (self.each, 1), generator=draw) for t in self.texts]
            yield torch.cat([t[s + window] for t, s in zip(self.texts, starts, strict=True)])


@dataclass
class Mixture:
    """Texts to train on, of which the first two also have validation and test texts."""

    names: tuple[str, ...]
    train: list[Tensor]
    valid: list[Tensor]
    test: list[Tensor]
    symbols: int
    context: int
    width: int
    each: int = EACH

    def problem(self) -> Problem:
        def weighted(u: Tensor, model: nn.Module, batch: Tensor) -> Tensor:
            return (u.softmax(0) * losses(model, batch).reshape(len(u), -1).mean(1)).sum()

        return Problem(lambda u, model, batch: losses(model, batch).mean(), weighted)

    def data(self, seed: int, count: int) -> tuple[Draws, Draws]:
        """Return `count` batches each of f and of g."""
        above = Draws(self.valid, BATCH // TARGETS, self.context, 2 * seed + 1, count)
        return above, Draws(self.train, self.each, self.context, 2 * seed, count)

    def model(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(symbols=self.symbols, width=self.width, context=self.context)

    def solve(self, steps: int, seed: int) -> tuple[Tensor, GPT, Solution[Tensor, GPT]]:
        """Return the weights, the model and the solution of `Penalty()`."""
        u, model = torch.zeros(len(self.train), requires_grad=True), self.model(seed)
        found = solve(
            self.problem(), Penalty(), u, model, self.data(seed, steps), max_steps=steps, seed=seed, hypergradient=False
        )
        return u.detach().softmax(0), model, found

    def plain(self, steps: int, seed: int, weights: Tensor, rates: Sequence[float]) -> GPT:
        """Return a model after Adam on g alone, with fixed weights and these rates."""
        u, model, g = weights.log(), self.model(seed), self.problem().lower
        optimizer = torch.optim.Adam(model.parameters())
        for batch, rate in zip(self.data(seed, steps)[1], rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            g(u, model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model

    @torch.no_grad()
    def g(self, model: GPT, weights: Tensor) -> float:
        """Return g in bits a byte, on batches of the training texts that no run sees."""
        some = [self.problem().lower(weights.log(), model, b) for b in Draws(self.train, 20, self.context, 999, 10)]
        return float(torch.stack(some).mean()) / math.log(2)

    @torch.no_grad()
    def tested(self, model: GPT) -> float:
        """Return the loss on test texts of the targets in bits a byte."""
        some = [losses(model, b).mean() for b in Draws(self.test, 50, self.context, 998, 10)]
        return float(torch.stack(some).mean()) / math.log(2)


def texts(context: int = 64, width: int = 64) -> Mixture:
    """Return the mixture of four texts and one of shuffled bytes."""
    folder = Path(os.environ.get("BILEVEL_DATA", "data")) / "text"
    parts = []
    for name in SOURCES:
        raw = lzma.decompress((folder / f"{name}.txt.xz").read_bytes())[: TRAIN + VALID + TEST]
        parts.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8).long())
    train = [part[:TRAIN] for part in parts]
    shuffled = torch.cat(train)[torch.randperm(len(SOURCES) * TRAIN, generator=torch.Generator().manual_seed(0))]
    held = [part[TRAIN:].split([VALID, TEST]) for part in parts[:TARGETS]]
    valid, test = ([pair[i] for pair in held] for i in (0, 1))
    return Mixture((*SOURCES, NOISE), [*train, shuffled[:TRAIN]], valid, test, 256, context, width)


def synthetic(symbols: int = 16, length: int = 20_000, context: int = 16, width: int = 32) -> Mixture:
    """Return a mixture of four Markov chains and noise. The first two chains are the targets."""
    draw = torch.Generator().manual_seed(0)

    def chain(steps: Tensor) -> Tensor:
        """A text in which symbol s is followed by one of two that depend on s."""
        found, turns = [0], torch.randint(2, (length,), generator=draw).tolist()
        for turn in turns:
            found.append(int(steps[found[-1], turn]))
        return torch.tensor(found)

    parts = [chain(torch.randint(symbols, (symbols, 2), generator=draw)) for _ in range(4)]
    noise = torch.randint(symbols, (length,), generator=draw)
    ends = int(0.6 * length), int(0.8 * length)
    train = [*(part[: ends[0]] for part in parts), noise[: ends[0]]]
    valid, test = [part[ends[0] : ends[1]] for part in parts[:2]], [part[ends[1] :] for part in parts[:2]]
    names = ("chain 1", "chain 2", "chain 3", "chain 4", "noise")
    return Mixture(names, train, valid, test, symbols, context, width)


def measure(mixture: Mixture, steps: int, seed: int) -> dict[str, Any]:
    """Return the weights, and the losses in bits a byte of `Penalty()` and of plain training with the same rates."""
    weights, model, found = mixture.solve(steps, seed)
    rates, equal = found.history["lower_rate"], torch.full_like(weights, 1 / len(weights))
    same, uniform = (mixture.plain(steps, seed, w, rates) for w in (weights, equal))
    return {
        "weights": [round(float(w), 3) for w in weights],
        "g": mixture.g(model, weights),
        "g, plain": mixture.g(same, weights),
        "test": mixture.tested(model),
        "test, plain": mixture.tested(same),
        "test, equal weights": mixture.tested(uniform),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write the table into this page, between its markers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    mixture = synthetic() if given.synthetic else texts()
    titles = [*mixture.names, "g", "g, plain", "test", "test, plain", "test, equal weights"]
    lines = ["| seed | " + " | ".join(titles) + " |", "| --- " * (len(titles) + 1) + "|"]
    for seed in range(given.seeds):
        row = measure(mixture, given.steps, seed)
        cells = [f"{w:.3f}" for w in row.pop("weights")] + [f"{value:.3f}" for value in row.values()]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if given.page is None:
        return
    text = given.page.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- table -->\n")
    after = rest.partition("<!-- end -->")[2]
    body = "\n".join(lines)
    given.page.write_text(f"{before}<!-- table -->\n{body}\n<!-- end -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
