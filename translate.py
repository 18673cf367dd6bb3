"""Translate with a trained checkpoint: one line, a file, a pipe, or a prompt. A line in, a line out, always.

    python translate.py "I am reading a book."
    python translate.py < in.txt > out.txt
    python translate.py --input test.en --reference test.de     scores instead of translations, unless --output
    python translate.py --score --input test.en --reference test.de     log-probabilities of given translations
    python translate.py                                         a prompt, if stdin is a terminal

With --scores, --n-best or --score a line of output is: line number, score, log-probability, text, separated by tabs.
The log-probability (natural, of all tokens and the end of sentence) is the model's own; score = log-probability /
((5 + n) / 6)^alpha, with n tokens, the end counted. With --json it is an object for each line of input, with tokens and
the log-probability of each.
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while all this is imported ends it without a traceback

import argparse
import itertools
import json
import math
import os
import re
import select
import stat
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import transformer as tf

BLOCK = 1000  # lines translated before any of them is written: enough to sort by length, few enough to lose
BLEU_TOKENIZERS = ("13a", "intl", "char", "zh", "ja-mecab", "ko-mecab", "flores101", "flores200", "none")


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        "translate.py",
        usage="translate.py [flags] [text ...]; --help explains them",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    natural, count, real = tf.number(int, 0, 2**31), tf.number(int, 1, 2**31), tf.number(float, 0, 100)

    def flag(group, name, kind, default, text, **more):
        known = f" (default {default})" if default not in (None, "") else ""
        group.add_argument(name, type=kind, default=default, help=text + known, **more)

    parser.add_argument("text", nargs="*", help="lines to translate; without any, --input or stdin")
    flag(
        parser, "--checkpoint", str, None, "default: runs/best.pt; given several times: an ensemble", action="append",
        metavar="FILE",
    )  # fmt: skip
    flag(parser, "--input", str, None, "file of source lines; .gz as well")
    flag(parser, "--output", str, None, "file for the translations, instead of stdout")
    flag(parser, "--batch-tokens", count, 32768, "tokens in a batch: beams times the longest translation possible")
    flag(parser, "--batch-lines", count, BLOCK, "most lines translated before the first of them is written")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: faster, less exact")
    flag(parser, "--threads", tf.number(int, 1, 1025), None, "CPU threads, instead of PyTorch's choice")

    search = parser.add_argument_group("search; lengths are in tokens")
    flag(search, "--beam", count, 4, "beams; 1 is greedy")
    flag(search, "--alpha", real, 0.6, "length penalty; more favours longer translations")
    flag(search, "--max-len", natural, 50, "most tokens that a translation may have more than its source")
    flag(search, "--min-len", tf.number(int, -(2**31), 2**31), None, "fewest that it must have more (-5: five fewer)")
    flag(search, "--no-repeat-ngram", natural, 0, "no n-gram of this many tokens twice; 0: any may come again")
    flag(search, "--prefix", str, "", "how every translation begins")
    flag(
        search, "--temperature", tf.number(float, 1e-3, 1e3), None, "sample, from a sharper (<1) or flatter (>1) model"
    )
    flag(search, "--top-k", count, None, "sample, from the so many most probable tokens")
    flag(search, "--top-p", tf.number(float, 1e-9, 1.0000001), None, "sample, from the fewest that make up this share")
    flag(search, "--seed", natural, 1, "decides the samples, with the number of the line")

    form = parser.add_argument_group("output")
    flag(form, "--n-best", count, 1, "translations of each line, at most --beam; none comes twice")
    form.add_argument("--scores", action="store_true", help="with line number, score and log-probability")
    form.add_argument("--json", action="store_true", help="an object for each line")
    flag(
        form, "--attention", str, None, "where each token looked: a table on stderr, or FILE.png or .svg",
        nargs="?", const="-", metavar="FILE",
    )  # fmt: skip
    flag(form, "--layer", count, None, "of --attention: this layer (the last)")
    flag(form, "--head", count, None, "of --attention: this head (the table: mean of all; a file: all)")

    score = parser.add_argument_group("scores against references")
    flag(
        score, "--reference", str, None, "file of reference translations: print BLEU, chrF2++, TER, perplexity and more"
    )
    score.add_argument(
        "--score", action="store_true", help="the references' log-probabilities, instead of translations"
    )
    score.add_argument(
        "--bleu-tokenizer",
        choices=BLEU_TOKENIZERS,
        default="13a",
        help="sacrebleu's; another for scripts that 13a cannot",
    )
    flag(
        score,
        "--memory",
        str,
        None,
        "training sources and targets: a baseline that copies the nearest",
        nargs=2,
        metavar="FILE",
    )
    flag(
        score,
        "--compare",
        str,
        None,
        "other translations, or a checkpoint: paired bootstrap against them",
        metavar="FILE",
    )
    args = parser.parse_args(argv)
    if args.attention and args.attention != "-" and not args.attention.lower().endswith((".png", ".svg", ".pdf")):
        if re.search(r"^\S+\.[a-zA-Z]{3,4}$", args.attention):
            parser.error(f"--attention draws .png, .svg or .pdf, not {args.attention}")
        args.text.insert(0, args.attention)  # it was the text that came next
        args.attention = "-"
    args.text = [text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for text in args.text]
    args.sample = [name for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None]
    sources = [bool(args.text), args.input is not None]
    for wrong, message in (
        (all(sources), "text on the command line or --input, not both"),
        (args.reference is not None and args.input is None, "--reference needs --input"),
        (args.score and args.reference is None, "--score needs --reference"),
        ((args.memory or args.compare) and args.reference is None, "--memory and --compare need --reference"),
        (args.score and (args.n_best > 1 or args.sample or args.compare), "--score translates nothing"),
        (args.n_best > args.beam, f"--n-best {args.n_best} needs as many beams: --beam {args.n_best}"),
        (args.sample and args.n_best > 1, "a sample is one translation: --n-best 1"),
        ((args.layer or args.head) and args.attention is None, "--layer and --head need --attention"),
        (args.attention is not None and args.score, "--score has no --attention"),
        (args.min_len is not None and args.min_len > args.max_len, "--min-len is more than --max-len"),
        (args.output is not None and not args.output.removesuffix(".gz"), "--output is empty"),
        (args.output is not None and args.output.endswith(".gz"), "--output is plain text: a name without .gz"),
    ):
        if wrong:
            parser.error(message)
    return args


# --- The model -----------------------------------------------------------------------------------------------------


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
    try:
        return "overfit" in dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return False


def refuse_to_overwrite(args, checkpoints):
    """--output may be none of what is read, stdin included."""
    if args.output and os.path.exists(args.output):
        named = [args.input, args.reference, args.compare, *(args.memory or ()), *checkpoints]
        read = [os.stat(name) for name in named if name is not None and os.path.exists(name)]
        with suppress(OSError, ValueError, AttributeError):  # no stdin, or none that is a file
            read.append(os.fstat(sys.stdin.fileno()))
        written = os.stat(args.output)
        if stat.S_ISREG(written.st_mode) and any(os.path.samestat(written, other) for other in read):
            raise ValueError(f"--output {args.output} would overwrite what is to be read")


class Ensemble(nn.Module):
    """Several models of one tokenizer that search as one: at every step their probabilities (not the logs) are
    averaged. Raises ValueError if their vocabularies differ."""

    def __init__(self, models):
        super().__init__()
        self.models = nn.ModuleList(models)
        self.config = replace(models[0].config, max_len=min(model.config.max_len for model in models))
        if any(model.config.vocab_size != self.config.vocab_size for model in models):
            raise ValueError("models of different vocabularies cannot be averaged")

    @property
    def device(self):
        return self.models[0].device

    def n_parameters(self):
        return sum(model.n_parameters() for model in self.models)

    def encode(self, src):
        return [model.encode(src) for model in self.models]

    def start_cache(self, memories):
        """One cache, so that no model is forgotten when it is reordered: all their layers, model after model."""
        caches = [model.start_cache(memory) for model, memory in zip(self.models, memories)]
        return tf.Cache([layer for cache in caches for layer in cache.layers])

    def next_log_probs(self, last, src_mask, cache):
        """(B*W,1) -> (B*W,V)"""
        parts, start = [], 0
        for model in self.models:
            layers = cache.layers[start : start + model.config.n_layers]
            parts.append(model.next_log_probs(last, src_mask, tf.Cache(layers)))
            start += model.config.n_layers
        return torch.stack(parts).logsumexp(0) - math.log(len(parts))

    def label_log_probs(self, *batch):
        """src (B,S), tgt_in, tgt_out (B,T) -> (B,T)"""
        parts = torch.stack([model.label_log_probs(*batch) for model in self.models])
        return (parts.logsumexp(0) - math.log(len(parts))).masked_fill(batch[2] == tf.PAD, 0.0)


def load_models(paths, device):
    """-> a model, or an Ensemble, in eval mode, and its tokenizer"""
    models, first = [], None
    for path in paths:
        model, tokenizer, rest = tf.load_checkpoint(path, device)
        state = rest.get("state")
        step = state.get("step") if isinstance(state, dict) else "unknown"
        say(f"{path}: step {step}, {model.n_parameters():,} parameters, {device}")
        first = first or tokenizer
        if tokenizer.sha256 != first.sha256:
            raise ValueError(f"{path} has another tokenizer than {paths[0]}")
        models.append(model)
    return (models[0] if len(models) == 1 else Ensemble(models)).eval(), tokenizer


def sample_search(model, src, temperature=1.0, top_k=None, top_p=1.0, seeds=None, alpha=0.6, **limits):
    """Tokens drawn from the model's distribution, sharpened (temperature < 1) or flattened, and cut to the top_k most
    probable, and to the fewest that make up top_p of it (Holtzman et al., 2020). seeds, one for each source, decide the
    draws, so that a source's result does not depend on its batch."""
    draws = [np.random.default_rng(seed) for seed in (range(len(src)) if seeds is None else seeds)]

    def pick(log_probs):
        p = (log_probs.double() / temperature).softmax(-1)  # (B,V)
        if top_k or top_p < 1:
            likely, index = p.sort(-1, descending=True)
            likely = likely.masked_fill(likely.cumsum(-1) - likely >= top_p, 0.0)  # the first always stays
            if top_k:
                likely[:, top_k:] = 0.0
            p = torch.zeros_like(p).scatter_(1, index, likely)
        u = torch.tensor([[rng.random()] for rng in draws], dtype=p.dtype, device=p.device)  # (B,1)
        # The first token at which the sum is above u. In the vocabulary's order: in that of size, rounding could swap
        # two equals, and the same u would mean another token.
        sums = p.cumsum(-1)  # (B,V)
        return (sums <= u * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=p.shape[1] - 1)

    return tf.follow(model, src, pick, alpha, limits)


