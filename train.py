"""Train a Transformer on parallel text: flags, data, loop, validation, logs. The model and its search are in
transformer.py.

    python train.py                                    the demo corpus, English to Bengali, in minutes
    python train.py --src a.en --tgt a.de --val-src b.en --val-tgt b.de --out runs/x
    python train.py --data pairs.tsv                   source, tab, target; validation is split off
    python train.py --resume runs/x                    go on exactly where it stopped
    torchrun --nproc_per_node 2 train.py ...           several processes or machines
"""

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C while all this is imported ends it without a traceback

import argparse
import csv
import ctypes
import errno
import glob
import gzip
import hashlib
import heapq
import html
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import unicodedata
import zipfile
import zlib
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import transformer as tf

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

HERE = Path(__file__).resolve().parent
DEMO = HERE / "data" / "demo.tsv"

# What a flag that is not given stands for; without any data the demo's values come first. A model's sizes come from
# its preset.
# fmt: off
DEFAULTS = dict(
    dataset_split="train", max_ratio=3.0, tokenizer_kind="bpe", tokenizer_sample=250000, vocab_size=8000,
    preset="small", norm="post", max_len=256, steps=20000, batch_tokens=4096, accumulate=1,
    warmup_steps=1000, rate_scale=0.6, label_smoothing=0.1, clip=1.0, patience=0, average=0, eval_every=1000,
    save_every=500, log_every=50, keep=0, best_by="chrf", seed=1, device="auto", precision="fp32",
)
DEMO_DEFAULTS = dict(
    data=[str(DEMO)], preset="tiny", dropout=0.1, vocab_size=1000, val_pairs=500, steps=1200, batch_tokens=2048,
    warmup_steps=300, rate_scale=0.4, eval_every=400,
)
# fmt: on
SIZES = ("d_model", "n_heads", "d_ff", "n_layers", "dropout")
FILES = ("src", "tgt", "data", "val_src", "val_tgt", "test_src", "test_tgt")  # lists
PATHS = {"init_from", "tokenizer", "cache"}
# A resumed run may be longer, be saved and logged at other times, or find its data in another place (their fingerprint
# decides whether they are the same). What makes it another run than the unbroken one would have been needs
# --allow-changes. All else is fixed by its checkpoint.
MAY_CHANGE = {"steps", "epochs", "patience", "average", "keep", "log_every", "save_every", "tensorboard"}
MAY_CHANGE |= {*FILES, "dataset", "cache"}
BREAKS_EXACTNESS = {"batch_tokens", "accumulate", "warmup_steps", "rate_scale", "label_smoothing", "clip", "dropout"}
BREAKS_EXACTNESS |= {"seed", "eval_every", "best_by", "device", "precision", "threads", "processes"}


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        "train.py",
        usage="train.py [flags], each of which --help explains",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )

    count, natural, fraction = tf.number(int, 1, 2**31), tf.number(int, 0, 2**31), tf.number(float, 0, 1)
    positive, real = tf.number(float, 1e-9, 1e6), tf.number(float, 0, 1e6)

    def flag(group, name, kind, text, **more):
        default = DEFAULTS.get(name[2:].replace("-", "_"))
        group.add_argument(name, type=kind, help=text + ("" if default is None else f" (default {default})"), **more)

    def switch(group, name, text):
        group.add_argument(name, action="store_true", help=text)

    def several(group, name, kind, metavar, text, **more):
        group.add_argument(name, nargs="+", action="extend", type=kind, metavar=metavar, help=text, **more)

    def files(group, name, text):
        several(group, name, not_empty, "FILE", text)

    data = parser.add_argument_group(
        "data: line-aligned files, or files of pairs, or a hub set; several files or a 'pattern*' each; .gz too"
    )
    files(data, "--src", "source sentences, one a line")
    files(data, "--tgt", "their translations, line by line")
    files(data, "--data", "pairs: .tsv (source, tab, target), .csv, .jsonl or .parquet")
    flag(data, "--dataset", not_empty, "name of a set on the Hugging Face hub, or a folder laid out as one")
    flag(data, "--dataset-config", str, "its configuration")
    flag(data, "--dataset-split", str, "its split to train on")
    flag(data, "--src-field", str, "name of the source column (for .tsv: the first line is then a header)")
    flag(data, "--tgt-field", str, "name of the target column")
    switch(data, "--no-header", "the first line of a .csv is a pair too: source, target")
    flag(data, "--max-pairs", count, "use at most this many pairs, chosen at random by --seed")
    files(data, "--val-src", "validation sources")
    files(data, "--val-tgt", "validation targets")
    flag(data, "--val-split", str, "split of the hub set to validate on")
    flag(data, "--val-pairs", count, "without any of these: split off this many pairs (default a tenth, <= 1000)")
    files(data, "--test-src", "test sources, for translate.py to score later: kept out of training here")
    files(data, "--test-tgt", "test targets")
    switch(data, "--dry-run", "report on the data and the sizes, then stop")
    flag(data, "--overfit", count, "memorise this many pairs and say whether it worked: a test of the whole chain")
    flag(
        data,
        "--cache",
        not_empty,
        "folder for prepared data (default: cache beside the run's); may be deleted at any time",
    )

    clean = parser.add_argument_group("cleaning: each dropped pair is counted under a rule; see --dry-run")
    rules = "; ".join(f"{rule} ({text})" for rule, text in RULES.items())
    several(clean, "--allow", str, "RULE", f"rules not to apply: {rules}", choices=RULES)
    flag(clean, "--max-ratio", tf.number(float, 1, 1e6), "factor by which a pair's length ratio may miss the median")
    switch(clean, "--unescape", "turn HTML entities (&amp;) into characters")
    switch(clean, "--skip-bad-lines", "count and skip what is no UTF-8, no JSON or lacks a column, instead of stopping")
    flag(clean, "--max-len", count, "longest sentence in tokens, EOS included")

    pieces = parser.add_argument_group("tokenizer")
    flag(pieces, "--vocab-size", count, "pieces of the vocabulary")
    pieces.add_argument("--tokenizer-kind", choices=["bpe", "unigram"], help="SentencePiece's algorithm (default bpe)")
    flag(pieces, "--tokenizer-sample", count, "learn it from at most this many pairs, chosen at random")
    switch(pieces, "--separate-vocabularies", "one for each language, --vocab-size each, instead of a shared one")
    several(pieces, "--tags", str, "TAG", "words to keep whole, as <2bn> to ask for a language")
    flag(pieces, "--tokenizer", not_empty, "take this one: a SentencePiece model, or a checkpoint that has one")

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
    flag(run, "--save-every", steps_or_minutes, "updates between saves of last.pt, or minutes: 10m")
    flag(run, "--keep", natural, "keep the weights of the last N validations (at least what --average needs)")
    flag(run, "--log-every", count, "updates between log lines")
    flag(run, "--out", not_empty, "folder of the run (default runs/<time>-<name of the data>)")
    flag(run, "--resume", not_empty, "folder of a run to go on with")
    switch(run, "--allow-changes", "let --resume change what makes it another run: rate, batches, precision ...")
    flag(run, "--init-from", not_empty, "checkpoint whose weights and tokenizer to start from")
    flag(run, "--seed", natural, "decides the split, the order, the initial weights and the dropout")
    run.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], help="auto (default): the best there is")
    run.add_argument(
        "--precision",
        choices=["fp32", "bf16", "fp16"],
        help="products in half precision, several times faster where the hardware has it; bf16 if it can",
    )
    flag(run, "--threads", tf.number(int, 1, 1025), "CPU threads (default: PyTorch's choice)")
    switch(run, "--tensorboard", "write the numbers of metrics.jsonl for TensorBoard too")
    given = vars(parser.parse_args(argv))
    for name in set(given) & PATHS:  # as a resume from another folder needs them
        given[name] = os.path.abspath(given[name])
    if "dataset" in given and os.path.exists(given["dataset"]):
        given["dataset"] = os.path.abspath(given["dataset"])
    return given


def not_empty(text):
    """An unset variable of the shell is no name of a file."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def steps_or_minutes(text):
    """500 -> 500; 10m -> 10m"""
    if not re.fullmatch(r"[1-9]\d{0,8}|\d{1,6}(\.\d+)?m", text) or text.endswith("m") and float(text[:-1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is neither a number of updates (500) nor of minutes (10m)")
    return text if text.endswith("m") else int(text)


SOURCES = ("src", "data", "dataset")


def check_sources(given):
    """Flags of the data that belong together or exclude each other -> the source that is named, in a list."""
    for one, other in (("src", "tgt"), ("val_src", "val_tgt"), ("test_src", "test_tgt"), ("src_field", "tgt_field")):
        if (one in given) != (other in given):
            raise ValueError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} go together")
    sources = [name for name in SOURCES if name in given]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]} exclude each other: one corpus at a time")
    if "dataset" in given and os.path.isfile(given["dataset"]):
        raise ValueError(f"{given['dataset']} is a file: give it as --data")
    return sources


def check_numbers(given):
    if given.get("average") == 1:
        raise ValueError("--average needs at least 2 checkpoints")
    if "steps" in given and "epochs" in given:
        raise ValueError("--steps and --epochs exclude each other")


def settings_of(given):
    """Flags as given -> every setting. A demo run is one without any data of the user's."""
    sources = check_sources(given)
    for one, other, why in (
        ("val_pairs", "val_src", "with validation files there is nothing to split off"),
        ("val_pairs", "val_split", "with validation data there is nothing to split off"),
        ("val_src", "val_split", "one validation set at a time"),
        ("val_split", "overfit", "what is memorised is also what is asked"),
        ("no_header", "src_field", "without a header columns have no names"),
        ("tokenizer", "init_from", "the checkpoint brings its own"),
        ("val_pairs", "overfit", "what is memorised is also what is asked"),
        ("val_src", "overfit", "what is memorised is also what is asked"),
        ("src_field", "src", "plain text has no columns"),
    ):
        if one in given and other in given:
            raise ValueError(f"--{one.replace('_', '-')} and --{other.replace('_', '-')} exclude each other: {why}")
    for name in ("dataset_config", "dataset_split", "val_split"):
        if name in given and "dataset" not in given:
            raise ValueError(f"--{name.replace('_', '-')} needs --dataset")
    check_numbers(given)
    if "src_field" in given and given["src_field"] == given["tgt_field"]:
        raise ValueError(f"--src-field and --tgt-field are both {given['src_field']!r}")
    sizes = {"preset", "d_model", "n_heads", "d_ff", "n_layers", "norm", "max_len"}
    pieces = {"vocab_size", "tokenizer_kind", "tokenizer_sample", "separate_vocabularies", "tags"}
    for name, fixed in (("init_from", sizes | pieces), ("tokenizer", pieces)):
        if name in given and fixed & set(given):
            other = min(fixed & set(given)).replace("_", "-")
            raise ValueError(f"--{other} is decided by what --{name.replace('_', '-')} brings")
    given = expand_files(given)
    if "no_header" in given and not any(suffix_of(path) == ".csv" for path in given.get("data", ())):
        raise ValueError("--no-header is about .csv files")
    if "allow" in given:
        given["allow"] = sorted(set(given["allow"]))
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
        first = "demo" if not sources else settings["dataset"] if "dataset" in settings else settings[sources[0]][0]
        name = Path(first).name.split(".")[0]
        settings["out"] = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    return settings


