"""Train a Transformer on parallel text: flags, data, loop, validation, logs. The model and its search are in
transformer.py.

    python train.py                                    the demo corpus, English to Bengali, in minutes
    python train.py --src a.en --tgt a.de --val-src b.en --val-tgt b.de --out runs/x
    python train.py --data pairs.tsv                   source, tab, target; validation is split off
    python train.py --resume runs/x                    go on exactly where it stopped
"""

import argparse
import csv
import ctypes
import glob
import hashlib
import json
import math
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

import transformer as tf

HERE = Path(__file__).resolve().parent
DEMO = HERE / "data" / "demo.tsv"

# What a flag that is not given stands for; without any data the demo's values come first. A model's sizes come from
# its preset.
# fmt: off
DEFAULTS = dict(
    preset="small", norm="post", vocab_size=8000, max_len=256, steps=20000, batch_tokens=4096, accumulate=1,
    warmup_steps=1000, rate_scale=0.6, label_smoothing=0.1, clip=1.0, patience=0, average=0, eval_every=1000,
    save_every=500, log_every=50, keep=0, best_by="chrf", seed=1, device="auto", precision="fp32",
)
DEMO_DEFAULTS = dict(
    data=str(DEMO), preset="tiny", dropout=0.1, vocab_size=1000, val_pairs=500, steps=1200, batch_tokens=2048,
    warmup_steps=300, rate_scale=0.4, eval_every=400,
)
# fmt: on
SIZES = ("d_model", "n_heads", "d_ff", "n_layers", "dropout")
PATHS = {"src", "tgt", "data", "val_src", "val_tgt", "init_from"}
# A resumed run may be longer, be watched more closely, sit on other hardware, or find its data in another place (their
# fingerprint decides whether they are the same); all else is fixed by its checkpoint.
MAY_CHANGE = {"steps", "epochs", "patience", "average", "keep", "log_every", "save_every", "device", "threads"} | PATHS


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        "train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )

    count, natural, fraction = tf.number(int, 1, 2**31), tf.number(int, 0, 2**31), tf.number(float, 0, 1)
    positive, real = tf.number(float, 1e-9, 1e6), tf.number(float, 0, 1e6)

    def flag(group, name, kind, text):
        default = DEFAULTS.get(name[2:].replace("-", "_"))
        group.add_argument(name, type=kind, help=text + ("" if default is None else f" (default {default})"))

    data = parser.add_argument_group("data: two line-aligned files, or one file of pairs, or a hub set")
    flag(data, "--src", str, "source sentences, one a line")
    flag(data, "--tgt", str, "their translations, line by line")
    flag(data, "--data", str, "pairs: .tsv (source, tab, target), .csv, .jsonl or .parquet; .gz too")
    flag(data, "--dataset", str, "name of a set on the Hugging Face hub, or a folder laid out as one")
    flag(data, "--dataset-config", str, "its configuration")
    flag(data, "--src-field", str, "name of the source column (for .tsv: the first line is then a header)")
    flag(data, "--tgt-field", str, "name of the target column")
    flag(data, "--max-pairs", count, "use at most this many pairs, chosen at random by --seed")
    flag(data, "--val-src", str, "validation sources")
    flag(data, "--val-tgt", str, "validation targets")
    flag(data, "--val-pairs", count, "without validation files: split off this many pairs (default a tenth, <= 1000)")
    flag(data, "--vocab-size", count, "pieces of the shared SentencePiece vocabulary")
    flag(data, "--max-len", count, "longest sentence in tokens, EOS included; longer pairs are dropped and counted")
    data.add_argument("--dry-run", action="store_true", help="report on the data and the sizes, then stop")
    flag(data, "--overfit", count, "memorise this many pairs and say whether it worked: a test of the whole chain")

    model = parser.add_argument_group("model")
    model.add_argument("--preset", choices=tf.PRESETS, help=f"sizes (default {DEFAULTS['preset']}); single ones below")
    flag(model, "--d-model", count, "D")
    flag(model, "--n-heads", count, "H, divides D")
    flag(model, "--d-ff", count, "F")
    flag(model, "--n-layers", count, "N, in encoder and decoder each")
    model.add_argument("--norm", choices=["post", "pre"], help="post as in the paper (default), or pre")
    flag(model, "--dropout", fraction, "probability that a number is dropped (default: the preset's)")

    run = parser.add_argument_group("training")
    flag(run, "--steps", count, "updates in all")
    flag(run, "--epochs", positive, "passes over the data, instead of --steps")
    flag(run, "--batch-tokens", count, "padded tokens of the larger side in a batch")
    flag(run, "--accumulate", count, "batches in an update")
    flag(run, "--warmup-steps", count, "updates until the rate peaks at (D * warm-up)^-0.5 * rate scale")
    flag(run, "--rate-scale", positive, "factor on the paper's rate")
    flag(run, "--label-smoothing", fraction, "probability taken from the label and spread over all pieces")
    flag(run, "--clip", real, "longest gradient; 0 for no clipping")
    flag(run, "--eval-every", count, "updates between validations")
    run.add_argument(
        "--best-by", choices=["chrf", "bleu", "nll"], help="what makes a checkpoint the best (default chrf)"
    )
    flag(run, "--patience", natural, "stop after this many validations without a better one; 0 for never")
    flag(run, "--average", natural, "at the end, average the last N checkpoints: average.pt, and best.pt if better")
    flag(run, "--save-every", count, "updates between saves of last.pt")
    flag(run, "--keep", natural, "keep the weights of the last N validations (at least what --average needs)")
    flag(run, "--log-every", count, "updates between log lines")
    flag(run, "--out", str, "folder of the run (default runs/<time>-<name of the data>)")
    flag(run, "--resume", str, "folder of a run to go on with")
    flag(run, "--init-from", str, "checkpoint whose weights and tokenizer to start from")
    flag(run, "--seed", natural, "decides the split, the order, the initial weights and the dropout")
    run.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], help="auto (default): the best there is")
    run.add_argument(
        "--precision",
        choices=["fp32", "bf16"],
        help="bf16: products in half precision; several times faster where the hardware has it",
    )
    flag(run, "--threads", tf.number(int, 1, 1025), "CPU threads (default: PyTorch's choice)")
    given = vars(parser.parse_args(argv))
    for name in PATHS & set(given):  # as a resume from another folder needs them
        given[name] = os.path.abspath(given[name])
    return given