# --- From lines to lines -------------------------------------------------------------------------------------------


def split_to_fit(tokenizer, text, limit, borders=(r"(?<=[.!?…।॥])\s+|(?<=[。！？])", r"\s+")):
    """Text -> parts of at most `limit` tokens each: one if it fits, else cut at the ends of sentences, or where a
    sentence is too long between words, or where a word is, between characters. Nothing is lost."""
    if len(tokenizer.encode(text)) <= limit:
        return [text]
    units = [unit for unit in re.split(borders[0], text) if unit] if borders else list(text)
    glue, parts = " " if borders else "", []
    for unit in units:
        longer = parts[-1] + glue + unit if parts else unit
        if len(tokenizer.encode(longer)) <= limit:
            parts[max(0, len(parts) - 1) :] = [longer]
        elif borders:
            parts += split_to_fit(tokenizer, unit, limit, borders[1:])
        else:
            parts.append(unit)
    return parts


def repeats(text, n=3):
    """Whether some n words come three times or more: what a search does when it has lost its way."""
    words = text.split()
    return max(Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)).values(), default=0) >= 3


class Translator:
    def __init__(self, args, checkpoints):
        self.args, self.warned, self.at_limit = args, 0, 0
        if args.threads:
            torch.set_num_threads(args.threads)
        self.device = tf.pick_device(args.device)
        self.model, self.tokenizer = load_models(checkpoints, self.device)
        self.limit = self.model.config.max_len - 1  # tokens, without EOS

    def half(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.precision == "bf16")

    def search(self, lines, first=1):
        """-> for each line its (text, Hypothesis)s, best first; `first` is the number of the first line. A line of more
        tokens than the model can read is translated in parts, and named; none is ever cut short."""
        a, parts, owners = self.args, [], []
        for number, line in enumerate(lines, first):
            own = split_to_fit(self.tokenizer.source, line, self.limit)
            if len(own) > 1:
                say(f"line {number} has more than {self.limit} tokens: translated in {len(own)} parts")
            fit = [part for part in own if len(self.tokenizer.source.encode(part)) <= self.limit]
            if len(fit) < len(own):
                say(f"line {number} has a character of more than {self.limit} tokens, which is left out")
                self.warned += 1
            parts += fit
            owners += [number - first] * len(fit)
        options = dict(alpha=a.alpha, extra_len=a.max_len, min_extra=a.min_len, no_repeat_ngram=a.no_repeat_ngram)
        if a.sample:
            how = {name: getattr(a, name) for name in a.sample}

            def sample(src, numbers, **limits):
                which = [(a.seed, first + owners[i], i - owners.index(owners[i])) for i in numbers]  # line, part
                return sample_search(self.model, src, seeds=which, **how, **limits)

            options["search"] = sample
        with self.half():
            found = tf.search_lines(
                self.model, self.tokenizer, parts, a.n_best, a.prefix, a.batch_tokens, a.beam, **options
            )
        for part, hypotheses in zip(parts, found):
            for _, h in hypotheses[:1]:
                longest = min(len(self.tokenizer.source.encode(part)) + a.max_len, self.limit)
                self.at_limit += len(h.tokens) >= longest > 0
        out = [None] * len(lines)
        for owner, new in zip(owners, found):
            if out[owner] and new:  # a further part: the best of each, joined
                (one, g), (two, h) = out[owner][0], new[0]
                sums = g.log_prob + h.log_prob, g.score + h.score
                new = [(f"{one} {two}".strip(), tf.Hypothesis(g.tokens + h.tokens, *sums))]
            out[owner] = new or out[owner] or []
        return out

    def lines(self, lines, first=1):
        return [found[0][0] if found else "" for found in self.search(lines, first)]

    def written(self, lines, first):
        """What stdout or --output gets for these lines, as text, and their best translations."""
        found, a = self.search(lines, first), self.args
        if a.attention is not None:
            self.show_attention(lines, found, first)
        best = [hypotheses[0][0] if hypotheses else "" for hypotheses in found]
        if a.json:
            return "".join(map(self.as_json, range(first, first + len(lines)), lines, found)), best
        if a.scores or a.n_best > 1:
            return "".join(map(as_table, range(first, first + len(lines)), found)), best
        return "".join(text + "\n" for text in best), best

    def as_json(self, number, line, found):
        rows = [self.tokenizer.source.encode(line) for _ in found], [h.tokens for _, h in found]
        hypotheses = []
        if found and len(rows[0][0]) <= self.limit:  # a line in parts has no one source for its tokens
            with self.half():
                log_probs = tf.score_pairs(self.model, *map(as_rows, rows))
        else:
            log_probs = [None] * len(found)
        for (text, h), each in zip(found, log_probs):
            pieces = [self.tokenizer.pieces.id_to_piece(i) for i in h.tokens]
            hypotheses.append(
                dict(
                    text=text,
                    score=h.score,
                    log_prob=h.log_prob,
                    tokens=pieces,
                    token_log_probs=each,
                    repeats=repeats(text),
                )
            )
        return json.dumps(dict(line=number, source=line, hypotheses=hypotheses), ensure_ascii=False) + "\n"

    def file(self, blocks, total, out):
        """Translate block by block, writing each as it is done: what is finished is never lost. -> all translations"""
        outputs = []
        bar = tqdm(total=total, unit="line", file=sys.stderr, disable=(total or 0) <= 1 or not sys.stderr.isatty())
        for block in blocks:
            text, best = self.written(block, len(outputs) + 1)
            outputs += best
            if out is not None:
                out.write(text.encode("utf-8"))
                out.flush()
            bar.update(len(block))
        bar.close()
        return outputs

    def prompt(self):
        """Lines from a terminal, and commands that change how they are translated."""
        try:
            import readline  # noqa: F401  (gives input() a history and editing, where it is there)
        except ImportError:
            pass
        commands = dict(beam="beam", nbest="n_best", alpha="alpha", attention="attention", scores="scores")
        say("a line at a time; :beam 8, :nbest 3, :alpha 1, :scores, :attention; an empty line or Ctrl-D ends")
        while True:
            print("> ", end="", file=sys.stderr, flush=True)  # stdout is for translations
            try:
                line = input()
            except EOFError:
                say("")
                return
            except UnicodeDecodeError:
                say("that is not UTF-8")
                continue
            name, _, value = line[1:].strip().partition(" ")
            if not line.strip():
                return
            if not line.startswith(":"):
                print(self.written([line], 1)[0], end="", flush=True)
            elif name in ("scores", "attention"):
                off = not getattr(self.args, name)
                setattr(self.args, name, {"scores": True, "attention": "-"}[name] if off else None)
                say(f"{name} {'on' if off else 'off'}")
            else:
                try:
                    kind = tf.number(float, 0, 100) if name == "alpha" else tf.number(int, 1, 1000)
                    setattr(self.args, commands[name], kind(value))
                    self.args.beam = max(self.args.beam, self.args.n_best)
                    say(f"beam {self.args.beam}, n-best {self.args.n_best}, alpha {self.args.alpha}")
                except (KeyError, ValueError, argparse.ArgumentTypeError):
                    say("commands: :beam N, :nbest N, :alpha X, :scores, :attention")

    # Scores.

    def score(self, sources, references, out):
        """Write the log-probability of each reference given its source."""
        pairs, numbers = [], []
        for number, (src, tgt) in enumerate(zip(sources, references), 1):
            if self.fits(self.tokenizer.source.encode(src)) and len(self.tokenizer.encode(tgt)) <= self.limit:
                pairs.append((src, tgt))
                numbers.append(number)
            else:
                say(f"line {number} is not scored: its source is blank, or a side has more than {self.limit} tokens")
                self.warned += 1
        with self.half():
            scores = tf.score_pairs(self.model, *tf.encode_pairs(self.tokenizer, pairs)) if pairs else []
        if not all(map(math.isfinite, itertools.chain(*scores))):
            raise ValueError(tf.NOT_FINITE)
        scores = dict(zip(numbers, scores))
        for number, (src, tgt) in enumerate(zip(sources, references), 1):
            each = scores.get(number)
            if each is not None:
                total = math.fsum(each)
                h = tf.Hypothesis(
                    self.tokenizer.encode(tgt), total, total / tf.length_penalty(len(each), self.args.alpha)
                )
            if self.args.json:
                row = dict(
                    line=number, source=src, text=tgt, score=None, log_prob=None, tokens=None, token_log_probs=None
                )
                if each is not None:
                    pieces = [self.tokenizer.pieces.id_to_piece(i) for i in h.tokens]
                    row |= dict(score=h.score, log_prob=h.log_prob, tokens=pieces, token_log_probs=each)
                text = json.dumps(row, ensure_ascii=False) + "\n"
            else:
                text = tf.normalize(tgt)  # no tab in it
                text = f"{number}\t\t\t{text}\n" if each is None else as_table(number, [(text, h)])
            out.write(text.encode("utf-8"))

    def fits(self, ids):
        return 0 < len(ids) <= self.limit

    def report(self, sources, outputs, references, memory, seconds):
        a, metrics = self.args, metrics_of(self.args.bleu_tokenizer)
        systems = {"this model": outputs, "the source, copied": sources}
        if a.memory:
            systems["nearest training pair"] = nearest_targets(sources, *memory)
        warn_of_script(references, a.bleu_tokenizer)
        say(f"{'':24}" + "".join(f"{name:>9}" for name in metrics))
        for name, lines in systems.items():
            values = [metric.corpus_score(lines, [references]).score for metric in metrics.values()]
            say(f"{name:24}" + "".join(f"{value:9.2f}" for value in values))
        for name, metric in metrics.items():
            say(f"{name}: {metric.get_signature()}")
        lower = metrics_of(a.bleu_tokenizer)["BLEU"].corpus_score(
            [x.lower() for x in outputs], [[x.lower() for x in references]]
        )
        say(f"BLEU {lower.score:.2f} with both sides lower-cased")
        kept = [
            (s, r)
            for s, r in zip(sources, references)
            if self.fits(self.tokenizer.source.encode(s)) and self.fits(self.tokenizer.encode(r))
        ]
        if kept:
            nll, tokens = tf.pairs_nll(self.model, *tf.encode_pairs(self.tokenizer, kept))
            say(
                f"perplexity {tf.perplexity(nll, tokens):.2f} per piece, {nll / tokens:.4f} nats, over {len(kept)} "
                f"of {len(sources)} references"
            )
        exact = sum(tf.normalize(x) == tf.normalize(y) for x, y in zip(outputs, references)) / len(outputs)
        empty = sum(not x and bool(tf.normalize(s)) for x, s in zip(outputs, sources))
        say(
            f"exact matches {exact:.1%}; empty {empty}, at the length limit {self.at_limit}, repeating itself "
            f"{sum(map(repeats, outputs))} of {len(outputs)}"
        )
        self.by_length(sources, outputs, references, metrics)
        say(f"{len(sources)} lines in {seconds:.1f} s, {len(sources) / seconds:.1f} a second")

    def by_length(self, sources, outputs, references, metrics):
        say(f"{'words of the source':24}" + "".join(f"{name:>9}" for name in metrics) + f"{'lines':>9}")
        for low, high in ((0, 5), (6, 10), (11, 20), (21, 30), (31, 50), (51, 10**9)):
            rows = [i for i, line in enumerate(sources) if low <= len(line.split()) <= high]
            if rows:
                out, reference = ([side[i] for i in rows] for side in (outputs, references))
                values = [metric.corpus_score(out, [reference]).score for metric in metrics.values()]
                name = f"{low} to {high}" if high < 10**9 else f"{low} and more"
                say(f"{name:24}" + "".join(f"{value:9.2f}" for value in values) + f"{len(rows):9}")

    def compare(self, sources, outputs, references, other):
        """Paired bootstrap (Koehn, 2004) of these translations against others, or another checkpoint's (other None)."""
        from sacrebleu.significance import PairedTest

        a, path = self.args, self.args.compare
        if other is None:
            self.model, self.tokenizer = load_models([path], self.device)
            self.limit = self.model.config.max_len - 1
            other = self.lines(sources)
        if other == outputs:
            say(f"{path}: the same translations")
            return
        metrics = {name: metric for name, metric in metrics_of(a.bleu_tokenizer).items() if name != "TER"}
        test = PairedTest(
            [(str(path), other), ("this", outputs)], metrics, [references], test_type="bs", n_samples=1000
        )
        results = test()[1]
        say(f"paired bootstrap, 1,000 samples, against {path}:")
        for name, (theirs, ours) in ((name, results[name]) for name in results if name != "System"):
            say(f"  {name}: {theirs.score:.2f} there, {ours.score:.2f} here, p = {ours.p_value:.4f}")

    # Attention.

    def show_attention(self, lines, found, first):
        """The cross-attention of each best translation: where the decoder looked when it said each token."""
        a = self.args
        layer = a.layer or self.layers()
        if a.layer and a.layer > self.layers():
            raise ValueError(f"--layer {a.layer}: the model has {self.layers()}")
        for number, (line, hypotheses) in enumerate(zip(lines, found), first):
            ids = self.tokenizer.source.encode(line)
            if len(ids) > self.limit:
                say(f"line {number}, in parts, has no one picture of attention")
                self.warned += 1
            if not hypotheses or len(ids) > self.limit:
                continue
            weights = attention_of(self.model, ids, hypotheses[0][1].tokens)[layer - 1]  # (H,T,S)
            if a.head and a.head > len(weights):
                raise ValueError(f"--head {a.head}: the model has {len(weights)}")
            src = [self.tokenizer.source.pieces.id_to_piece(i) for i in ids] + ["</s>"]
            tgt = [self.tokenizer.pieces.id_to_piece(i) for i in hypotheses[0][1].tokens] + ["</s>"]
            heads = f"head {a.head}" if a.head else "mean of the heads"
            if a.attention == "-":
                say(f"line {number}, layer {layer}, {heads}, in per cent:")
                say(attention_table(weights[a.head - 1] if a.head else weights.mean(0), src, tgt))
            else:
                path = Path(a.attention)
                path = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
                draw_attention(path, weights[a.head - 1 : a.head] if a.head else weights, src, tgt, layer, a.head)

    def layers(self):
        if isinstance(self.model, Ensemble):
            raise ValueError("--attention is of one model, not of an ensemble")
        return self.model.config.n_layers