# --- Helpers -------------------------------------------------------------------------------------------------------


@contextmanager
def locked(path, wait=True):
    """Hold the lock that this file stands for; it goes with the process, however that ends. Without waiting, raises
    BlockingIOError where another holds it."""
    with open(path, "a", encoding="utf-8") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            pass
        yield


def blocks_of(path):
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


def sha256(path):
    digest = hashlib.sha256()
    for block in blocks_of(path):
        digest.update(block)
    return digest.hexdigest()


def crc32(path):
    total = 0
    for block in blocks_of(path):
        total = zlib.crc32(block, total)
    return total


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


# --- Data: reading -------------------------------------------------------------------------------------------------
# Whatever the source, what comes out is a stream of (source, target) as they stand there, and nothing of it is held.
# Text, TSV, CSV and JSON lines are read here, by the line rule of tf.read_lines: the readers of the `datasets` library
# also end a line at a lone CR, take a quote in a TSV for syntax, and guess types. Parquet and hub sets it reads itself.


def expand_files(given):
    """Settings with every name and pattern of a file as an absolute name. A file of the very name is no pattern."""
    out = dict(given)
    for name in set(FILES) & set(given):
        out[name] = []
        for path in given[name]:
            found = [path] if os.path.exists(path) or not glob.has_magic(path) else sorted(glob.glob(path))
            if not found:
                raise ValueError(f"{path} matches no file")
            for each in found:  # a pipe would be empty the second time
                os.stat(each)  # a missing file is told before anything is made
                if not os.path.isfile(each):
                    raise ValueError(f"{each} is not a plain file, and data are read more than once")
            out[name] += map(os.path.abspath, found)
    for path in out.get("data", ()):
        if suffix_of(path) not in (".tsv", ".csv", ".jsonl", ".parquet"):
            raise ValueError(f"{path}: the name must end in .tsv, .csv, .jsonl or .parquet (and .gz)")
    return out


def suffix_of(path):
    return Path(path.removesuffix(".gz")).suffix


def read_pairs(s, note=lambda text: None, split="dataset_split"):
    """Settings -> every pair of the training source, in order; None stands for a bad line that is to be skipped. `note`
    gets what the user should know of how it was read."""
    if "src" in s:
        yield from read_aligned(s["src"], s["tgt"], s)
    elif "dataset" in s:
        yield from read_table(hub_set(s, s[split]), s["dataset"], s, note)
    else:
        for path in s["data"]:
            yield from {".tsv": read_tsv, ".csv": read_csv, ".jsonl": read_jsonl}.get(suffix_of(path), read_parquet)(
                path, s, note
            )


def read_lines(path, s):
    return tf.read_text(path, "surrogateescape" if "skip_bad_lines" in s else "strict")


def bad_line(path, number, what, s):
    if "skip_bad_lines" not in s:
        raise ValueError(f"{path}, line {number}: {what}; --skip-bad-lines skips and counts such lines")


def read_aligned(sources, targets, s):
    """Line N of a source file with line N of its target file."""
    if len(sources) != len(targets):
        raise ValueError(f"{len(sources)} source files and {len(targets)} target files: they are not file by file")
    for paths in zip(sources, targets):
        sides = [read_lines(path, s) for path in paths]
        for number, pair in enumerate(itertools.zip_longest(*sides), 1):
            if None in pair:  # count the rest, for the message
                n = [number - (line is None) + sum(1 for _ in side) for line, side in zip(pair, sides)]
                raise ValueError(f"{paths[0]} has {n[0]} lines and {paths[1]} has {n[1]}: they are not line by line")
            yield pair


def read_tsv(path, s, note):
    lines = enumerate(read_lines(path, s), 1)
    src, tgt = 0, 1
    if "src_field" in s:
        header = next(lines, (0, ""))[1].split("\t")
        src, tgt = map(header.index, fields_of(header, {}, path, s, note))
    for number, line in lines:
        row = line.split("\t")
        if len(row) > max(src, tgt):
            yield row[src], row[tgt]
        elif not line:  # a blank line is a pair with empty sides, to be dropped and counted as such
            yield "", ""
        else:
            yield bad_line(path, number, f"{len(row)} column(s) where {max(src, tgt) + 1} are needed", s)


def read_csv(path, s, note):
    csv.field_size_limit(1 << 30)
    lines = (line.replace("\r", " ") + "\n" for line in read_lines(path, s))  # for this module a lone CR ends a row
    reader = csv.reader(lines, strict=True)  # a quote that never closes is an error, not one long field

    def rows():
        while True:
            number = reader.line_num + 1
            try:
                yield number, next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error):
                    raise ValueError(f"{path}, line {number}: a quote opens and never closes") from None
                yield number, bad_line(path, number, str(error), s)

    rows, src, tgt = rows(), 0, 1
    if "no_header" not in s:
        header = next(rows, (1, []))[1] or []
        src, tgt = map(header.index, fields_of(header, {}, path, s, note))
    for number, row in rows:
        if row is None or len(row) > max(src, tgt):
            yield row and (row[src], row[tgt])
        elif not row:
            yield "", ""
        else:
            yield bad_line(path, number, f"{len(row)} column(s) where {max(src, tgt) + 1} are needed", s)


