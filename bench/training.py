"""Training speed beside PyTorch's own nn.Transformer: same sizes, same batches, same loss, alternating in one process.

    python bench/training.py [--data FILE.tsv] [--precision fp32|bf16] [--preset small] [--batch-tokens 4096]

Prints target tokens a second (padding not counted) of both and their ratio, round by round. Timings on a shared
machine are noisy; the ratio within a round is what to look at. A step is forward, label-smoothed loss, backward,
clipping, Adam.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402
import transformer as tf  # noqa: E402


class TorchTransformer(nn.Module):
    """nn.Transformer inside the same tied, scaled table and sinusoids."""

    def __init__(self, config):
        super().__init__()
        self.embedding = tf.Embedding(nn.Parameter(torch.empty(config.vocab_size, config.d_model)), config.max_len, 0.0)
        self.embedding.dropout = nn.Dropout(config.dropout)
        nn.init.normal_(self.embedding.table, std=config.d_model**-0.5)
        c = config
        self.body = nn.Transformer(
            c.d_model,
            c.n_heads,
            c.n_layers,
            c.n_layers,
            c.d_ff,
            c.dropout,
            batch_first=True,
            norm_first=c.norm == "pre",
        )

    def loss(self, src, tgt_in, tgt_out, smoothing):
        future = ~tf.causal_mask(tgt_in.shape[1], src.device)[0, 0]
        states = self.body(
            self.embedding(src), self.embedding(tgt_in), tgt_mask=future, tgt_is_causal=True,
            src_key_padding_mask=src == tf.PAD, memory_key_padding_mask=src == tf.PAD,
        )  # fmt: skip
        logits = F.linear(states, self.embedding.table).flatten(0, 1).float()
        return F.cross_entropy(
            logits, tgt_out.flatten(), ignore_index=tf.PAD, label_smoothing=smoothing, reduction="sum"
        )


def update(model, loss_of, optimizer, batch, rate, precision):
    """One step of training -> its summed loss (a tensor) and its target tokens."""
    n = int((batch[2] != tf.PAD).sum())
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = loss_of(*batch)
    (loss / n).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(HERE.parent / "data" / "demo.tsv"))
    parser.add_argument("--preset", choices=tf.PRESETS, default="small")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--updates", type=int, default=10, help="updates of each in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    src, tgt = zip(*train.read_tsv(args.data, {}, print))
    tokenizer = tf.Tokenizer.train(src + tgt, args.vocab_size)
    rows = [tf.TokenRows.encode(tokenizer, side) for side in (src, tgt)]
    batches = tf.TokenBatchSampler(rows[0].lengths + 1, rows[1].lengths + 1, args.batch_tokens).epoch(0)
    config = tf.Config(tokenizer.vocab_size, **tf.PRESETS[args.preset])
    torch.manual_seed(0)
    ours, theirs = tf.Transformer(config).train(), TorchTransformer(config).train()
    losses = {
        "transformer.py": (ours, lambda *batch: tf.training_loss(ours, *batch, 0.1).smoothed),
        "nn.Transformer": (theirs, lambda *batch: theirs.loss(*batch, 0.1)),
    }
    optimizers = {name: tf.adam(model) for name, (model, _) in losses.items()}
    position = 0

    def speed(name, updates):
        model, loss_of = losses[name]
        tokens, start = 0, time.perf_counter()
        for i in range(position, position + updates):
            batch = tf.collate(*rows, batches[i % len(batches)])
            tokens += update(model, loss_of, optimizers[name], batch, 1e-4, args.precision)[1]
        return tokens / (time.perf_counter() - start)

    train.keep_freed_memory()  # for both alike
    for name in losses:
        speed(name, 3)
    ratios = []
    for _ in range(args.rounds):
        pair = [speed(name, args.updates) for name in losses]
        position += args.updates
        ratios.append(pair[0] / pair[1])
        print(
            f"transformer.py {pair[0]:.0f}, nn.Transformer {pair[1]:.0f} target tokens/s, ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(
        f"{args.preset}, {args.precision}, {torch.get_num_threads()} threads: "
        f"ratio {math.prod(ratios) ** (1 / len(ratios)):.2f}"
    )


if __name__ == "__main__":
    main()