def settings_of(given):
    """Flags as given -> every setting. A demo run is one without any data of the user's."""
    for one, other in (("src", "tgt"), ("val_src", "val_tgt")):
        if (one in given) != (other in given):
            raise ValueError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} go together")
    sources = [name for name in ("src", "data", "dataset") if name in given]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} exclude each other: one corpus at a time")
    for one, other, why in (
        ("val_pairs", "val_src", "with validation files there is nothing to split off"),
        ("val_pairs", "overfit", "what is memorised is also what is asked"),
        ("val_src", "overfit", "what is memorised is also what is asked"),
        ("src_field", "src", "plain text has no columns"),
    ):
        if one in given and other in given:
            raise ValueError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} exclude each other: {why}")
    if "dataset_config" in given and "dataset" not in given:
        raise ValueError("--dataset-config needs --dataset")
    if given.get("average") == 1:
        raise ValueError("--average needs at least 2 checkpoints")
    if ("src_field" in given) != ("tgt_field" in given):
        raise ValueError("--src-field and --tgt-field go together")
    if "src_field" in given and given["src_field"] == given["tgt_field"]:
        raise ValueError(f"--src-field and --tgt-field are both {given['src_field']!r}")
    fixed = {"preset", "d_model", "n_heads", "d_ff", "n_layers", "norm", "vocab_size", "max_len"} & set(given)
    if "init_from" in given and fixed:
        raise ValueError(f"--{min(fixed).replace('_', '-')} is decided by the checkpoint of --init-from")
    settings = DEFAULTS | ({} if sources else DEMO_DEFAULTS) | given
    if "epochs" in given:
        del settings["steps"]
    if "init_from" in given:
        del settings["preset"]
    else:
        settings = tf.PRESETS[settings["preset"]] | settings
    if "overfit" in given:  # nothing that fights memorising
        settings |= dict(dropout=0.0, label_smoothing=0.0, warmup_steps=100, steps=400, eval_every=100) | given
        settings.pop("val_pairs", None)
    if "out" not in settings:
        name = Path(settings[sources[0]]).name.split(".")[0] if sources else "demo"
        settings["out"] = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    return settings


# --- Data ----------------------------------------------------------------------------------------------------------


def read_aligned(src, tgt):
    pairs = tf.read_text(src), tf.read_text(tgt)
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(f"{src} has {len(pairs[0])} lines and {tgt} has {len(pairs[1])}: they are not line by line")
    return pairs


def read_tsv(path, src_field=None, tgt_field=None):
    rows = [line.split("\t") for line in tf.read_text(path)]
    src, tgt = 0, 1
    if src_field is not None and rows:
        header = rows.pop(0)
        src, tgt = (column_of(field, header, path) for field in (src_field, tgt_field))
    for number, row in enumerate(rows, 1 if src_field is None else 2):
        if row == [""]:  # a blank line is a pair with empty sides, to be dropped and counted as such
            row += [""] * max(src, tgt)
        if len(row) <= max(src, tgt):
            raise ValueError(f"{path}, line {number}: {len(row)} columns where {max(src, tgt) + 1} are needed")
    return [row[src] for row in rows], [row[tgt] for row in rows]