def read_jsonl(path, s, note):
    """Line by line with the json module, which leaves strings as they are and knows the line of a fault. Also in the
    hub's nested form, {"translation": {"en": ..., "bn": ...}}."""

    def rows():
        for number, line in enumerate(read_lines(path, s), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("not an object with named fields")
                except (ValueError, RecursionError) as error:
                    row = bad_line(path, number, str(error), s)
                if row is not None and isinstance(row.get("translation"), dict):
                    row |= row.pop("translation")
                yield number, row

    stream, first, sample = rows(), [], {}
    for number, row in stream:  # a field may be null in some: look at a thousand
        first.append((number, row))
        for name, value in (row or {}).items():
            sample[name] = value if sample.get(name) is None else sample[name]
        if len(first) >= 1000 and sample:
            break
    src, tgt = fields_of(sample, sample, path, s, note) if sample else ("", "")
    for number, row in itertools.chain(first, stream):
        if row is not None and not {src, tgt} <= set(row):
            row = bad_line(path, number, f"it has no field {(src if src not in row else tgt)!r}", s)
        yield None if row is None else texts_of((row[src], row[tgt]), path, number, s)


def read_parquet(path, s, note):
    import datasets

    with tempfile.TemporaryDirectory() as folder:
        plain = path
        if path.endswith(".gz"):  # the library cannot
            plain = os.path.join(folder, "plain.parquet")
            try:
                with gzip.open(path) as packed, open(plain, "wb") as out:
                    shutil.copyfileobj(packed, out)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{path} is cut short or damaged: {error}") from None
        with clear_errors(path):  # streaming: read from where it lies, without a copy in the library's cache
            table = datasets.load_dataset("parquet", data_files=glob.escape(plain), split="train", streaming=True)
        yield from read_table(table, path, s, note)


def hub_set(s, split):
    """A set of the Hugging Face hub, or a folder laid out as one, memory-mapped by the library from its cache."""
    import datasets

    with clear_errors(s["dataset"]):
        return datasets.load_dataset(s["dataset"], s.get("dataset_config"), split=split, keep_in_memory=False)


@contextmanager
def clear_errors(name):
    """The library's errors have many classes and long texts: one line of the cause, and what to do."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        if "script" in reason:
            reason += "; give a copy of the set in parquet files (--data), or another set"
        raise ValueError(f"{name} cannot be read: {reason}") from None


def read_table(table, name, s, note):
    """A table of the library -> pairs; also in the hub's nested form, a column `translation` of {language: text}."""
    batches, number, fields = table.iter(batch_size=1000), 0, None
    while True:
        with clear_errors(name):
            batch = next(batches, None)
        if batch is None:
            return
        if "translation" in batch and any(isinstance(row, dict) for row in batch["translation"]):
            rows = [row or {} for row in batch["translation"]]
            batch = {field: [row.get(field) for row in rows] for field in dict.fromkeys(itertools.chain(*rows))}
        if fields is None:
            sample = {field: next((x for x in values if x is not None), None) for field, values in batch.items()}
            fields = fields_of(sample, sample, name, s, note)
        nothing = [None] * len(next(iter(batch.values())))
        for values in zip(*(batch.get(field, nothing) for field in fields)):
            number += 1
            yield texts_of(values, name, number, s)


def texts_of(values, name, number, s):
    """Values of a row -> texts: null is empty, a number is what it looks like; anything else makes a bad line."""
    for value in values:
        if value is not None and not isinstance(value, (str, int, float)):
            return bad_line(name, number, f"a {type(value).__name__} where text should be", s)
        if isinstance(value, str) and SURROGATE.search(value):
            return bad_line(name, number, "half a character (a lone surrogate)", s)
    return tuple("" if value is None else str(value) for value in values)


def fields_of(columns, sample, name, s, note):
    """Which two columns: as the flags say, or the obvious ones, by name and by what `sample` has of them (a reader of
    texts has nothing to sample: all are text)."""
    if "src_field" in s:
        for field in (s["src_field"], s["tgt_field"]):
            if list(columns).count(field) != 1:
                has = "no column" if field not in columns else "more than one column"
                raise ValueError(f"{name} has {has} {field!r}; it has {', '.join(columns) or 'none'}")
        return s["src_field"], s["tgt_field"]
    text = [field for field in columns if isinstance(sample.get(field, ""), str)]
    languages = [field for field in text if re.fullmatch(r"[a-z]{2,3}([-_]\w+)?", field)]
    for fields in (["src", "tgt"], ["source", "target"], text, languages):
        if len(set(fields)) == len(fields) == 2 and set(fields) <= set(columns):
            note(f"columns: source = {fields[0]!r}, target = {fields[1]!r}, guessed; --src-field and --tgt-field say")
            return tuple(fields)
    raise ValueError(f"{name}: say --src-field and --tgt-field; its columns are {', '.join(columns) or 'none'}")


# --- Data: cleaning ------------------------------------------------------------------------------------------------
# The normalised text of all pairs is written to two plain files, and what the rules need to know of each goes into a
# flat array of 36 bytes a pair, so that they can look at the whole corpus: what is usual in it decides what is odd.

# A pair counts under the first rule that it breaks. --allow turns off those in RULES; the others have flags of their
# own (--skip-bad-lines, --max-len), or nothing could be done with such a pair.
RULES = dict(
    control="control characters or U+FFFD",  # white space aside
    entities="HTML entities",
    markup="mark-up",
    identical="identical sides",
    repeated="repeated pair",
    script="unusual script",  # on either side
    ratio="unusual length ratio",
)
BAD, EMPTY, LEAK, LONG = "bad line", "empty side", "in validation or test", "over the length limit"
VERDICTS = ["kept", BAD, EMPTY, *RULES.values(), LEAK, LONG]  # the verdict on a pair is a position in this list

ENTITY = re.compile(r"&(?:[a-zA-Z][a-zA-Z0-9]{1,30}|#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6});")
MARKUP = re.compile(r"</?[a-zA-Z][^<>]*>|<!--|\[\[|\]\]|\{\{|\}\}|\{\||\|\}|'''|\[https?:")  # HTML and wiki
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
SURROGATE = re.compile("[\ud800-\udfff]")  # no text has one: a byte that was not UTF-8, or a broken JSON escape
FACTS = np.dtype(
    [("hash", "u8", 2), ("chars", "i4", 2), ("words", "i4", 2), ("script", "u1", 2), ("tag", "u1"), ("verdict", "u1")]
)


class Characters:
    """Kinds of characters, from the Unicode database: for letters, the script, which is the first word of a letter's
    name ("BENGALI LETTER KA"). Japanese mixes three: they count as one, CJK."""

    OTHER, NEWLINE, SPACE, CONTROL, UNSEEN = 0, 1, 2, 3, 255

    def __init__(self):
        self.kinds = np.full(0x110000, self.UNSEEN, np.uint8)
        self.names = ["none", "newline", "space", "control"]

    def of(self, text):
        """Text -> the kind of each character (uint8)."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        kinds = self.kinds[codes]
        if (kinds == self.UNSEEN).any():
            for code in np.unique(codes[kinds == self.UNSEEN]):
                self.kinds[code] = self.look_up(chr(code))
            kinds = self.kinds[codes]
        return kinds

    def look_up(self, char):
        if char in "\n ":
            return self.NEWLINE if char == "\n" else self.SPACE
        if unicodedata.category(char) == "Cc" or char == "\ufffd":
            return self.CONTROL
        name = unicodedata.name(char, "none").split()[0]
        if unicodedata.category(char)[0] not in "LM" or name in ("none", "COMBINING", "VARIATION"):
            return self.OTHER
        name = {"HIRAGANA": "CJK", "KATAKANA": "CJK"}.get(name, name)
        if name not in self.names and len(self.names) < self.UNSEEN:
            self.names.append(name)
        return self.names.index(name) if name in self.names else self.OTHER

    def count(self, lines):
        """Normalised lines -> characters, words, control characters, and the script most letters are in, of each."""
        kinds = self.of("".join(line + "\n" for line in lines))
        ends, width = kinds == self.NEWLINE, len(self.names)
        row = np.cumsum(ends) - ends
        counts = np.bincount(row * width + kinds, minlength=len(lines) * width).reshape(len(lines), width)
        chars, letters = counts.sum(1) - 1, counts[:, self.CONTROL + 1 :]
        script = np.zeros(len(lines), np.uint8)
        if letters.size:
            script = np.where(letters.any(1), letters.argmax(1) + self.CONTROL + 1, self.OTHER)
        return chars, counts[:, self.SPACE] + (chars > 0), counts[:, self.CONTROL], script


def hash_of(text):
    """64 bits that stand for a text: among 40 million, two share them by accident once in 20,000 corpora."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class Cleaner:
    """Chunks of raw pairs -> normalised text and FACTS; then verdicts over all of them."""

    def __init__(self, settings):
        self.settings, self.characters = settings, Characters()
        self.rules = set(RULES) - set(settings.get("allow", ()))
        self.tags = ["", *settings.get("tags", ())]
        self.scripts, self.usual_ratio = [[], []], {}

    def look(self, pairs):
        """Raw pairs -> sources, targets, facts. The verdict is, so far, of what can be told from a pair alone."""
        facts = np.zeros(len(pairs), FACTS)
        bad = [pair is None or any(map(SURROGATE.search, pair)) for pair in pairs]
        sides, broken = [], {rule: np.zeros(len(pairs), bool) for rule in ("control", "entities", "markup")}
        for side in (0, 1):
            lines = ["" if skip else pair[side] for pair, skip in zip(pairs, bad)]
            broken["control"] |= np.array(["\0" in line for line in lines], bool)  # what normalising takes for a space
            if "unescape" in self.settings:
                lines = [unescape(line) if "&" in line else line for line in lines]
            lines = [tf.normalize(line) for line in lines]
            sides.append(lines)
            chars, words, control, script = self.characters.count(lines)
            facts["chars"][:, side], facts["words"][:, side], facts["script"][:, side] = chars, words, script
            if side == 0:
                facts["tag"] = [self.tags.index(self.tag_of(line)) for line in lines]
            lines = [
                line.removeprefix(self.tag_of(line)).lstrip() for line in lines
            ]  # it asks for a language, and is no text
            facts["hash"][:, side] = np.frombuffer(b"".join(map(hash_of, lines)), np.uint64)
            broken["control"] |= control > 0
            for rule, pattern in (("entities", ENTITY), ("markup", MARKUP)):
                broken[rule] |= np.array([pattern.search(line) is not None for line in lines], bool)
        # a number is its own translation; a line with letters hardly ever
        broken["identical"] = (facts["hash"][:, 0] == facts["hash"][:, 1]) & facts["script"].any(1)
        for rule in reversed(broken):
            if rule in self.rules:
                facts["verdict"][broken[rule]] = VERDICTS.index(RULES[rule])
        facts["verdict"][(facts["chars"] == 0).any(1)] = VERDICTS.index(EMPTY)
        facts["verdict"][bad] = VERDICTS.index(BAD)
        return *sides, facts

    def tag_of(self, line):
        """The tag that a line begins with, or nothing."""
        return next((tag for tag in self.tags[1:] if line.startswith(tag)), "") if len(self.tags) > 1 else ""

    def find_usual(self, facts, kept):
        """What this corpus is like: the scripts of each side that a fifth of its lines are written in, and the median
        of the length ratios."""
        for side in (0, 1):
            shares = np.bincount(facts["script"][kept, side], minlength=256)
            shares[self.characters.OTHER] = 0
            shares = shares / max(1, shares.sum())
            usual = np.flatnonzero(shares >= 0.2)
            # a corpus of many languages has no usual script
            self.scripts[side] = usual.tolist() if shares[usual].sum() >= 0.5 else []
        if not kept.any():
            return
        for unit in FLOOR:
            lengths = facts[unit][kept]
            self.usual_ratio[unit] = float(np.median(lengths[:, 1] / lengths[:, 0]))
        for side in (0, 1):
            if np.median(facts["chars"][kept, side] / facts["words"][kept, side]) > 20:  # no spaces between words
                self.usual_ratio.pop("words", None)

    def script_names(self, side):
        return ", ".join(self.characters.names[script].lower() for script in self.scripts[side]) or "of all kinds"

    def judge(self, facts, usual=True):
        """Complete the verdicts, in place, by the rules that look at the whole corpus; with usual=False by the usual
        values of the corpus that was judged before."""
        verdict = facts["verdict"]
        if "repeated" in self.rules:
            kept = np.flatnonzero(verdict == 0)
            keys = facts["hash"][kept, 0] * np.uint64(0x9E3779B97F4A7C15) + facts["hash"][kept, 1]
            keys += facts["tag"][kept]
            first = np.zeros(len(kept), bool)
            first[np.unique(keys, return_index=True)[1]] = True
            verdict[kept[~first]] = VERDICTS.index(RULES["repeated"])
        if usual:
            self.find_usual(facts, verdict == 0)
        if "script" in self.rules:
            for side, scripts in enumerate(self.scripts):
                script = facts["script"][:, side]
                if scripts:
                    odd = (verdict == 0) & ~np.isin(script, [self.characters.OTHER, *scripts])
                    verdict[odd] = VERDICTS.index(RULES["script"])
        if "ratio" in self.rules:
            for unit, usual_ratio in self.usual_ratio.items():
                odd = np.abs(deviation(*facts[unit].T, usual_ratio, unit)) > math.log(self.settings["max_ratio"])
                verdict[(verdict == 0) & odd] = VERDICTS.index(RULES["ratio"])


FLOOR = dict(chars=20, words=5)


def deviation(src, tgt, usual_ratio, unit):
    """Logarithm of the factor by which a target is longer than usual for its source. Both lengths get an addition, of
    the usual ratio, that matters in short lines only: those vary widely."""
    return np.log(np.divide(tgt + FLOOR[unit] * usual_ratio, (src + FLOOR[unit]) * usual_ratio, dtype=np.float32))


def unescape(text):
    """HTML entities -> what they stand for, also where they were escaped twice (&amp;quot;). Only whole ones: the
    library alone would also take "&copy" out of a link."""
    for _ in range(2):
        text = ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    return text


MARKS = {ord("؟"): "?", ord("¿"): None, ord("¡"): None}  # NFKC does the Chinese and Japanese ones


def misalignment(src, tgt, usual_ratio):
    """How little two sentences look like translations of each other, without any model: 0 is nothing odd. What adds to
    it: a length that is not the usual one; the share of numbers (in the digits of any script) that stand on one side
    only; half the share of marks that do. Names (words with a capital) that stand on both sides take from it."""
    score = abs(float(deviation(len(src), len(tgt), usual_ratio, "chars")))
    numbers, marks, names = [], [], []
    for text in (src, tgt):
        numbers.append(Counter(str(int(x)) if len(x) < 19 else x for x in re.findall(r"\d+", text)))
        marks.append(Counter(re.findall(r"[?!:()]", unicodedata.normalize("NFKC", text).translate(MARKS))))
        names.append(
            {word for word in re.findall(r"\w{2,}", text) if not word.islower() and word.upper() != word.lower()}
        )
    for weight, (a, b) in ((1.0, numbers), (0.5, marks)):
        most = max(a.total(), b.total())
        score += weight * (1 - (a & b).total() / most) if most else 0.0
    fewest = min(map(len, names))
    return score - (0.5 * len(names[0] & names[1]) / fewest if fewest else 0.0)


# --- Data: from text to ids ----------------------------------------------------------------------------------------
# What a run needs of its corpus (token ids in flat files, validation text, tokenizer, report) is kept in a folder named
# by a hash of all that it follows from, and mapped into memory from there: a second start takes seconds.

# What the outcome follows from, beside the text and the program:
KEY = """src_field tgt_field no_header skip_bad_lines dataset_config dataset_split val_split max_pairs val_pairs
    overfit seed allow max_ratio unescape vocab_size tokenizer_kind tokenizer_sample tags separate_vocabularies"""
SIDES = ("src", "tgt")


def chunks(rows, size=10000):
    rows = iter(rows)
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def chosen(n, size, rng):
    """A mask over n places that is True at `size` of them, chosen at random."""
    mask = np.zeros(n, bool)
    mask[rng.choice(n, min(n, size), replace=False)] = True
    return mask


def whole_groups(keys, size, rng):
    """A mask over keys that is True at `size` places, or about so many, and alike at equal keys."""
    _, group, counts = np.unique(keys, return_inverse=True, return_counts=True)
    picked, left = [], size
    for g in rng.permutation(len(counts)):
        if counts[g] <= left:
            picked.append(g)
            left -= counts[g]
            if not left:
                break
    return np.isin(group, picked or [np.argmin(counts)])  # if all are larger, the smallest


class Corpus:
    """What training and validation see, and what was dropped on the way, by rule.

    train, val: (source, target) as TokenRows; val_pairs: the text of val, as it stands in a given file; tokenizer;
    fingerprint: SHA-256 over every pair that trains and validates, in order, and the rules; and of the report: read,
    taken, dropped {rule: pairs}, examples {rule: (number, source, target)}, notes, samples, worst [(score, source,
    target)], stages {stage: (seconds, peak MB)}, empty when all was there."""

    def __init__(self, settings, root, limit, tokenizer=None, say=print):
        """root: the folder for prepared data. limit: the longest sentence in tokens, EOS included. tokenizer: one to
        use; without it one is trained. say: for what the user should know while waiting. Raises ValueError and OSError
        for what cannot be read or leaves no pairs."""
        self.settings, self.limit, self.tokenizer, self.stages = settings, limit, tokenizer, {}
        root, key = Path(root), self.key()
        self.folder = root / key
        if self.load():
            return
        if tokenizer is not None:  # of another run: what it makes must not stand for what these flags make
            self.folder = root / hashlib.sha256((key + tokenizer.sha256).encode()).hexdigest()[:32]
        try:
            root.mkdir(parents=True, exist_ok=True)
            with self.lock(say):
                if not self.load():
                    self.build_anew(root, key)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OSError(error.errno, "no space for the prepared data; see --cache", str(root)) from None
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            say(f"{root} cannot be written: the data are prepared for this run alone")
            self.lifetime = tempfile.TemporaryDirectory()
            self.folder = Path(self.lifetime.name)
            self.build(self.folder)
            self.load()

    @contextmanager
    def lock(self, say):
        """One process prepares; another that needs the same waits, and finds the work done."""
        path = self.folder.with_suffix(".lock")
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path, wait=False))
            except BlockingIOError:
                say(f"waiting for another process that prepares these data in {self.folder}")
                stack.enter_context(locked(path))
            yield

    def build_anew(self, root, key):
        temporary = self.folder.with_suffix(".tmp")
        for stale in root.glob("*.tmp"):  # of a process that was killed: it holds no lock any more
            if re.fullmatch("[0-9a-f]{32}", stale.stem) and stale != temporary and fcntl is not None:
                with suppress(BlockingIOError), locked(stale.with_suffix(".lock"), wait=False):
                    shutil.rmtree(stale)
        shutil.rmtree(temporary, ignore_errors=True)  # this one's lock is ours
        temporary.mkdir()
        try:
            self.build(temporary)
            if self.key() != key:
                raise ValueError("the data have changed while they were read: start again")
            shutil.rmtree(self.folder, ignore_errors=True)  # damaged
            os.replace(temporary, self.folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.load()

    def key(self):
        s = self.settings
        known = {name: s[name] for name in KEY.split() if name in s} | dict(limit=self.limit)
        known["versions"] = unicodedata.unidata_version, *map(metadata.version, ("sentencepiece", "numpy"))
        known["files"] = {name: [(suffix_of(path), sha256(path)) for path in s[name]] for name in FILES if name in s}
        known["program"] = [sha256(path) for path in (__file__, tf.__file__)]
        if "dataset" in s:
            splits = [s[name] for name in ("dataset_split", "val_split") if name in s]
            known["dataset"] = [[sha256(file["filename"]) for file in hub_set(s, x).cache_files] for x in splits]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]

    def load(self):
        """Take what stands in self.folder -> whether it is there, whole, and made with this tokenizer."""
        try:
            sums = json.loads((self.folder / "sums.json").read_text(encoding="utf-8"))
            if not sums or any(crc32(self.folder / name) != total for name, total in dict(sums).items()):
                return False
        except (OSError, ValueError, TypeError):
            return False
        source = self.folder / "source.model"
        source = tf.Tokenizer(source.read_bytes()) if source.exists() else None
        tokenizer = tf.Tokenizer((self.folder / "tokenizer.model").read_bytes(), source)
        if self.tokenizer is not None and self.tokenizer.sha256 != tokenizer.sha256:
            return False
        report = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        for name in ("read", "taken", "dropped", "examples", "notes", "val_pairs", "samples", "worst", "fingerprint"):
            setattr(self, name, report[name])
        self.train = []
        for side, dtype in zip(SIDES, report["dtypes"]):
            ids = np.memmap(self.folder / f"{side}.ids", dtype, "r")
            offsets = np.memmap(self.folder / f"{side}.offsets", np.int64, "r")
            self.train.append(tf.TokenRows(*map(np.asarray, (ids, offsets))))
        self.tokenizer, self.val = tokenizer, tf.encode_pairs(tokenizer, self.val_pairs)
        return True

    # Building: each stage goes through the text and keeps no more of it than a chunk.

    def build(self, folder):
        s, report, notes = self.settings, {}, []

        def note(text):
            if text not in notes:
                notes.append(text)

        with self.stage("cleaning"):
            cleaner = Cleaner(s)
            facts = self.read_and_clean(folder, cleaner, report, note)
            train, val, split_off = self.split(folder, cleaner, facts, note)
        if self.tokenizer is None:
            with self.stage("tokenizer"):
                self.tokenizer = self.train_tokenizer(folder, train)
        with self.stage("encoding"):
            self.encode(folder, facts, train, val, split_off, cleaner.usual_ratio["chars"], report, note)
        verdicts, first = np.unique(facts["verdict"], return_index=True)
        mask = np.zeros(len(facts), bool)
        mask[first[verdicts > 0]] = True
        texts, numbers = dict(self.texts(folder, mask)), report.pop("numbers")
        report["dropped"] = self.dropped_by_rule(facts)
        report["examples"] = {
            VERDICTS[v]: (int(i if numbers is None else numbers[i]) + 1, *texts[i])
            for v, i in zip(verdicts, first)
            if v
        }
        for side in SIDES:
            (folder / f"{side}.txt").unlink()
        (folder / "tokenizer.model").write_bytes(self.tokenizer.model_bytes)
        if self.tokenizer.source is not self.tokenizer:
            (folder / "source.model").write_bytes(self.tokenizer.source.model_bytes)
        (folder / "report.json").write_text(json.dumps(report | dict(notes=notes)), encoding="utf-8")
        sums = {path.name: crc32(path) for path in folder.iterdir()}
        (folder / "sums.json").write_text(json.dumps(sums), encoding="utf-8")

    def dropped_by_rule(self, facts):
        return dict(zip(VERDICTS[1:], np.bincount(facts["verdict"], minlength=len(VERDICTS)).tolist()[1:]))

    def nothing_left(self, what, facts):
        """The error for it, with what was dropped by which rule."""
        dropped = ", ".join(f"{rule} {n}" for rule, n in self.dropped_by_rule(facts).items() if n)
        return ValueError(
            f"{what}: {len(facts)} pairs were read"
            + (f", of which were dropped: {dropped}; see --allow" if dropped else "")
        )

    @contextmanager
    def stage(self, name):
        start = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - start, memory_mb(torch.device("cpu"))

    def read_and_clean(self, folder, cleaner, report, note):
        """Write src.txt and tgt.txt, all pairs as normalised text -> their FACTS, judged."""
        s, rows, numbers = self.settings, read_pairs(self.settings, note), None
        if "max_pairs" in s:
            # a sample, not the first rows: a corpus glued together of several would show its first part only
            report["read"] = sum(1 for _ in rows)
            mask = chosen(report["read"], s["max_pairs"], np.random.default_rng([s["seed"], 0]))
            rows, numbers = itertools.compress(read_pairs(s), mask.tobytes()), np.flatnonzero(mask)
        parts = [np.zeros(0, FACTS)]
        with open(folder / "src.txt", "wb") as src, open(folder / "tgt.txt", "wb") as tgt:
            for chunk in chunks(tqdm(rows, "reading", unit=" pairs", unit_scale=True, delay=3, disable=None)):
                *sides, facts = cleaner.look(chunk)
                for file, lines in zip((src, tgt), sides):
                    file.write(("\n".join(lines) + "\n").encode())
                parts.append(facts)
        facts = np.concatenate(parts)
        report |= dict(taken=len(facts), numbers=numbers)  # which of all they are
        report.setdefault("read", len(facts))
        cleaner.judge(facts)
        note(f"script of the source: {cleaner.script_names(0)}; of the target: {cleaner.script_names(1)}")
        return facts

    def texts(self, folder, mask):
        """(i, (source, target)) for each i where the mask is True, from the files that read_and_clean wrote."""
        with open(folder / "src.txt", "rb") as src, open(folder / "tgt.txt", "rb") as tgt:
            for i, pair in itertools.compress(enumerate(zip(src, tgt)), mask.tobytes()):
                yield i, tuple(line[:-1].decode() for line in pair)

    def split(self, folder, cleaner, facts, note):
        """-> a mask of the training pairs; the validation pairs, as text; and a mask of those if they were split off.
        Verdicts are completed."""
        s, verdict, kept = self.settings, facts["verdict"], VERDICTS.index("kept")

        def remove(hashes):
            """A sentence that will be asked for, on either side, has no place in training, on either side."""
            for side in (0, 1):
                leak = np.isin(facts["hash"][:, side], hashes)
                verdict[(verdict == kept) & leak] = VERDICTS.index(LEAK)

        if "test_src" in s:
            remove(cleaner.look(list(read_aligned(s["test_src"], s["test_tgt"], s)))[2]["hash"])
        whole, split_off, rng = verdict == kept, None, np.random.default_rng([s["seed"], 1])
        if not whole.any():
            raise self.nothing_left("no pairs are left to train on", facts)
        if "overfit" in s:
            train = whole.copy()
            train[whole] = chosen(whole.sum(), s["overfit"], rng)
            val = [pair for _, pair in self.texts(folder, train)]
        elif "val_src" in s or "val_split" in s:
            val = list(
                read_aligned(s["val_src"], s["val_tgt"], s) if "val_src" in s else read_pairs(s, split="val_split")
            )
            about = cleaner.look(val)[2]
            remove(about["hash"])
            cleaner.judge(about, usual=False)
            for v, count in zip(*np.unique(about["verdict"], return_counts=True)):
                if v != kept:  # they are the user's measure, and stay what they are
                    left_out = VERDICTS[v] in (BAD, EMPTY)
                    note(f"validation: {count} with {VERDICTS[v]}, {'left out' if left_out else 'kept'}")
            unusable = np.isin(about["verdict"], [VERDICTS.index(BAD), VERDICTS.index(EMPTY)])
            train = verdict == kept
            val = list(itertools.compress(val, ~unusable))
        else:
            size = s.get("val_pairs", min(1000, int(whole.sum()) // 10))
            if not 0 < size < whole.sum():
                what = f"{size} validation pairs cannot be split off {whole.sum()} pairs; see --val-pairs"
                raise self.nothing_left(what, facts)
            split_off = whole.copy()
            split_off[whole] = whole_groups(facts["hash"][whole, 0], size, rng)
            remove(facts["hash"][split_off])
            verdict[split_off] = kept
            train = (verdict == kept) & ~split_off
            val = [pair for _, pair in self.texts(folder, split_off)]
        if not val:
            raise ValueError("the validation data hold no pairs")
        if not train.any():
            raise self.nothing_left("no pairs are left to train on", facts)
        return train, val, split_off

    def train_tokenizer(self, folder, train):
        """On the training pairs alone, or a random sample of them."""
        s, sample = self.settings, train.copy()
        sample[train] = chosen(train.sum(), s["tokenizer_sample"], np.random.default_rng([s["seed"], 2]))
        learn = partial(
            tf.Tokenizer.train, vocab_size=s["vocab_size"], kind=s["tokenizer_kind"], tags=s.get("tags", ())
        )
        if "separate_vocabularies" not in s:
            return learn(text for _, pair in self.texts(folder, sample) for text in pair)
        source, target = (learn(pair[side] for _, pair in self.texts(folder, sample)) for side in (0, 1))
        return tf.Tokenizer(target.model_bytes, source)

    def encode(self, folder, facts, train, val, split_off, usual_ratio, report, note):
        """Write the ids of all training pairs that are not too long. (Cut, they would teach stopping mid-sentence.)"""
        s, rng = self.settings, random.Random(self.settings["seed"])
        rules = {name: s.get(name) for name in ("allow", "max_ratio", "unescape", "skip_bad_lines")} | dict(
            limit=self.limit
        )
        digest = hashlib.sha256(json.dumps(rules).encode() + b"\n")
        scored = train.copy()
        scored[train] = chosen(train.sum(), 100000, np.random.default_rng([s["seed"], 3]))
        lengths, samples, worst, n = ([], []), [], [], 0
        with open(folder / "src.ids", "wb") as src, open(folder / "tgt.ids", "wb") as tgt:
            bar = tqdm(
                self.texts(folder, train),
                "encoding",
                train.sum(),
                unit=" pairs",
                unit_scale=True,
                delay=3,
                disable=None,
            )
            for chunk in chunks(bar):
                places, pairs = np.array([i for i, _ in chunk]), [pair for _, pair in chunk]
                rows = tf.encode_pairs(self.tokenizer, pairs)
                fits = np.maximum(rows[0].lengths, rows[1].lengths) + 1 <= self.limit
                facts["verdict"][places[~fits]] = VERDICTS.index(LONG)
                for side, file in enumerate((src, tgt)):
                    part = rows[side].select(fits)
                    lengths[side].append(part.lengths)
                    file.write(part.ids.data)
                places, pairs = places[fits], list(itertools.compress(pairs, fits))
                digest.update("".join(f"{a}\t{b}\n" for a, b in pairs).encode())
                worst += [
                    (misalignment(*pair, usual_ratio), *pair) for pair in itertools.compress(pairs, scored[places])
                ]
                worst = heapq.nlargest(3, worst)
                for pair in pairs:  # three of all, each with the same chance (reservoir sampling)
                    n += 1
                    if len(samples) < 3:
                        samples.append(pair)
                    elif (place := rng.randrange(n)) < 3:
                        samples[place] = pair
        if not n:
            raise ValueError(
                f"every pair is longer than {self.limit} tokens, the limit of --max-len and --batch-tokens"
            )
        rows = tf.encode_pairs(self.tokenizer, val)
        fits = np.maximum(rows[0].lengths, rows[1].lengths) + 1 <= self.limit
        if not fits.any():
            raise ValueError(f"every validation pair is longer than the limit of {self.limit} tokens")
        if not fits.all():
            note(f"validation: {(~fits).sum()} over {self.limit} tokens, left out")
            if split_off is not None:
                facts["verdict"][np.flatnonzero(split_off)[~fits]] = VERDICTS.index(LONG)
        val = list(itertools.compress(val, fits))
        digest.update(b"\n" + "".join(f"{a}\t{b}\n" for a, b in val).encode(errors="surrogatepass"))
        for side, counts in zip(SIDES, lengths):
            offsets = np.zeros(n + 1, np.int64)
            np.cumsum(np.concatenate(counts), out=offsets[1:])
            (folder / f"{side}.offsets").write_bytes(offsets.data)
        report |= dict(val_pairs=val, samples=samples, worst=worst, fingerprint=digest.hexdigest())
        report["dtypes"] = [str(side.ids.dtype) for side in rows]


# --- The run -------------------------------------------------------------------------------------------------------


def as_flag(item):
    """(name, value) of a setting -> the flag, to be pasted into a shell."""
    name, value = item
    values = [] if value is True else value if isinstance(value, list) else [value]
    return shlex.join(["--" + name.replace("_", "-"), *map(str, values)])


def read_tokenizer(path):
    """A SentencePiece model, or the tokenizer of a checkpoint."""
    if zipfile.is_zipfile(path):
        return tf.load_checkpoint(path)[1]
    try:
        return tf.Tokenizer(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def n_processes():
    """How many torchrun started. (Cluster managers set WORLD_SIZE alone, for a single process too.)"""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ) else 1


class Ranks:
    """This process among those that torchrun started; without it, the only one. Rank 0 alone writes and decides."""

    def __init__(self, device):
        self.size = n_processes()
        self.rank = int(os.environ["RANK"]) if self.size > 1 else 0
        self.device = tf.pick_device(device)
        if self.size > 1:
            if sys.platform == "linux":  # if torchrun is killed, it cannot end us: the kernel then sends SIGTERM
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
            if self.device.type == "cuda":
                self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
                torch.cuda.set_device(self.device)
            # the others wait as long as rank 0 validates
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=timedelta(hours=12))

    def total(self, values):
        """Sums over all processes of a list of numbers."""
        if self.size == 1:
            return values
        values = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(values)
        return values.tolist()

    def all(self, value):
        """What each process has, in every process."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def meet(self):
        """Wait until all are here."""
        if self.size > 1:
            dist.barrier()

    def from_first(self, value):
        """What rank 0 has, in every process."""
        if self.size > 1:
            box = [value]
            dist.broadcast_object_list(box, device=self.device if self.device.type == "cuda" else None)
            value = box[0]
        return value


class Objective(torch.nn.Module):
    """The loss as a module, which is what DistributedDataParallel wraps: gradients are averaged over the processes as
    its backward pass goes along."""

    def __init__(self, model, smoothing):
        super().__init__()
        self.model, self.smoothing = model, smoothing

    def forward(self, src, tgt_in, tgt_out):
        sums = tf.training_loss(self.model, src, tgt_in, tgt_out, self.smoothing)
        return sums.smoothed, sums.nll


def score_text(hypotheses, references):
    """BLEU, chrF2++ (Post, 2018; Popovic, 2017) and the share of exact matches, of raw text against raw references, by
    sacrebleu. Raises ValueError when the counts differ."""
    from sacrebleu.metrics import BLEU, CHRF

    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} translations cannot be scored against {len(references)} references")
    bleu, chrf = BLEU(), CHRF(word_order=2)
    scores = dict(
        bleu=bleu.corpus_score(hypotheses, [references]).score, chrf=chrf.corpus_score(hypotheses, [references]).score
    )
    scores["exact"] = sum(tf.normalize(h) == tf.normalize(r) for h, r in zip(hypotheses, references)) / len(references)
    return scores | dict(bleu_signature=str(bleu.get_signature()), chrf_signature=str(chrf.get_signature()))


# All that changes while a run trains, and all that its checkpoint needs beside weights, optimizer and fp16's scale.
STATE = dict(
    step=0, batches=0, batches_an_epoch=0, skipped=0, spikes=0, norms=[], interval=[0.0, 0.0, 0], seconds=0.0,
    best=None, stale=0, due=False, finished=False,
)  # fmt: skip


class Run:
    """One training run: its folder, model, optimizer, and the few numbers that say how far it is."""

    def __init__(self, settings, ranks, resuming=False, dry_run=False):
        self.settings, self.ranks, self.folder = settings, ranks, Path(settings["out"]).resolve()
        self.signal = self.stop = 0  # heard here; agreed on by all processes
        self.order = None, None  # an epoch and its batches
        self.too_large = math.inf  # padded tokens of a batch that memory was not enough for
        self.last_is_whole = True  # if not, it must not take the place of previous.pt
        self.torn = False  # whether metrics.jsonl may end in half a line
        self.syncing = False  # within a backward pass that other processes wait for
        self.state = dict(STATE)
        self.device = ranks.device
        if "threads" in settings:
            torch.set_num_threads(settings["threads"])
        self.log_file, self.board, self.resources = None, None, ExitStack()
        if ranks.rank > 0 or dry_run:
            return
        if not resuming and next(self.folder.glob("*.pt"), None):
            raise ValueError(f"{self.folder} holds a run already: {self.command()}, or choose another --out")
        for stale in self.folder.glob(".*.tmp"):  # of a save that was killed
            stale.unlink()
        if not resuming:
            (self.folder / "metrics.jsonl").unlink(missing_ok=True)  # of a run that left no checkpoint
        file = open(self.folder / "train.log", "a" if resuming else "w", encoding="utf-8", errors="backslashreplace")
        self.log_file = self.resources.enter_context(file)
        if "tensorboard" in settings:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("--tensorboard needs a package: pip install tensorboard") from None
            self.board = self.resources.enter_context(SummaryWriter(str(self.folder / "tensorboard")))

    def close(self):
        with suppress(OSError):  # what a full disk does not take of the log
            self.resources.close()

    def command(self):
        return f"python train.py --resume {shlex.quote(str(self.folder))}"

    def log(self, text, from_all=False):
        """To stderr and train.log. A reader that has gone or a disk that is full must not end the training."""
        for file in filter(None, (sys.stderr, self.log_file)) if self.ranks.rank == 0 or from_all else ():
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
        self.log("flags: " + " ".join(as_flag(item) for item in sorted(s.items()) if item[0] != "processes"))
        self.tokenizer = None
        if resume is not None:
            self.model, self.tokenizer, rest = resume
            self.last_is_whole = rest["read_from"] == "last.pt"
        elif "init_from" in s:
            self.model, self.tokenizer, _ = tf.load_checkpoint(s["init_from"])
        elif "tokenizer" in s:
            self.tokenizer = read_tokenizer(s["tokenizer"])
        if self.tokenizer is not None and "tokenizer" not in s:  # a model came with it
            self.model.set_dropout(s.get("dropout", self.model.config.dropout))
            s.update(asdict(self.model.config))
        # no pair may be larger than a batch
        limit, cache = min(s["max_len"], s["batch_tokens"]), s.get("cache", self.folder.parent / "cache")
        self.corpus = corpus = Corpus(s, cache, limit, self.tokenizer, self.log)
        if self.tokenizer is None and corpus.tokenizer.vocab_size < s["vocab_size"]:
            n = corpus.tokenizer.vocab_size
            self.log(f"this text gives {n} pieces, fewer than --vocab-size {s['vocab_size']}")
        self.tokenizer = corpus.tokenizer
        if resume is None and "init_from" not in s:
            torch.manual_seed(s["seed"])
            sizes = {name: s[name] for name in SIZES}
            if self.tokenizer.source is not self.tokenizer:
                sizes["src_vocab_size"] = self.tokenizer.source.vocab_size
            self.model = tf.Transformer(
                tf.Config(self.tokenizer.vocab_size, norm=s["norm"], max_len=s["max_len"], **sizes)
            )
        self.model.to(self.device)
        self.train_rows, self.val_rows = corpus.train, corpus.val
        start = time.perf_counter()
        self.sampler = tf.TokenBatchSampler(
            *(rows.lengths + 1 for rows in self.train_rows), s["batch_tokens"], s["seed"]
        )
        corpus.stages["batches"] = time.perf_counter() - start, memory_mb(torch.device("cpu"))
        self.batches = s["accumulate"] * self.ranks.size  # in an update
        self.objective = Objective(self.model, s["label_smoothing"])
        if self.ranks.size > 1:
            self.objective = DistributedDataParallel(self.objective, forward_sync_buffers=False)
        self.optimizer = tf.adam(self.model)
        # fp16 ends at 6e-8: gradients are scaled up before the backward pass and down again before they are clipped
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=s["precision"] == "fp16")
        old = {}
        if resume is not None:
            old = rest["flags"]
            if rest["data_fingerprint"] != corpus.fingerprint:
                changed = [name for name in ("seed", "batch_tokens") if s[name] != old[name]]
                why = {"seed": "it splits off validation", "batch_tokens": "it decides which pairs are too long"}
                raise ValueError(
                    f"the data are not those that {self.folder} was trained on: their fingerprint differs"
                    + "".join(f"; --{name.replace('_', '-')} has changed, and {why[name]}" for name in changed)
                )
            self.optimizer.load_state_dict(rest["optimizer"])
            if rest["scaler"] and s["precision"] == "fp16":
                self.scaler.load_state_dict(rest["scaler"])
            self.state = rest["state"]
            epochs_done = self.state["batches"] / (self.state["batches_an_epoch"] or 1)
            self.state["batches"] = round(epochs_done * len(self.sampler))
            if s["best_by"] != old["best_by"]:  # another measure knows no best yet
                self.state |= dict(best=None, stale=0)
            elif any(s.get(name) != old.get(name) for name in BREAKS_EXACTNESS) and (self.folder / "best.pt").exists():
                best = tf.load_checkpoint(self.folder / "best.pt")[2]["state"]["best"]  # perhaps of a later step
                self.state["best"] = max((x for x in (best, self.state["best"]) if x is not None), default=None)
        same_pace = [s.get(name) == old.get(name) for name in ("epochs", "accumulate", "batch_tokens", "processes")]
        if "epochs" in s and not all(same_pace):
            left = s["epochs"] * len(self.sampler) - self.state["batches"]
            s["steps"] = max(1, self.state["step"] + math.ceil(left / self.batches))
        if self.ranks.size > 1 and len(set(self.ranks.all((corpus.fingerprint, self.state["step"])))) > 1:
            raise ValueError("the processes differ: not all have the same data, or the same checkpoint")
        self.state["batches_an_epoch"] = len(self.sampler)
        self.report()

    def report(self):
        c, s = self.corpus, self.settings
        taken = "" if c.taken == c.read else f", took {c.taken:,} at random"
        n_train, n_val = len(c.train[0]), len(c.val_pairs)
        self.log(f"read {c.read:,} pairs{taken}; training on {n_train:,}, validating on {n_val:,}")
        names = dict(zip(RULES.values(), RULES))
        for rule, n in c.dropped.items():
            if n:
                number, *pair = c.examples[rule]
                pair = [CONTROL.sub(lambda char: f"\\x{ord(char[0]):02x}", text) for text in pair]
                example = " | ".join(text if len(text) <= 60 else text[:57] + "..." for text in pair)
                self.log(f"  dropped {n:>8,} ({n / c.taken:.2%})  {rule:28}  as pair {number}: {example}")
                if n > c.taken / 10 and (rule in names or rule == LEAK):
                    self.log(
                        "  warning: that is much" + (f"; --allow {names[rule]} keeps them" if rule in names else "")
                    )
        for note in c.notes:
            self.log(note)
        self.log(f"data fingerprint {c.fingerprint}")
        stages = ", ".join(f"{name} {seconds:.1f} s (peak {mb:.0f} MB)" for name, (seconds, mb) in c.stages.items())
        self.log(f"{'prepared' if 'cleaning' in c.stages else 'prepared before,'} in {c.folder}: {stages}")
        lengths = [rows.lengths for rows in self.train_rows]
        for side, length in zip(("source", "target"), lengths):
            middle, most, longest = np.quantile(length, (0.5, 0.99, 1.0)).astype(int)
            self.log(
                f"{side}: {length.sum():,} tokens; of a sentence: median {middle}, 99% <= {most}, longest {longest}"
            )
        sizes = dict.fromkeys(f"{each.vocab_size:,}" for each in {self.tokenizer.source: 0, self.tokenizer: 0})
        self.log(
            f"vocabulary {' and '.join(sizes)}, tokenizer {self.tokenizer.sha256[:16]}; target tokens for each source "
            f"token {lengths[1].sum() / lengths[0].sum():.2f}"
        )
        unknown = by_bytes = changed = 0
        for tokenizer, rows, texts in zip((self.tokenizer.source, self.tokenizer), self.val_rows, zip(*c.val_pairs)):
            for id_, n in zip(*np.unique(rows.ids, return_counts=True)):
                unknown += n * tokenizer.pieces.is_unknown(int(id_))
                by_bytes += n * tokenizer.pieces.is_byte(int(id_))  # of characters that the tokenizer's text had not
            changed += sum(tokenizer.decode(tokenizer.encode(text)) != tf.normalize(text) for text in texts)
        unknown, by_bytes = (n / sum(len(rows.ids) for rows in self.val_rows) for n in (unknown, by_bytes))
        self.log(f"validation tokens that are unknown {unknown:.2%}, spelled as bytes {by_bytes:.2%}")
        if unknown + by_bytes > 0.01:
            self.log("warning: over 1% of the validation tokens stand for characters that this tokenizer never saw")
        if changed:
            self.log(f"warning: {changed} validation sentences do not come back whole from this tokenizer")
        self.log("three pairs, at random:")
        for src, tgt in c.samples:
            self.log(f"  source: {src}\n  target: {tgt}")
        self.log("three that look least like translations (lengths, numbers, marks, names), of at most 100,000:")
        for score, src, tgt in c.worst:
            self.log(f"  {score:.2f}  {src}\n        {tgt}")
        epochs = s["steps"] * self.batches / len(self.sampler)
        self.log(f"model: {self.model.n_parameters():,} parameters, {self.model.config}")
        self.log(
            f"{len(self.sampler)} batches an epoch, {s['steps']} updates, {epochs:.1f} "
            f"epochs, on {self.device} with {torch.get_num_threads()} threads in {s['precision']}, "
            f"{self.ranks.size} process{'es' if self.ranks.size > 1 else ''}; into {self.folder}"
        )
        if epochs > 200:
            self.log("that is many epochs for so little text: --epochs or --patience end it earlier")

    # Validation: what counts is text, made the way a user will make it.

    def validate(self, kind="valid", step=None, samples=3):
        """Scores of the model as it stands; `step` says of which update it is, if not of the last."""
        start, budget = time.perf_counter(), self.settings["batch_tokens"]
        nll, tokens = tf.pairs_nll(self.model, *self.val_rows, budget)
        sources, references = zip(*self.corpus.val_pairs)
        # As translate.py does, but for the batch size, which changes no result: who has memory for little training has
        # memory for little search (which keeps no gradients, and so may have more).
        outputs = tf.translate(self.model, self.tokenizer, sources, batch_tokens=8 * budget)
        scores = dict(kind=kind, step=step or self.state["step"], updates=self.state["step"])
        scores |= dict(val_nll=nll / tokens, val_ppl=tf.perplexity(nll, tokens))
        scores |= score_text(outputs, references)
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
        """A line of metrics.jsonl."""
        if self.ranks.rank > 0:
            return
        self.state["seconds"] = time.perf_counter() - self.began
        row["minutes"] = self.state["seconds"] / 60
        try:
            with open(self.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write("\n" * self.torn + json.dumps(row) + "\n")
            self.torn = False
            if self.board is not None:
                for name, value in row.items():
                    if isinstance(value, (int, float)) and name != "step":
                        self.board.add_scalar(f"{row.get('kind', 'train')}/{name}", value, row["step"])
                self.board.flush()
        except OSError as error:
            self.torn = True  # half a line may stand there
            self.log(
                f"warning: {error.filename or 'metrics.jsonl'}: {error.strerror}; these numbers are only in the log"
            )

    def write_settings(self):
        if self.ranks.rank == 0:
            text = json.dumps(self.settings, indent=1) + "\n"
            tf.write_atomically(self.folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))

    def forget_later(self):
        """What was logged and kept after the checkpoint will come again, and the last line may be half a line."""
        if self.ranks.rank > 0:
            return
        path, kept = self.folder / "metrics.jsonl", []
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
            try:
                row = json.loads(line)
                # an unfinished run does its end anew
                ending = row.get("kind") in ("average", "best") and not self.state["finished"]
                kept += [line + "\n"] if row.get("updates", row["step"]) < self.state["step"] + (not ending) else []
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                pass
        tf.write_atomically(path, lambda temporary: temporary.write_text("".join(kept), encoding="utf-8"))
        for path in self.kept():
            if int(path.stem.removeprefix("step-")) > self.state["step"]:
                path.unlink()

    def kept(self):
        """The weights of single validations, oldest first."""
        return sorted(self.folder.glob("step-" + 8 * "[0-9]" + ".pt"))

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
        """Write a checkpoint into the run's folder -> whether it is there. A full disk costs this save, not the run.
        Beside last.pt, the one with the optimizer, the one before it stays, as previous.pt."""
        if self.ranks.rank > 0:
            return True
        rest = dict(
            state=self.state,
            data_fingerprint=self.corpus.fingerprint,
            git_commit=self.commit,
            versions=self.versions,
            flags=self.settings,
        )
        previous = None
        if optimizer:
            rest |= dict(optimizer=self.optimizer.state_dict(), scaler=self.scaler.state_dict())
            previous = self.folder / "previous.pt" if self.last_is_whole else None
            self.saved_at = time.perf_counter()
        try:
            tf.save_checkpoint(self.folder / name, self.model, self.tokenizer, previous, **rest)
            self.last_is_whole = self.last_is_whole or optimizer
        except OSError as error:
            old = "the older file stays" if (self.folder / name).exists() else "there is no older one"
            self.log(f"warning: {error}; {old}; training goes on")
            return False
        return True

    # One update.

    def update(self):
        """Forward, backward, one step of Adam. -> sums over the update, gradient norm (of the mean loss), rate; or None
        if a number was not finite, in which case nothing has changed but the position in the data (and fp16's scale).
        """
        s, state, ranks = self.settings, self.state, self.ranks
        step, batches = state["step"] + 1, []
        for i in range(state["batches"], state["batches"] + self.batches):
            epoch, b = divmod(i, len(self.sampler))
            batches.append(self.epoch_batches(epoch)[b])
        state["batches"] += self.batches
        tokens = sum(int(self.sampler.tgt_lengths[batch].sum()) for batch in batches)  # of all processes
        sums = self.gradient(batches[ranks.rank :: ranks.size], tokens, step)
        smoothed, nll = self.agree(sums)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s["clip"] or math.inf).item()
        rate = s["rate_scale"] * tf.noam_rate(step, self.model.config.d_model, s["warmup_steps"])
        finite = math.isfinite(norm) and math.isfinite(smoothed)
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.scaler.step(self.optimizer)
            state["step"] = step
        self.scaler.update()
        self.optimizer.zero_grad()
        return (smoothed, nll, tokens, norm, rate) if finite else None

    def gradient(self, batches, tokens, step):
        """Backward through these batches (arrays of pair numbers) -> their smoothed loss and NLL, summed. Where memory
        is not enough for one, it is cut in two, and all begins anew: a pass that fails leaves half a gradient."""
        batches = [part for batch in batches for part in self.parts(batch)]
        while True:
            # What an update draws depends on (seed, step, rank) alone, so a resumed run draws what the unbroken one
            # would have.
            draws = np.random.SeedSequence([self.settings["seed"], step, self.ranks.rank])
            torch.manual_seed(int(draws.generate_state(1, np.uint64)[0] >> 1))
            smoothed = nll = 0.0
            for i, batch in enumerate(batches):
                try:
                    sums = self.backward(batch, tokens, last=i == len(batches) - 1)
                except (RuntimeError, MemoryError) as error:
                    if not tf.out_of_memory(error):
                        raise
                    break
                smoothed, nll = smoothed + sums[0], nll + sums[1]
            else:
                return smoothed, nll
            src, tgt = (lengths[batch].max() for lengths in (self.sampler.src_lengths, self.sampler.tgt_lengths))
            shape = f"a batch of {len(batch)} pairs of up to {src} and {tgt} tokens"
            if len(batch) == 1 or self.syncing:
                raise MemoryError(f"{shape}; use less --batch-tokens and more --accumulate")
            warning = f"warning: out of memory with {shape}: cut in two from now on; less --batch-tokens avoids it"
            self.log(warning, from_all=True)
            self.too_large = min(self.too_large, len(batch) * max(src, tgt))
            self.optimizer.zero_grad()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            batches = [part for batch in batches for part in self.parts(batch)]

    def parts(self, batch):
        """A batch cut in two, again and again, until each part is smaller than what memory was not enough for."""
        larger = max(self.sampler.src_lengths[batch].max(), self.sampler.tgt_lengths[batch].max())
        if len(batch) == 1 or len(batch) * larger < self.too_large:
            return [batch]
        half = len(batch) // 2
        return self.parts(batch[:half]) + self.parts(batch[half:])

    def backward(self, batch, tokens, last):
        """Add a batch's share of the gradient. The last one's backward pass also averages over the processes."""
        s, size = self.settings, self.ranks.size
        self.syncing = False
        batch = [x.to(self.device) for x in tf.collate(*self.train_rows, batch)]
        with nullcontext() if last or size == 1 else self.objective.no_sync():
            dtype = torch.float16 if s["precision"] == "fp16" else torch.bfloat16
            with torch.autocast(self.device.type, dtype, enabled=s["precision"] != "fp32"):
                smoothed, nll = self.objective(*batch)
            self.syncing = last and size > 1  # from here on the other processes wait for this pass
            # by the tokens of the whole update: a mean of batch means would favour the tokens of small batches. The
            # processes' gradients will be averaged, where the sum is wanted: hence their number
            self.scaler.scale(smoothed / (tokens / size)).backward()
        return smoothed.item(), nll.item()

    def agree(self, sums=()):
        """-> the sums over all processes; and all learn of a signal that one of them has heard."""
        signals = [float(self.signal == number) for number in SIGNALS]
        totals = self.ranks.total([*sums, *signals])
        for number, n in zip(SIGNALS, totals[len(sums) :]):
            self.stop = number if n and not self.stop else self.stop
        return totals[: len(sums)]

    def try_largest_batch(self):
        """If memory is too small for it, that should be known now, not in an hour. And with several processes, a
        gradient that is thrown away: DistributedDataParallel orders its sums by the first one that it sees, and a
        resumed run must add in the order of the unbroken one."""
        batches = self.sampler.epoch(0)
        sizes = [len(b) * max(self.sampler.src_lengths[b].max(), self.sampler.tgt_lengths[b].max()) for b in batches]
        self.gradient([batches[int(np.argmax(sizes))]], 1, step=0)
        self.optimizer.zero_grad()
        self.log(f"the largest batch fits: {memory_mb(self.device):.0f} MB")

    def epoch_batches(self, epoch):
        if self.order[0] != epoch:
            self.order = epoch, self.sampler.epoch(epoch)
        return self.order[1]

    # The loop around it.

    def train(self):
        s, state = self.settings, self.state
        self.model.train()
        if self.device.type != "cpu" or self.ranks.size > 1:
            self.try_largest_batch()
        failures, start, start_step = 0, time.perf_counter(), state["step"]
        self.began = start - state["seconds"]  # as if the run had never been interrupted
        self.saved_at = since = start
        heard = 0  # target tokens since the last log line, which was at `since`
        self.validate_if_due()
        state = self.state
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
                if not self.stop:
                    continue
                self.leave()
            failures = 0
            smoothed, nll, tokens, norm, rate = result
            state["interval"] = [total + x for total, x in zip(state["interval"], (smoothed, nll, tokens))]
            step, heard = state["step"], heard + tokens
            self.watch(norm)
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
                    spikes=state["spikes"],
                )
                self.log(
                    f"step {step}/{s['steps']}  epoch {row['epoch']:.2f}  loss {row['loss']:.4f}  "
                    f"nll {row['nll']:.4f}  rate {rate:.2e}  grad {norm:.2f}  {speed:.0f} tok/s  "
                    f"{row['memory_mb']:.0f} MB  left {clock(left)}"
                )
                self.metric(row)
                state["interval"], since, heard = [0.0, 0.0, 0], now, 0
            state["due"] = step % s["eval_every"] == 0 or step == s["steps"]
            save = state["due"] or self.save_is_due()
            if not self.stop:  # or there may be no time for it: it is the first thing after a resume
                pause = time.perf_counter()
                self.validate_if_due()
                state = self.state
                start, since = (t + time.perf_counter() - pause for t in (start, since))  # not training time
            if self.stop:
                self.leave()
            if save:  # after validation: the best score belongs to it
                self.save("last.pt")
        if state["best"] is None and not state["due"]:  # a run that was cut short has not been measured yet
            state["due"] = True
            self.validate_if_due()
        self.agree()
        if self.stop:
            self.leave()
        if self.out_of_patience():
            self.log(f"no better {s['best_by']} for {s['patience']} validations: stopping early")

    def validate_if_due(self):
        if self.state["due"]:
            self.state["due"] = False
            if self.ranks.rank == 0:
                self.checkpoint_validation(self.validate())
            self.state = self.ranks.from_first(self.state)
            self.agree()  # it may have taken long

    def leave(self):
        """After a signal: save, and let nobody go before it is done (torchrun ends the others when one has gone)."""
        saved = self.save("last.pt")
        self.ranks.meet()
        what = "" if saved else " (which could not be saved)"
        self.log(f"stopped by a signal at step {self.state['step']}{what}; go on with: {self.command()}")
        raise SystemExit(128 + self.stop)

    def save_is_due(self):
        every = self.settings["save_every"]
        if isinstance(every, int):
            return self.state["step"] % every == 0
        return time.perf_counter() - self.saved_at >= 60 * float(every.removesuffix("m"))

    def watch(self, norm):
        """Say it when a gradient is far longer than they usually are: a spike, after which the loss may jump."""
        norms = self.state["norms"]
        if len(norms) >= 20 and norm > 10 * (usual := float(np.median(norms))):
            self.state["spikes"] += 1
            self.log(f"warning: gradient of length {norm:.3g} at step {self.state['step']}, where {usual:.3g} is usual")
        self.state["norms"] = (norms + [norm])[-100:]

    def out_of_patience(self):
        return 0 < self.settings["patience"] <= self.state["stale"]

    def checkpoint_validation(self, scores):
        state, keep = self.state, max(self.settings["keep"], self.settings["average"])
        if keep:
            self.save(f"step-{state['step']:08}.pt", optimizer=False)
            for old in self.kept()[:-keep]:
                old.unlink(missing_ok=True)
        state["stale"] = 0 if self.keep_if_best(scores) else state["stale"] + 1

    def finish(self):
        """Averaging, the verdict on the best checkpoint, and what to try next. -> exit status. Killed in here, it is
        done again on resume: the run is finished when last.pt says so, at the end."""
        for each in SIGNALS:  # the run is saved: there is nothing to finish first
            if signal.getsignal(each) not in (signal.SIG_IGN, None):
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
        last, status, n = self.model, 0, self.settings["average"]
        paths = [path for path in self.kept()[-n:] if self.is_whole(path)] if n else []
        if len(paths) > 1:
            self.log(f"average of the last {len(paths)} checkpoints:")
            self.model = tf.average_checkpoints(paths, self.device)[0]
            self.keep_if_best(self.validate("average", samples=0))
            self.save("average.pt", optimizer=False)  # in any case: one validation set is a noisy judge
        best, step = self.folder / "best.pt", self.state["step"]
        try:
            self.model, _, rest = tf.load_checkpoint(best, self.device)
            step = rest["state"]["step"]
        except (OSError, ValueError) as error:
            self.model = last
            self.log(f"warning: {tf.explain(error)}: the last weights stand in for the best")
        scores = self.validate("best", step, samples=10)
        if "overfit" in self.settings:
            status = 0 if scores["exact"] == 1.0 else 1
            n = len(self.corpus.val_pairs)
            self.log(f"{'NOT ' * status}memorised: {scores['exact']:.0%} of {n} pairs come back exactly")
        else:
            self.publish(scores)
            source = shlex.quote(self.corpus.val_pairs[0][0])
            self.log(f"try: python translate.py --checkpoint {shlex.quote(str(best))} {source}")
        self.model, self.state["finished"] = last, True
        saved = self.save("last.pt")  # with the best score so far: a longer run has to beat it
        if not saved and not best.exists():
            self.log("nothing could be saved: all of it is lost")
            return 1
        return status

    def is_whole(self, path):
        try:
            tf.load_checkpoint(path)
        except (OSError, ValueError) as error:
            self.log(f"warning: {tf.explain(error)}: left out of the average")
            return False
        return True

    def publish(self, scores):
        """In the folder above: a table of runs, best first, and a link to the newest best checkpoint."""
        board, link = self.folder.parent / "leaderboard.json", self.folder.parent / "best.pt"
        row = dict(
            run=self.folder.name,
            data_fingerprint=self.corpus.fingerprint,
            parameters=self.model.n_parameters(),
            **scores,
        )
        try:
            rows = json.loads(board.read_text(encoding="utf-8")) if board.exists() else []
            if not isinstance(rows, list):
                raise ValueError("not a table")
            rows = [old for old in rows if old["run"] != row["run"]] + [row]
            rows.sort(key=lambda r: (r["data_fingerprint"], -r["chrf"]))  # scores on other data cannot be compared
            tf.write_atomically(
                board, lambda path: path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            )
        except (ValueError, KeyError, TypeError, RecursionError):
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


@contextmanager
def run_folder(path, dry_run):
    """Keep other runs out of this folder while this one is in it: made if it is not there, and locked by rank 0."""
    folder = Path(path)
    if dry_run or n_processes() > 1 and os.environ["RANK"] != "0":
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError:
            raise ValueError(f"another process trains in {folder}") from None
        yield


def handle_signals(run):
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) ends the run after its update, the second ends it at once
    (no file is ever half written)."""
    first = [-math.inf]

    def stop(number, _):
        # torchrun hears a Ctrl-C too and passes it on: what comes at the same time is one signal
        if run.ranks.size > 1 and time.monotonic() - first[0] < 3:
            return
        if run.signal:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        run.signal, first[0] = number, time.monotonic()
        try:
            os.write(2, b"stopping after this update; once more to stop at once\n")  # print may not be entered twice
        except OSError:  # the terminal has gone
            pass

    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup wants a hang-up to be ignored
            run.resources.callback(signal.signal, each, signal.signal(each, stop))


def resume_paths(path):
    """--resume's folder, or file -> the checkpoints to try, in this order."""
    path = Path(path)
    return [path] if path.is_file() else [path / "last.pt", path / "previous.pt"]


def resume_settings(given):
    """-> settings of a stopped run with the allowed changes, its checkpoint (None if it has none yet), and what to tell
    the user."""
    paths = resume_paths(given.pop("resume"))
    folder, notes, checkpoint = paths[0].parent, [], None
    allow = given.pop("allow_changes", False)
    for path in paths:
        try:
            checkpoint = tf.load_checkpoint(path)
            rest = checkpoint[2]
            if not {"optimizer", "scaler", "state", "flags", "data_fingerprint"} <= set(rest):
                raise ValueError(f"{path} is not the last.pt of a run: there is nothing to go on from")
            if set(rest["state"]) != set(STATE):
                raise ValueError(f"{path} is of another version of this program; --init-from takes its weights")
            rest["read_from"] = path.name
            break
        except (OSError, ValueError, TypeError) as error:
            checkpoint = None
            notes.append(f"warning: {tf.explain(error)}")
    if checkpoint is not None:
        settings = rest["flags"]
        notes += [f"going on from {path.name} instead"] if notes else []
    elif (folder / "config.json").exists() and not next(folder.glob("*.pt"), None):
        try:
            settings = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{folder / 'config.json'} is damaged, and there is no checkpoint: {error}") from None
        notes = [f"{folder} has no checkpoint yet: starting from the beginning"]
    else:
        raise ValueError("; ".join(note.removeprefix("warning: ") for note in notes))
    settings = dict(settings, out=str(folder))
    check_numbers(given)
    given = expand_files(given)
    if check_sources(given):  # the same pairs from elsewhere
        settings = {name: value for name, value in settings.items() if name not in ("tgt", *SOURCES)}
    for name, value in given.items():
        old, name_ = settings.get(name, "not given"), name.replace("_", "-")
        if name in MAY_CHANGE or old == value:
            continue
        if name not in BREAKS_EXACTNESS:
            raise ValueError(
                f"--{name_} cannot change on --resume (it was {old}): start a new run, from {folder}/best.pt with "
                f"--init-from if only the data are others"
            )
        if not allow:
            raise ValueError(
                f"--{name_} was {old}: with {value} it is another run than before; --allow-changes lets it"
            )
        notes.append(
            f"changed: --{name_} was {old}, is {value}; from here on not what the unbroken run would have been"
        )
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in given:
            settings.pop(other, None)
    return settings | given, checkpoint, notes


def main(argv=None):
    tf.prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given = parse_arguments(argv)
    given["processes"] = n_processes()
    try:
        if "allow_changes" in given and "resume" not in given:
            raise ValueError("--allow-changes needs --resume")
        dry_run, checkpoint, notes = given.pop("dry_run", False), None, []
        with ExitStack() as stack:
            if "resume" in given:
                folder = resume_paths(given["resume"])[0].parent
                if (folder / "config.json").exists():  # locked before it is read
                    stack.enter_context(run_folder(folder, dry_run))
                settings, checkpoint, notes = resume_settings(given)
            else:
                settings = settings_of(given)
                stack.enter_context(run_folder(settings["out"], dry_run))
            keep_freed_memory()
            run = stack.enter_context(
                closing(Run(settings, Ranks(settings["device"]), checkpoint is not None, dry_run))
            )
            for note in notes:
                run.log(note)
            if checkpoint is None and not dry_run:
                run.write_settings()  # a run killed while its data are prepared can begin again
            run.prepare(checkpoint)
            if dry_run:
                run.log("dry run: no training; the prepared data stay for the run")
                return 0
            if checkpoint is None:
                run.write_settings()
                run.save("last.pt")  # from here on it can be resumed
            else:
                run.log(f"resumed at step {run.state['step']}")
                if run.state["finished"] and (run.state["step"] >= settings["steps"] or run.out_of_patience()):
                    run.log(f"already at step {run.state['step']} of {settings['steps']}; raise --steps to go on")
                    return 0
                run.forget_later()
                run.state["finished"] = False
            handle_signals(run)
            run.train()
            status = run.ranks.from_first(run.finish() if run.ranks.rank == 0 else None)
            run.ranks.meet()
            return status
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        process = f"process {os.environ['RANK']}: " if given["processes"] > 1 else ""
        if process and isinstance(error, RuntimeError) and not tf.out_of_memory(error) and "onnection" in str(error):
            error = ValueError("another process has ended")
        print(f"train.py: {process}{tf.explain(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code
    if n_processes() > 1:  # all is saved; gloo's threads now and then abort a process that takes them down one by one
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0)
    sys.exit(status)