def attention_of(model, src, tgt):
    """ids without BOS and EOS -> cross-attention weights (N,H,T,S), by the formula; each row of them sums to 1."""
    recorded, plain, fused = [], tf.attention_weights, tf.FUSED

    def record(*arguments):
        recorded.append(plain(*arguments))
        return recorded[-1]

    tf.attention_weights, tf.FUSED = record, False
    try:
        with tf.evaluation(model):
            model(*(torch.tensor([ids], device=model.device) for ids in (src + [tf.EOS], [tf.BOS] + tgt)))
    finally:
        tf.attention_weights, tf.FUSED = plain, fused
    # the encoder's N, then of each decoder layer self-attention and cross-attention
    return torch.stack([weights[0] for weights in recorded[model.config.n_layers + 1 :: 2]]).cpu()


def attention_table(weights, src, tgt):
    """(T,S) -> a line for each target token, a numbered column for each source token"""
    width = max(map(len, tgt))
    lines = ["source: " + "  ".join(f"{i} {piece}" for i, piece in enumerate(src, 1))]
    lines.append(" " * width + "".join(f"{i:4}" for i in range(1, len(src) + 1)))
    for piece, row in zip(tgt, weights.tolist()):
        lines.append(f"{piece:{width}}" + "".join(f"{100 * weight:4.0f}" for weight in row))
    return "\n".join(lines)