def column_of(field, columns, name):
    if field not in columns:
        raise ValueError(f"{name} has no column {field!r}; it has {', '.join(columns)}")
    return columns.index(field)


def read_jsonl(path):
    """-> {field: values}. Line by line with the json module, which leaves strings as they are (a reader that infers
    types makes timestamps of dates) and knows the line of a fault. The hub's nested form is flattened."""
    rows, fields = [], {}
    for number, line in enumerate(tf.read_text(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not an object with named fields")
            if isinstance(row.get("translation"), dict):
                row |= row.pop("translation")
            rows.append(row)
            fields |= dict.fromkeys(row)
    return {field: [row.get(field) for row in rows] for field in fields}


def read_library(settings):
    """-> {field: values} of CSV, parquet and hub sets, as the `datasets` library reads them."""
    import datasets

    path = settings.get("data")
    try:
        if path is None:
            table = datasets.load_dataset(settings["dataset"], settings.get("dataset_config"), split="train")
        elif suffix_of(path) == ".csv":  # every column as text: guessing would turn NA into nothing and 009 into 9
            header = next(csv.reader(tf.read_text(path)), [])
            features = datasets.Features({name: datasets.Value("string") for name in header})
            files = glob.escape(path)  # the library takes a name for a pattern
            table = datasets.load_dataset(
                "csv", data_files=files, features=features, keep_default_na=False, split="train"
            )
        else:
            table = datasets.load_dataset("parquet", data_files=glob.escape(path), split="train")
        if "translation" in table.column_names:  # the hub's nested form: {"translation": {"en": ..., "bn": ...}}
            table = table.flatten()
            table = table.rename_columns({name: name.removeprefix("translation.") for name in table.column_names})
    except Exception as error:  # the library's errors have many classes and long texts; the cause is the clearer one
        reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        raise ValueError(f"{path or settings['dataset']} cannot be read: {reason}") from None
    return {name: table[name] for name in table.column_names}


def suffix_of(path):
    return Path(path.removesuffix(".gz")).suffix


def read_table(settings):
    """Named columns -> sources, targets. Which columns: as the flags say, or the only two there are."""
    name = settings.get("data", settings.get("dataset"))
    table = read_jsonl(settings["data"]) if suffix_of(name) == ".jsonl" else read_library(settings)
    if "src_field" not in settings:
        if len(table) != 2:
            raise ValueError(f"{name}: say --src-field and --tgt-field; its columns are {', '.join(table)}")
        settings["src_field"], settings["tgt_field"] = table
    sides = []
    for field in (settings["src_field"], settings["tgt_field"]):
        column_of(field, list(table), name)
        values = ["" if value is None else value for value in table[field]]
        for number, value in enumerate(values, 1):
            if not isinstance(value, (str, int, float)):
                raise ValueError(f"{name}, row {number}: column {field!r} holds a {type(value).__name__}, not text")
        sides.append([str(value) for value in values])
    return tuple(sides)


def read_corpus(settings):
    """-> sources, targets: two lists of raw text of equal length."""
    path = settings.get("data")
    if path is not None:
        open(path, "rb").close()  # a missing file: say that, before a library says something else
        if suffix_of(path) not in (".tsv", ".csv", ".jsonl", ".parquet"):
            raise ValueError(f"{path}: the name must end in .tsv, .csv, .jsonl or .parquet (and .gz)")
    if "src" in settings:
        src, tgt = read_aligned(settings["src"], settings["tgt"])
    elif path is not None and suffix_of(path) == ".tsv":
        src, tgt = read_tsv(path, settings.get("src_field"), settings.get("tgt_field"))
    else:
        src, tgt = read_table(settings)
    if settings.get("max_pairs", len(src)) < len(src):
        # a sample, not the first rows: a corpus glued together of several would show its first part only
        chosen = sorted(random.Random(settings["seed"]).sample(range(len(src)), settings["max_pairs"]))
        src, tgt = [src[i] for i in chosen], [tgt[i] for i in chosen]
    return src, tgt


class Corpus:
    """What training and validation see, as text, and what was dropped on the way, by rule."""

    def __init__(self, settings):
        src, tgt = read_corpus(settings)
        self.read, self.dropped = len(src), dict.fromkeys(("empty side", "repeated pair", "in validation too"), 0)
        pairs = {}
        for pair in zip(map(tf.normalize, src), map(tf.normalize, tgt)):
            if not all(pair):
                self.dropped["empty side"] += 1
            elif pair in pairs:
                self.dropped["repeated pair"] += 1
            else:
                pairs[pair] = None
        pairs = list(pairs)
        if "overfit" in settings:
            pairs = random.Random(settings["seed"]).sample(pairs, min(settings["overfit"], len(pairs)))
            self.train = self.val = pairs
        elif "val_src" in settings:
            val_src, val_tgt = read_aligned(settings["val_src"], settings["val_tgt"])
            self.val = [pair for pair in zip(val_src, val_tgt) if all(map(tf.normalize, pair))]
            self.dropped["empty side, validation"] = len(val_src) - len(self.val)
            self.train = self.without_validation(pairs)
        else:
            size = settings.get("val_pairs", min(1000, len(pairs) // 10))
            if not 0 < size < len(pairs):
                raise ValueError(f"{size} validation pairs cannot be split off {len(pairs)} pairs; see --val-pairs")
            chosen = set(random.Random(settings["seed"]).sample(range(len(pairs)), size))
            self.val = [pairs[i] for i in sorted(chosen)]
            self.train = self.without_validation([pair for i, pair in enumerate(pairs) if i not in chosen])
        if not self.train or not self.val:
            raise ValueError(f"no pairs are left: {len(self.train)} to train on, {len(self.val)} to validate on")

    def without_validation(self, pairs):
        """A sentence that validation will ask for, on either side, has no place in training."""
        sides = [set(map(tf.normalize, side)) for side in zip(*self.val)] or [set(), set()]
        kept = [pair for pair in pairs if pair[0] not in sides[0] and pair[1] not in sides[1]]
        self.dropped["in validation too"] += len(pairs) - len(kept)
        return kept

    def encode(self, tokenizer, max_len):
        """-> train (src, tgt) and val (src, tgt) as TokenRows; training pairs over the limit are dropped, never cut:
        a cut target would teach the model to stop in mid-sentence."""
        train, val = (
            [tf.TokenRows.encode(tokenizer, side) for side in zip(*pairs)] for pairs in (self.train, self.val)
        )
        fits = np.maximum(train[0].lengths, train[1].lengths) + 1 <= max_len
        self.dropped[f"over {max_len} tokens"] = int((~fits).sum())
        if not fits.any():
            raise ValueError(f"every pair is longer than {max_len} tokens, the limit of --max-len and --batch-tokens")
        val_fits = np.maximum(val[0].lengths, val[1].lengths) + 1 <= max_len
        self.val = [pair for pair, fit in zip(self.val, val_fits) if fit]
        self.dropped[f"over {max_len} tokens, validation"] = int((~val_fits).sum())
        if not self.val:
            raise ValueError(f"every validation pair is longer than the limit of {max_len} tokens")
        self.train = [pair for pair, fit in zip(self.train, fits) if fit]
        return [rows.select(fits) for rows in train], [rows.select(val_fits) for rows in val]

    def fingerprint(self):
        """SHA-256 over every pair that trains and validates, in order."""
        digest = hashlib.sha256()
        for pairs in (self.train, self.val):
            for pair in pairs:
                digest.update("\t".join(map(tf.normalize, pair)).encode() + b"\n")
            digest.update(b"\n")  # a blank line, which no pair is
        return digest.hexdigest()


# --- The run -------------------------------------------------------------------------------------------------------


def git_commit():
    """The commit of this program, with -dirty if files differ from it; 'unknown' outside a checkout."""
    try:
        run = dict(cwd=HERE, capture_output=True, text=True, check=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], **run).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], **run).stdout
        return commit + ("-dirty" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def keep_freed_memory():
    """Tell glibc to keep what is freed. By default each large tensor is mapped anew, and every page of it costs a fault
    at first touch, at every step: a tenth to a third of a CPU's training time. Elsewhere this does nothing."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        if libc.mallopt(-3, 1 << 30):  # M_MMAP_THRESHOLD; old versions refuse so much
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError):
        pass


def memory_mb(device):
    """Peak memory of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    if sys.platform == "win32":
        return math.nan
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


def clock(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class Run:
    """One training run: its folder, model, optimizer, and the few numbers that say how far it is."""

    def __init__(self, settings, resuming, dry_run):
        self.settings, self.folder = settings, Path(settings["out"]).resolve()
        self.stop_signal = None
        self.order = None, None  # an epoch and its batches
        # All that changes while it trains, and all that a checkpoint needs beside weights and optimizer:
        self.state = dict(
            step=0, batches=0, skipped=0, best=None, stale=0, interval=[0.0, 0.0, 0], seconds=0.0, finished=False
        )
        self.device = tf.pick_device(settings["device"])
        if "threads" in settings:
            torch.set_num_threads(settings["threads"])
        if not (resuming or dry_run) and (self.folder / "last.pt").exists():
            raise ValueError(f"{self.folder} holds a run already: {self.command()}, or choose another --out")
        if not dry_run:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob(".*.tmp"):  # of a save that was killed
                stale.unlink()
            if not resuming:
                (self.folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that left no checkpoint
        mode = "a" if resuming else "w"
        self.log_file = open(os.devnull if dry_run else self.folder / "train.log", mode, encoding="utf-8")

    def command(self):
        return f"python train.py --resume {shlex.quote(str(self.folder))}"

    def log(self, text):
        """To stderr and train.log. A reader that has gone or a disk that is full must not end the training."""
        for file in (sys.stderr, self.log_file):
            try:
                print(text, file=file, flush=True)
            except OSError:
                pass

    # Before step 1: everything that one would want to know of a run a year later.

    def prepare(self, resume):
        s = self.settings
        self.commit = git_commit()
        self.versions = {
            name: metadata.version(name) for name in ("torch", "sentencepiece", "datasets", "sacrebleu", "numpy")
        }
        self.versions["python"] = sys.version.split()[0]
        self.log(f"commit {self.commit}   " + "   ".join(f"{k} {v}" for k, v in self.versions.items()))
        self.log("flags: " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in sorted(s.items())))
        corpus = Corpus(s)
        if resume is not None:
            self.model, self.tokenizer, rest = resume
            self.model.to(self.device)
        elif "init_from" in s:
            self.model, self.tokenizer, _ = tf.load_checkpoint(s["init_from"], self.device)
            if "dropout" in s:
                self.model.set_dropout(s["dropout"])
            s.update(asdict(self.model.config))
        else:
            lines = (text for pair in corpus.train for text in pair)
            self.tokenizer = tf.Tokenizer.train(lines, s["vocab_size"])
            if self.tokenizer.vocab_size < s["vocab_size"]:
                self.log(
                    f"this text gives {self.tokenizer.vocab_size} pieces, fewer than --vocab-size {s['vocab_size']}"
                )
            torch.manual_seed(s["seed"])
            sizes = {name: s[name] for name in SIZES}
            self.model = tf.Transformer(
                tf.Config(self.tokenizer.vocab_size, norm=s["norm"], max_len=s["max_len"], **sizes)
            )
            self.model.to(self.device)
        max_len = min(self.model.config.max_len, s["batch_tokens"])  # no pair may be larger than a batch
        self.train_rows, self.val_rows = corpus.encode(self.tokenizer, max_len)
        self.corpus, self.fingerprint = corpus, corpus.fingerprint()
        self.sampler = tf.TokenBatchSampler(
            *(rows.lengths + 1 for rows in self.train_rows), s["batch_tokens"], s["seed"]
        )
        if "epochs" in s:
            s["steps"] = max(1, math.ceil(s["epochs"] * len(self.sampler) / s["accumulate"]))
        self.optimizer = tf.adam(self.model)
        if resume is not None:
            if rest["data_fingerprint"] != self.fingerprint:
                raise ValueError(f"the data are not those that {self.folder} was trained on: their fingerprint differs")
            self.optimizer.load_state_dict(rest["optimizer"])
            self.state = rest["state"]
        self.report()

    def report(self):
        c, s = self.corpus, self.settings
        dropped = ", ".join(f"{rule} {n}" for rule, n in c.dropped.items() if n) or "none"
        self.log(f"read {c.read} pairs; dropped: {dropped}; training on {len(c.train)}, validating on {len(c.val)}")
        self.log(f"data fingerprint {self.fingerprint}")
        tokens = [int(rows.lengths.sum()) for rows in self.train_rows]
        ids = np.concatenate([rows.ids for rows in self.val_rows])
        unknown = (ids == tf.UNK).mean()
        by_bytes = ((ids > tf.UNK) & (ids <= tf.UNK + 256)).mean()  # characters that the tokenizer's text did not have
        epochs = s["steps"] * s["accumulate"] / len(self.sampler)
        self.log(
            f"vocabulary {self.tokenizer.vocab_size}, tokenizer {self.tokenizer.sha256[:16]}; tokens: source "
            f"{tokens[0]}, target {tokens[1]}, ratio {tokens[1] / tokens[0]:.2f}; "
            f"in validation: unknown {unknown:.2%}, spelled as bytes {by_bytes:.2%}"
        )
        if unknown + by_bytes > 0.01:
            self.log("warning: over 1% of the validation tokens stand for characters that this tokenizer never saw")
        for src, tgt in random.Random(s["seed"]).sample(c.train, min(3, len(c.train))):
            self.log(f"  source: {src}\n  target: {tgt}")
        self.log(f"model: {self.model.n_parameters():,} parameters, {self.model.config}")
        self.log(
            f"{len(self.sampler)} batches an epoch, {s['steps']} updates, {epochs:.1f} "
            f"epochs, on {self.device} with {torch.get_num_threads()} threads in {s['precision']}; into {self.folder}"
        )
        if epochs > 200:
            self.log("that is many epochs for so little text: --epochs or --patience end it earlier")

    # Validation: what counts is text, made the way a user will make it.

    def validate(self, kind="valid", step=None, samples=3):
        """Scores of the model as it stands; `step` says of which update it is, if not of the last."""
        start, budget = time.perf_counter(), self.settings["batch_tokens"]
        nll, tokens = tf.pairs_nll(self.model, *self.val_rows, budget)
        sources, references = zip(*self.corpus.val)
        # As translate.py does, but for the batch size, which changes no result: who has memory for little training has
        # memory for little search (which keeps no gradients, and so may have more).
        outputs = tf.translate(self.model, self.tokenizer, sources, batch_tokens=8 * budget)
        scores = dict(kind=kind, step=step or self.state["step"])
        scores |= dict(val_nll=nll / tokens, val_ppl=tf.perplexity(nll, tokens))
        scores |= tf.score_text(outputs, references)
        scores["distinct"] = len(set(outputs)) / len(outputs)  # all alike: the decoder does not listen to the encoder
        seconds = time.perf_counter() - start
        self.log(
            f"{kind} {scores['step']}: nll {scores['val_nll']:.4f}  ppl {scores['val_ppl']:.2f}  "
            f"BLEU {scores['bleu']:.2f}  chrF2++ {scores['chrf']:.2f}  exact {scores['exact']:.1%}  "
            f"distinct {scores['distinct']:.1%}  ({seconds:.0f} s)  "
            f"[{scores['bleu_signature']}] [{scores['chrf_signature']}]"
        )
        for i in random.Random(0).sample(range(len(outputs)), min(samples, len(outputs))):  # the same ones every time
            self.log(f"  source:    {sources[i]}\n  reference: {references[i]}\n  output:    {outputs[i]}")
        self.metric(dict(scores, seconds=seconds))
        return scores

    def metric(self, row):
        self.state["seconds"] = time.perf_counter() - self.began
        row["minutes"] = self.state["seconds"] / 60
        try:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            self.log(
                f"warning: {error.filename or 'metrics.jsonl'}: {error.strerror}; these numbers are only in the log"
            )

    def forget_later(self):
        """What was logged and kept after the checkpoint will come again, and the last line may be half a line."""
        path, kept = self.folder / "metrics.jsonl", []
        for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
            try:
                kept += [line + "\n"] if json.loads(line)["step"] <= self.state["step"] else []
            except ValueError:
                pass
        tf.write_atomically(path, lambda temporary: temporary.write_text("".join(kept), encoding="utf-8"))
        for path in self.folder.glob("step-*.pt"):
            if int(path.stem.removeprefix("step-")) > self.state["step"]:
                path.unlink()

    def keep_if_best(self, scores):
        """Save as best.pt what is better than all before. -> whether it was"""
        by, best = self.settings["best_by"], self.state["best"]
        new = -scores["val_nll"] if by == "nll" else scores[by]
        if not math.isfinite(new) or best is not None and new <= best:  # a tie keeps the earlier one
            return False
        self.state["best"] = new
        if not self.save("best.pt", optimizer=False):
            self.state["best"] = best  # the file is still the old one
        return True

    def save(self, name, optimizer=True):
        """Write a checkpoint into the run's folder -> whether it is there. A full disk costs this save, not the run."""
        rest = dict(
            state=dict(self.state),
            data_fingerprint=self.fingerprint,
            git_commit=self.commit,
            versions=self.versions,
            flags=self.settings,
        )
        if optimizer:
            rest["optimizer"] = self.optimizer.state_dict()
        try:
            tf.save_checkpoint(self.folder / name, self.model, self.tokenizer, **rest)
        except OSError as error:
            old = "the older file stays" if (self.folder / name).exists() else "there is no older one"
            self.log(f"warning: {error}; {old}; training goes on")
            return False
        return True

    # One update.

    def update(self):
        """Forward, backward, one step of Adam. -> sums over the update, gradient norm (of the mean loss), rate; or None
        if a number was not finite, in which case nothing has changed but the position in the data."""
        s, state = self.settings, self.state
        step = state["step"] + 1
        # What this update draws depends on (seed, step) alone, so a resumed run draws what the unbroken one would have.
        torch.manual_seed(int(np.random.SeedSequence([s["seed"], step]).generate_state(1, np.uint64)[0] >> 1))
        batches = []
        for _ in range(s["accumulate"]):
            epoch, b = divmod(state["batches"], len(self.sampler))
            batches.append(tf.collate(*self.train_rows, self.epoch_batches(epoch)[b]))
            state["batches"] += 1
        tokens = sum(int((tgt_out != tf.PAD).sum()) for _, _, tgt_out in batches)
        smoothed = nll = 0.0
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=s["precision"] == "bf16"):
                sums = tf.training_loss(self.model, *(x.to(self.device) for x in batch), s["label_smoothing"])
            # by the tokens of the whole update: a mean of batch means would favour the tokens of small batches
            (sums.smoothed / tokens).backward()
            smoothed, nll = smoothed + sums.smoothed.item(), nll + sums.nll.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s["clip"] or math.inf).item()
        rate = s["rate_scale"] * tf.noam_rate(step, self.model.config.d_model, s["warmup_steps"])
        finite = math.isfinite(norm) and math.isfinite(smoothed)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            state["step"] = step
        self.optimizer.zero_grad()
        return (smoothed, nll, tokens, norm, rate) if finite else None

    def epoch_batches(self, epoch):
        if self.order[0] != epoch:
            self.order = epoch, self.sampler.epoch(epoch)
        return self.order[1]

    # The loop around it.

    def train(self):
        s, state = self.settings, self.state
        self.model.train()
        failures, start, start_step = 0, time.perf_counter(), state["step"]
        self.began = start - state["seconds"]  # as if the run had never been interrupted
        since, heard = start, 0  # for the speed: when the last log line was, and target tokens since
        while state["step"] < s["steps"] and not self.out_of_patience():
            result = self.update()
            if result is None:
                state["skipped"] += 1
                failures += 1
                self.log(f"warning: loss or gradient is not finite after step {state['step']}: update skipped")
                if failures == 10:
                    raise ValueError(
                        "ten updates in a row were not finite; the last checkpoint is untouched. Try a smaller "
                        "--rate-scale, more --warmup-steps, a smaller --clip or --norm pre"
                    )
                continue
            failures = 0
            smoothed, nll, tokens, norm, rate = result
            state["interval"] = [total + x for total, x in zip(state["interval"], (smoothed, nll, tokens))]
            step, heard = state["step"], heard + tokens
            if step % s["log_every"] == 0 or step == s["steps"]:
                now = time.perf_counter()
                total, total_nll, n = state["interval"]
                speed, left = heard / (now - since), (now - start) / (step - start_step) * (s["steps"] - step)
                row = dict(
                    step=step,
                    epoch=state["batches"] / len(self.sampler),
                    loss=total / n,
                    nll=total_nll / n,
                    rate=rate,
                    grad_norm=norm,
                    tokens_per_second=speed,
                    memory_mb=memory_mb(self.device),
                    skipped=state["skipped"],
                )
                self.log(
                    f"step {step}/{s['steps']}  epoch {row['epoch']:.2f}  loss {row['loss']:.4f}  "
                    f"nll {row['nll']:.4f}  rate {rate:.2e}  grad {norm:.2f}  {speed:.0f} tok/s  "
                    f"{row['memory_mb']:.0f} MB  left {clock(left)}"
                )
                self.metric(row)
                state["interval"], since, heard = [0.0, 0.0, 0], now, 0
            evaluate = step % s["eval_every"] == 0 or step == s["steps"]
            if evaluate:
                pause = time.perf_counter()
                self.checkpoint_validation(self.validate())
                start, since = (t + time.perf_counter() - pause for t in (start, since))  # not training time
            if evaluate or step % s["save_every"] == 0 or self.stop_signal:  # after it: the best score belongs to it
                self.save("last.pt")
            if self.stop_signal:
                self.log(f"stopped by a signal at step {step}; go on with: {self.command()}")
                raise SystemExit(128 + self.stop_signal)
        if self.out_of_patience():
            self.log(f"no better {s['best_by']} for {s['patience']} validations: stopping early")

    def out_of_patience(self):
        return 0 < self.settings["patience"] <= self.state["stale"]

    def checkpoint_validation(self, scores):
        state, keep = self.state, max(self.settings["keep"], self.settings["average"])
        if keep:
            self.save(f"step-{state['step']:08}.pt", optimizer=False)
            for old in sorted(self.folder.glob("step-*.pt"))[:-keep]:
                old.unlink(missing_ok=True)
        state["stale"] = 0 if self.keep_if_best(scores) else state["stale"] + 1

    def finish(self):
        """Averaging, the verdict on the best checkpoint, and what to try next. -> exit status"""
        paths = sorted(self.folder.glob("step-*.pt"))[-self.settings["average"] :] if self.settings["average"] else []
        if len(paths) > 1:
            self.log(f"average of the last {len(paths)} checkpoints:")
            last, self.model = self.model, tf.average_checkpoints(paths, self.device)[0]
            self.keep_if_best(self.validate("average", samples=0))
            self.save("average.pt", optimizer=False)  # in any case: one validation set is a noisy judge
            self.model = last
        self.state["finished"] = True
        self.save("last.pt")  # with the best score so far: a longer run has to beat it
        best, step = self.folder / "best.pt", self.state["step"]
        if best.exists():
            self.model, _, rest = tf.load_checkpoint(best, self.device)
            step = rest["state"]["step"]
        else:
            self.log("warning: best.pt could not be saved or was removed; the last weights stand in for it")
        scores = self.validate("best", step, samples=10)
        if "overfit" in self.settings:
            done = scores["exact"] == 1.0
            self.log(
                f"{'memorised' if done else 'NOT memorised'}: {scores['exact']:.0%} of {len(self.corpus.val)} pairs "
                f"come back exactly"
            )
            return 0 if done else 1
        self.publish(scores)
        self.log(f"try: python translate.py --checkpoint {shlex.quote(str(best))} {shlex.quote(self.corpus.val[0][0])}")
        return 0

    def publish(self, scores):
        """In the folder above: a table of runs, best first, and a link to the newest best checkpoint."""
        board, link = self.folder.parent / "leaderboard.json", self.folder.parent / "best.pt"
        row = dict(
            run=self.folder.name, data_fingerprint=self.fingerprint, parameters=self.model.n_parameters(), **scores
        )
        try:
            rows = json.loads(board.read_text(encoding="utf-8")) if board.exists() else []
            rows = [old for old in rows if old["run"] != row["run"]] + [row]
            rows.sort(key=lambda r: (r["data_fingerprint"], -r["chrf"]))  # scores on other data cannot be compared
            tf.write_atomically(
                board, lambda path: path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            )
        except (ValueError, KeyError, TypeError):
            self.log(f"{board} is not a leaderboard of this program, and is left alone")
        except OSError as error:
            self.log(f"warning: {board}: {error.strerror}")
        if link.exists() and not link.is_symlink():  # somebody's checkpoint, perhaps another run's own
            self.log(f"{link} is a file and not our link: it is left alone")
            return
        try:
            tf.write_atomically(link, lambda path: path.symlink_to(Path(self.folder.name) / "best.pt"))
        except OSError as error:  # a file system without links: translate.py then looks for the newest itself
            self.log(f"no link {link}: {error.strerror}")


SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


def handle_signals(run):
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) ends the run after its update, the second ends it at once
    (no file is ever half written)."""

    def stop(number, _):
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        run.stop_signal = number
        try:
            os.write(2, b"stopping after this update; once more to stop at once\n")  # print may not be entered twice
        except OSError:  # the terminal has gone
            pass

    for each in SIGNALS:
        signal.signal(each, stop)


def resume_settings(given):
    """-> settings of a stopped run with the allowed changes, and its checkpoint."""
    folder = Path(given.pop("resume"))
    path = folder / "last.pt" if folder.is_dir() else folder
    checkpoint = tf.load_checkpoint(path, "cpu")
    if not {"optimizer", "state", "flags", "data_fingerprint"} <= set(checkpoint[2]):
        raise ValueError(f"{path} is not the last.pt of a run: there is nothing to go on from")
    settings = dict(checkpoint[2]["flags"], out=str(path.parent))
    for name, value in given.items():
        if name not in MAY_CHANGE and settings.get(name) != value:
            raise ValueError(
                f"--{name.replace('_', '-')} cannot change on --resume (it was {settings.get(name, 'not given')}); "
                f"start anew, with --init-from {path.parent}/best.pt to keep the weights"
            )
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in given:
            settings.pop(other, None)
    return settings | given, checkpoint


def main(argv=None):
    tf.prepare_streams()
    given = parse_arguments(argv)
    try:
        if "steps" in given and "epochs" in given:
            raise ValueError("--steps and --epochs exclude each other")
        resume, dry_run = None, given.pop("dry_run", False)
        if "resume" in given:
            settings, resume = resume_settings(given)
        else:
            settings = settings_of(given)
        keep_freed_memory()
        run = Run(settings, resume is not None, dry_run)
        run.prepare(resume)
        if dry_run:
            run.log("dry run: nothing was written")
            return 0
        if resume is None:
            tf.write_atomically(
                run.folder / "config.json",
                lambda path: path.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8"),
            )
        else:
            run.log(f"resumed at step {run.state['step']}")
            if run.state["finished"] and (run.state["step"] >= settings["steps"] or run.out_of_patience()):
                run.log(f"already at step {run.state['step']} of {settings['steps']}; raise --steps to go on")
                return 0
            run.state["finished"] = False
            run.forget_later()
        handle_signals(run)
        run.train()
        for each in SIGNALS:  # the run is saved: there is nothing left to finish first
            signal.signal(each, signal.SIG_DFL)
        return run.finish()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        print(f"train.py: {tf.explain(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
