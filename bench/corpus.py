"""How long a large corpus takes from text to the first update, and how much memory: a synthetic one is written, and
train.py runs on it twice, from nothing and with its data prepared before; and the same for half of it, so that the
need of larger ones can be told.

    python bench/corpus.py --pairs 1000000
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
LETTERS = "etaoinshrdlucmfw", "তারানসিকবেলমদগপশ"


def write(path, pairs, letters, rng):
    """Sentences of 20 words on average, drawn from 100,000 words by Zipf's law."""
    ends = np.cumsum(rng.integers(2, 10, 100000))
    stream = "".join(np.array(list(letters))[rng.integers(0, len(letters), ends[-1])])
    words = np.array([stream[a:b] for a, b in zip([0, *ends[:-1]], ends)], dtype=object)
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for start in range(0, pairs, 10000):
            n = min(10000, pairs - start)
            ranks = np.exp(rng.random((n, 40)) * np.log(len(words))).astype(int) - 1
            lengths = np.clip(rng.normal(20, 5, n).astype(int), 1, 40)
            file.writelines(" ".join(words[row[:k]]) + "\n" for row, k in zip(ranks, lengths))


def run(command):
    """-> seconds, peak MB, the report's lines that are about the data"""
    start = time.perf_counter()
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(done.stderr)
    wanted = r"read |  dropped|prepared|source: [\d,]+ tokens|target: [\d,]+ tokens|vocabulary|step 1/"
    lines = [line for line in done.stderr.splitlines() if re.match(wanted, line)]
    return seconds, float(re.search(r"([\d.]+) MB  left", lines[-1])[1]), lines


def measure(pairs, flags):
    """A corpus of so many pairs, from nothing and prepared before -> of the first start: seconds, peak MB, and the peak
    while it is cleaned, which is what grows with the corpus (the tokenizer learns from a sample)."""
    with tempfile.TemporaryDirectory() as folder:
        src, tgt = Path(folder, "text.src"), Path(folder, "text.tgt")
        for seed, (path, letters) in enumerate(zip((src, tgt), LETTERS)):
            write(path, pairs, letters, np.random.default_rng(seed))
        size = (src.stat().st_size + tgt.stat().st_size) / 1e6
        command = [sys.executable, HERE.parent / "train.py", "--src", src, "--tgt", tgt, *flags.split()]
        command += "--steps 1 --log-every 1 --val-pairs 10 --batch-tokens 2000".split()
        print(f"\n{pairs:,} pairs, {size:.0f} MB of text")
        results = [run([*command, "--out", Path(folder, name)]) for name in ("first", "second")]
        for name, (seconds, peak, lines) in zip(("first start", "second start"), results):
            print(f"{name}: {seconds:.1f} s from start to end, peak {peak:.0f} MB, {peak / size:.2f} times the text")
            print(*("  " + line[:200] for line in lines), sep="\n")
        kept = sum(path.stat().st_size for path in Path(folder, "cache").rglob("*") if path.is_file()) / 1e6
        print(f"prepared data on disk: {kept:.0f} MB")
    seconds, peak, lines = results[0]
    return seconds, peak, float(re.search(r"cleaning .*? s \(peak (\d+) MB", "".join(lines))[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000000)
    parser.add_argument("--flags", default="--preset tiny --vocab-size 16000", help="further flags of train.py")
    args = parser.parse_args()
    few, many = measure(args.pairs // 2, args.flags), measure(args.pairs, args.flags)
    print("\nby straight lines through these two:")
    for corpus, pairs in (("Samanantar en-bn", 8.5e6), ("WMT14 en-fr", 40e6)):
        steps = (pairs - args.pairs) / (args.pairs - args.pairs // 2)
        seconds, peak, cleaning = (b + (b - a) * steps for a, b in zip(few, many))
        print(
            f"{corpus}, {pairs / 1e6:.1f} million pairs: {seconds / 60:.0f} minutes, {max(peak, cleaning) / 1e3:.1f} GB"
        )


if __name__ == "__main__":
    main()
