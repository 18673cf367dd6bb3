"""Speed of decoding: sentences and tokens a second, in batches and one at a time, and how much of the time is matrix
products.

    python bench/decode.py --checkpoint runs/x/best.pt --input test.en
    python bench/decode.py --spm pieces.model --input test.en --length 20       random weights, fixed output length

The second has the sizes and the way of measuring of other programs' benchmarks: 4+4 layers of 256, 64 sentences at a
time, sorted by length, a first batch not counted. (An untrained model ends no sentence by itself, hence the length.)
"""

import argparse
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import transformer as tf  # noqa: E402

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
PRODUCTS += ("mkldnn::_linear_pointwise",)


def fix_length(length):
    """Every output has exactly so many tokens."""

    def of(cls, model, src, **_):
        most = torch.full((len(src),), length, device=src.device)
        return cls(most, most, src.new_zeros(len(src), 0), 0)

    tf.Limits.of = classmethod(of)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--spm", help="a SentencePiece model, for random weights")
    parser.add_argument("--input", required=True)
    parser.add_argument("--length", type=int, help="fixed output length in tokens")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--singles", type=int, default=40, help="sentences one at a time")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.checkpoint:
        model, tokenizer, _ = tf.load_checkpoint(args.checkpoint)
    else:
        tokenizer = tf.Tokenizer(Path(args.spm).read_bytes())
        torch.manual_seed(0)
        model = tf.Transformer(tf.Config(tokenizer.vocab_size, 256, 8, 1024, 4, 0.1)).eval()
    if args.length is not None:
        fix_length(args.length)
    rows = sorted((tokenizer.source.encode(line) + [tf.EOS] for line in tf.read_text(args.input)), key=len)
    rows = [row for row in rows if 1 < len(row) <= model.config.max_len]

    def search(part):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            return tf.beam_search(model, tf.pad_rows(part), args.beam)

    for name, size, part in (
        (f"{args.batch} at a time", args.batch, rows),
        ("one at a time", 1, rows[:: max(1, len(rows) // args.singles)]),
    ):
        search(part[:size])
        start, tokens = time.perf_counter(), 0
        for i in range(0, len(part), size):
            tokens += sum(len(found[0].tokens) + 1 for found in search(part[i : i + size]))
        seconds = time.perf_counter() - start
        print(
            f"decode, beam {args.beam}, {args.precision}, {torch.get_num_threads()} threads, {name}: "
            f"{len(part) / seconds:.1f} sentences/s, {tokens / seconds:.0f} tokens/s"
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            search(part[len(part) // 2 :][:size])
        events = profile.key_averages()
        total = sum(event.self_cpu_time_total for event in events)
        products = sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)
        print(f"    matrix products: {products / total:.0%} of the time; then", end="")
        others = sorted((e for e in events if e.key not in PRODUCTS), key=lambda e: -e.self_cpu_time_total)[:5]
        print("".join(f"  {e.key.removeprefix('aten::')} {e.self_cpu_time_total / total:.0%}" for e in others))


if __name__ == "__main__":
    main()