def draw_attention(path, weights, src, tgt, layer, head):
    """(H,T,S) -> heat maps, one for each head. An .svg keeps labels as text, which its viewer shapes. A picture of
    pixels cannot shape scripts that join or reorder letters, nor show what its font lacks: it has numbers there, and
    the legend goes to stderr."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.font_manager import FontProperties, get_font, findfont
    except ImportError:
        raise ValueError("--attention FILE needs a package: pip install matplotlib") from None
    matplotlib.rcParams["svg.fonttype"] = "none"
    known = get_font(findfont(FontProperties())).get_charmap()
    plain = path.suffix == ".svg" or all(
        ord(c) in known and ord(c) < 0x590 or c == "\u2581" for c in "".join(src + tgt)
    )
    labels = [[piece.replace("\u2581", "_") for piece in side] for side in (src, tgt)]
    if not plain:
        say(f"{path}: numbers stand for the tokens (an .svg has their text)")
        for name, side in zip(("source", "target"), labels):
            say(f"  {name}: " + "  ".join(f"{i} {piece}" for i, piece in enumerate(side, 1)))
        labels = [[str(i) for i in range(1, len(side) + 1)] for side in labels]
    columns = min(4, len(weights))
    rows = -(-len(weights) // columns)
    size = (columns * (1.5 + 0.25 * len(src)), rows * (1.5 + 0.25 * len(tgt)))
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[len(weights) :]:
        ax.axis("off")
    for h, (ax, matrix) in enumerate(zip(axes.flat, weights.numpy()), head or 1):
        ax.imshow(matrix, vmin=0, vmax=1, cmap="Blues")
        ax.set_title(f"layer {layer}, head {h}")
        ax.set_xticks(range(len(src)), labels[0], rotation=90)
        ax.set_yticks(range(len(tgt)), labels[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of glyphs: the labels of an .svg are not drawn here
            figure.savefig(path, bbox_inches="tight")
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be drawn: {error}") from None
    finally:
        pyplot.close(figure)


# --- Odds and ends -------------------------------------------------------------------------------------------------


def say(text):
    """To stderr; if nobody reads that, the work goes on."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def read(path):
    return list(tf.read_text(path))


