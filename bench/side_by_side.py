"""The same training twice, by transformer.py and by PyTorch's nn.Transformer: from the same initial weights, on the
same batches in the same order, with the same loss, rate, clipping and optimizer. Loss, time and BLEU side by side.

    python bench/side_by_side.py --src train.en --tgt train.de --val-src val.en --val-tgt val.de --precision bf16

Two things differ: nn.Transformer also drops attention weights and the inside of the feed-forward, and draws its
dropout its own way. What it has learned is loaded into transformer.py to be translated with (the tests show that the
two compute the same): both are scored by the same search.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from training import TorchTransformer, update

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import train  # noqa: E402
import transformer as tf  # noqa: E402


def same_weights(ours, theirs):
    """Pairs of parameters that mean the same, (ours, theirs)."""
    yield ours.tgt_embedding.table, theirs.embedding.table
    for stack, their_stack in ((ours.encoder, theirs.body.encoder), (ours.decoder, theirs.body.decoder)):
        for a, b in zip(stack.layers, their_stack.layers):
            modules = [(a.feed_forward.w1, b.linear1), (a.feed_forward.w2, b.linear2)]
            modules += [(residual.norm, getattr(b, f"norm{i}")) for i, residual in enumerate(a.residuals, 1)]
            attentions = [(a.attention, b.self_attn)]
            if hasattr(a, "cross_attention"):
                attentions.append((a.cross_attention, b.multihead_attn))
            for one, other in attentions:
                yield one.qkv.weight, other.in_proj_weight
                yield one.qkv.bias, other.in_proj_bias
                modules.append((one.out, other.out_proj))
            for one, other in modules:
                yield one.weight, other.weight
                yield one.bias, other.bias
        yield stack.norm.weight, their_stack.norm.weight
        yield stack.norm.bias, their_stack.norm.bias


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--src", "--tgt", "--val-src", "--val-tgt"):
        parser.add_argument(name, required=True)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=6000)
    parser.add_argument("--warmup-steps", type=int, default=600)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    args = parser.parse_args()
    train.keep_freed_memory()
    src, tgt, val_src, val_tgt = (list(tf.read_text(x)) for x in (args.src, args.tgt, args.val_src, args.val_tgt))
    tokenizer = tf.Tokenizer.train(src + tgt, args.vocab_size)
    rows = tf.encode_pairs(tokenizer, [pair for pair in zip(src, tgt) if all(map(tf.normalize, pair))])
    sampler = tf.TokenBatchSampler(*(side.lengths + 1 for side in rows), args.batch_tokens)
    # the final norms that nn.Transformer always has belong to pre-norm
    config = tf.Config(tokenizer.vocab_size, 256, 8, 512, 3, dropout=0.3, norm="pre")
    torch.manual_seed(0)
    ours, theirs = tf.Transformer(config).train(), TorchTransformer(config).train()
    for one, other in same_weights(ours, theirs):
        other.data.copy_(one.data)
    losses = {
        "transformer.py": (ours, lambda *batch: tf.training_loss(ours, *batch, 0.1).smoothed),
        "nn.Transformer": (theirs, lambda *batch: theirs.loss(*batch, 0.1)),
    }
    optimizers = {name: tf.adam(model) for name, (model, _) in losses.items()}
    seconds = dict.fromkeys(losses, 0.0)
    print(f"{config}; {torch.get_num_threads()} threads, {args.precision}")
    print("updates" + "".join(f"{name + ': loss':>24}{'seconds':>10}" for name in losses))
    for first in range(0, args.updates, 50):  # in turns, so that what else the machine does hits both
        line = f"{first + 50:7}"
        for name, (model, loss_of) in losses.items():
            start, total, tokens = time.perf_counter(), 0.0, 0
            for step in range(first + 1, first + 51):
                epoch, b = divmod(step - 1, len(sampler))
                batch = tf.collate(*rows, sampler.epoch(epoch)[b])
                rate = tf.noam_rate(step, config.d_model, args.warmup_steps)
                loss, n = update(model, loss_of, optimizers[name], batch, rate, args.precision)
                total, tokens = total + loss.item(), tokens + n
            seconds[name] += time.perf_counter() - start
            line += f"{total / tokens:24.4f}{seconds[name]:10.1f}"
        print(line, flush=True)
    translator = tf.Transformer(config)
    for name in losses:
        if name == "transformer.py":
            translator.load_state_dict(ours.state_dict())
        else:
            for one, other in same_weights(translator, theirs):
                one.data.copy_(other.data)
        scores = train.score_text(tf.translate(translator, tokenizer, val_src), val_tgt)
        print(f"{name}: BLEU {scores['bleu']:.2f}, chrF2++ {scores['chrf']:.2f}, {seconds[name]:.0f} s of training")
    print(f"ratio of times {seconds['nn.Transformer'] / seconds['transformer.py']:.2f}; {scores['bleu_signature']}")


if __name__ == "__main__":
    main()
