"""Translate with a trained checkpoint: one line, a file, a pipe, or a prompt. A line in, a line out, always.

python translate.py "I am reading a book."
python translate.py < in.txt > out.txt
python translate.py --input test.en --reference test.de     scores instead of translations, unless --output
python translate.py                                         a prompt, if stdin is a terminal
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import transformer as tf

BLOCK = 1000  # lines translated before any of them is written: enough to sort by length, few enough to lose


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        "translate.py",
        usage="translate.py [flags] [text ...]; --help explains them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    parser.add_argument("text", nargs="*", help="lines to translate; without any, --input or stdin")
    parser.add_argument("--checkpoint", help="default: runs/best.pt, a link to the best of the run that finished last")
    parser.add_argument("--input", help="file of source lines; .gz as well")
    parser.add_argument("--output", help="file for the translations (default stdout)")
    parser.add_argument("--reference", help="file of reference translations: print BLEU, chrF2++ and perplexity")
    parser.add_argument("--beam", type=tf.number(int, 1, 2**31), default=4, help="beams; 1 is greedy (default 4)")
    parser.add_argument(
        "--alpha",
        type=tf.number(float, 0, 100),
        default=0.6,
        help="length penalty ((5+n)/6)^alpha; more favours longer translations (default 0.6)",
    )
    parser.add_argument(
        "--extra-len",
        type=tf.number(int, 0, 2**31),
        default=50,
        help="most tokens that a translation may have more than its source (default 50)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=tf.number(int, 1, 2**31),
        default=32768,
        help="tokens in a batch: beams times the longest translation possible (default 32768)",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--threads", type=tf.number(int, 1, 1025), help="CPU threads (default: PyTorch's choice)")
    args = parser.parse_args(argv)
    if args.text and args.input is not None:
        parser.error("give the text or --input, not both")
    if args.reference is not None and args.input is None:
        parser.error("--reference needs --input: the lines that it translates")
    for name in (args.input, args.reference):
        if args.output and name and os.path.exists(args.output) and os.path.exists(name):
            if os.path.samefile(args.output, name):
                parser.error(f"--output {args.output} would overwrite what is to be read")
    return args


def find_checkpoint():
    link = Path("runs") / "best.pt"
    if link.exists():
        return link
    # No run has finished, or the file system has no links: the newest, but never one that memorised for a test.
    found = [path for path in Path("runs").glob("*/best.pt") if not memorised(path.parent)]
    found.sort(key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there is no checkpoint in runs/: run `python train.py` first, or give --checkpoint FILE")
    return found[-1]


def memorised(folder):
    config = folder / "config.json"
    return config.exists() and "overfit" in json.loads(config.read_text(encoding="utf-8"))


class Translator:
    def __init__(self, args):
        self.args, self.failed = args, 0
        if args.threads:
            torch.set_num_threads(args.threads)
        path = args.checkpoint or find_checkpoint()
        device = tf.pick_device(args.device)
        self.model, self.tokenizer, rest = tf.load_checkpoint(path, device)
        step = rest.get("state", {}).get("step", "unknown")
        print(f"{path}: step {step}, {self.model.n_parameters():,} parameters, {device}", file=sys.stderr)

    def lines(self, lines, first=1):
        """Translations, one for each line; `first` is the number of the first line, for messages."""

        def too_long(number, tokens):
            self.failed += 1
            print(
                f"translate.py: line {first + number} is not translated: {tokens} tokens, the limit is "
                f"{self.model.config.max_len}; a blank line stands for it",
                file=sys.stderr,
            )

        a = self.args
        return tf.translate(
            self.model, self.tokenizer, lines, a.beam, a.alpha, a.extra_len, a.batch_tokens, on_too_long=too_long
        )

    def file(self, lines, out):
        """Translate block by block, writing each as it is done: what is finished is never lost."""
        outputs = []
        bar = tqdm(total=len(lines), unit="line", file=sys.stderr, disable=len(lines) <= 1 or not sys.stderr.isatty())
        for start in range(0, len(lines), BLOCK):
            block = self.lines(lines[start : start + BLOCK], start + 1)
            outputs += block
            if out is not None:
                out.write("".join(line + "\n" for line in block).encode("utf-8"))
                out.flush()
            bar.update(len(block))
        bar.close()
        return outputs

    def prompt(self):
        print("one line at a time; an empty line or Ctrl-D ends", file=sys.stderr)
        while True:
            print("> ", end="", file=sys.stderr, flush=True)  # stdout is for translations
            try:
                line = input()
            except EOFError:
                print(file=sys.stderr)
                return
            if not line.strip():
                return
            print(self.lines([line])[0], flush=True)

    def report(self, sources, outputs, references, seconds):
        scores = tf.score_text(outputs, references)
        kept = [
            (s, r)
            for s, r in zip(sources, references)
            if self.fits(self.tokenizer.source.encode(s)) and self.fits(self.tokenizer.encode(r))
        ]
        rows = tf.encode_pairs(self.tokenizer, kept)
        print(f"BLEU {scores['bleu']:.2f}   {scores['bleu_signature']}", file=sys.stderr)
        print(f"chrF2++ {scores['chrf']:.2f}   {scores['chrf_signature']}", file=sys.stderr)
        lower = tf.score_text([x.lower() for x in outputs], [x.lower() for x in references])
        print(f"BLEU {lower['bleu']:.2f} with both sides lower-cased", file=sys.stderr)
        if kept:
            nll, tokens = tf.pairs_nll(self.model, *rows)
            print(
                f"perplexity {tf.perplexity(nll, tokens):.2f} per piece, {nll / tokens:.4f} nats, over {len(kept)} "
                f"of {len(sources)} references",
                file=sys.stderr,
            )
        print(
            f"exact matches {scores['exact']:.1%}; {len(sources)} lines in {seconds:.1f} s, "
            f"{len(sources) / seconds:.1f} a second",
            file=sys.stderr,
        )

    def fits(self, ids):
        return 1 < len(ids) + 1 <= self.model.config.max_len


def main(argv=None):
    tf.prepare_streams()
    args = parse_arguments(argv)
    try:
        if sys.stdout is None and not args.output and args.reference is None:
            raise ValueError("there is nowhere to write to: stdout is closed")
        # Read before the model loads: a wrong path is told at once.
        sources = references = None
        if args.input is not None:
            sources = list(tf.read_text(args.input))
        if args.reference is not None:
            references = list(tf.read_text(args.reference))
            if len(sources) != len(references):
                raise ValueError(f"{args.input} has {len(sources)} lines and {args.reference} has {len(references)}")
            if not sources:
                raise ValueError(f"{args.input} is empty: there is nothing to score")
        translator = Translator(args)
        if args.text:
            sources = args.text
        elif sources is None and sys.stdin is None:
            raise ValueError("there is nothing to translate: stdin is closed")
        elif sources is None and not sys.stdin.isatty():
            sources = list(tf.read_lines(sys.stdin.buffer))
        if sources is None:
            translator.prompt()
        else:
            start = time.perf_counter()
            if args.output:
                with open(args.output, "wb") as out:
                    outputs = translator.file(sources, out)
            else:
                outputs = translator.file(sources, None if references else sys.stdout.buffer)
            if references:
                translator.report(sources, outputs, references, time.perf_counter() - start)
        return 1 if translator.failed else 0
    except BrokenPipeError:  # whoever read our output has had enough (head, less): no complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(f"translate.py: {tf.explain(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