def is_checkpoint(path):
    if not os.path.isfile(path):  # a pipe can be read once
        return False
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def check_counts(name, lines, other_name, other):
    if len(lines) != len(other):
        raise ValueError(f"{name} has {len(lines)} lines and {other_name} has {len(other)}")


def as_table(number, found):
    """Lines of n-best output; of a blank line one, that is blank but for its number."""
    rows = [f"{number}\t{h.score:.6f}\t{h.log_prob:.6f}\t{text}\n" for text, h in found]
    return "".join(rows) or f"{number}\t\t\t\n"


def as_rows(rows):
    lengths = [len(row) for row in rows]
    return tf.TokenRows(np.array([i for row in rows for i in row], np.int64), np.cumsum([0, *lengths]))


def metrics_of(tokenizer):
    """sacrebleu's metrics. Raises ValueError where a tokenizer needs what is not installed, before any work is done."""
    from sacrebleu.metrics import BLEU, CHRF, TER

    try:
        return {"BLEU": BLEU(tokenize=tokenizer), "chrF2++": CHRF(word_order=2), "TER": TER()}
    except (ImportError, RuntimeError, OSError, SystemExit) as error:
        raise ValueError(f"--bleu-tokenizer {tokenizer}: {' '.join(str(error).split())[:200]}") from None


def warn_of_script(references, tokenizer):
    """13a was made for European languages."""
    letters = [c for line in references[:1000] for c in line if c.isalpha()]
    if tokenizer != "13a" or sum(ord(c) >= 0x590 for c in letters) <= len(letters) / 2:
        return
    words = [word for line in references[:1000] for word in line.split()]
    if len(letters) > 12 * len(words):
        say("warning: the references have no spaces between words: --bleu-tokenizer zh, ja-mecab, ko-mecab or char")
    else:
        say("warning: 13a does not know this script's punctuation: --bleu-tokenizer intl")


def nearest_targets(sources, training_sources, training_targets):
    """For each source the target of the training pair whose source shares most words with it, rare words counting more
    (cosine of tf-idf vectors): what a translation memory does. Any model should beat it."""
    bags = [Counter(tf.normalize(line).lower().split()) for line in training_sources]
    places = {}  # word -> the training lines it is in, and how often
    for i, bag in enumerate(bags):
        for word, n in bag.items():
            places.setdefault(word, ([], []))[0].append(i)
            places[word][1].append(n)
    places = {word: (np.array(lines), np.array(n, np.float32)) for word, (lines, n) in places.items()}
    rarity = {word: math.log(len(bags) / len(lines)) for word, (lines, _) in places.items()}
    norms = np.array([math.sqrt(sum((n * rarity[word]) ** 2 for word, n in bag.items())) or 1.0 for bag in bags])
    out = []
    for line in sources:
        likeness = np.zeros(len(bags))
        for word, n in Counter(tf.normalize(line).lower().split()).items():
            if word in places:
                lines, counts = places[word]
                likeness[lines] += n * counts * rarity[word] ** 2
        out.append(training_targets[int(np.argmax(likeness / norms))] if len(bags) else "")
    return out


def arriving(stream, most):
    """Lines of stdin in blocks of at most `most`. What has arrived is answered at once, so a pipe that someone holds
    open gets its answer after each line, and a file is read in large blocks. Raises ValueError for what is no UTF-8,
    after all lines before it."""
    descriptor, rest, raw, ended = stream.fileno(), b"", [], False
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    lines = tf.read_lines(raw.pop(0) for _ in iter(int, 1))  # without end; as many are asked for as there are
    while not ended:
        data = os.read(descriptor, 1 << 16)
        *whole, rest = (rest + data).split(b"\n")
        ended = not data
        raw += whole + [rest] * (ended and bool(rest))
        more = not ended and (is_file or bool(select.select([descriptor], [], [], 0)[0]))
        while raw and (len(raw) >= most or not more):
            block = []
            try:
                while raw and len(block) < most:
                    block.append(next(lines))
            except ValueError:
                yield block
                raise
            yield block


def main(argv=None):
    tf.prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = parse_arguments(argv)
    try:
        if sys.stdout is None and not args.output and (args.reference is None or args.score):
            raise ValueError("there is nowhere to write to: stdout is closed")
        # Read before the model loads: a wrong path is told at once.
        sources = references = None
        if args.input is not None:
            sources = read(args.input)
        if args.reference is not None:
            references = read(args.reference)
            check_counts(args.input, sources, args.reference, references)
            if not sources:
                raise ValueError(f"{args.input} is empty: there is nothing to score")
            metrics_of(args.bleu_tokenizer)
        memory = other = None
        if args.memory:
            memory = [read(path) for path in args.memory]
            check_counts(args.memory[0], memory[0], args.memory[1], memory[1])
        if args.compare and not is_checkpoint(args.compare):
            other = read(args.compare)
            check_counts(args.compare, other, args.reference, references)
        checkpoints = args.checkpoint or [find_checkpoint()]
        refuse_to_overwrite(args, checkpoints)
        translator = Translator(args, checkpoints)
        if args.text:
            sources = args.text
        elif sources is None and sys.stdin is None:
            raise ValueError("there is nothing to translate: stdin is closed")
        elif sources is None and sys.stdin.isatty():
            translator.prompt()
            return 0
        start, total = time.perf_counter(), None
        if sources is None:
            blocks = arriving(sys.stdin.buffer, args.batch_lines)
        else:
            total = len(sources)
            blocks = (sources[i : i + args.batch_lines] for i in range(0, total, args.batch_lines))
        with open(args.output, "wb") if args.output else nullcontext(getattr(sys.stdout, "buffer", None)) as out:
            if args.score:
                translator.score(sources, references, out)
            else:
                outputs = translator.file(blocks, total, out if args.output or references is None else None)
            out and out.flush()
        if references is not None and not args.score:
            translator.report(sources, outputs, references, memory, time.perf_counter() - start)
            if args.compare:
                translator.compare(sources, outputs, references, other)
        return 1 if translator.warned else 0
    except BrokenPipeError:  # whoever read our output has had enough (head, less): no complaint
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        say("")
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and args.output and error.errno and not error.filename:
            error.filename = args.output
        say(f"translate.py: {tf.explain(error)}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
