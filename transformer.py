"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), for machine translation, in one file.

                                   next-token logits (B,T,V)
                                             |
                                   states x table^T            one table, three uses
                                             |
       memory (B,S,D) -- keys, --+   +---------------+
            |            values  |   | feed-forward  |
    +---------------+            |   | add & norm    |
    | feed-forward  |            +-> | cross-        |
    | add & norm    |                |   attention   |
    | self-         |                | add & norm    |
    |   attention   |                | self-attention| sees no future
    | add & norm    |                | add & norm    |
    +---------------+ x N            +---------------+ x N
            |                                |
   table[src] * sqrt(D) + PE        table[tgt] * sqrt(D) + PE
            |                                |
       src ids (B,S)             BOS + target ids so far (B,T)

Read it from top to bottom; nothing is used before it is explained.

     1  Ids, configuration        Table 3       8  Encoder and decoder           3.1
     2  Masks                     3.2.3         9  The model                     3, 3.4
     3  Attention                 3.2.1        10  Label-smoothed loss           5.4
     4  Multi-head attention      3.2.2        11  Learning rate, Adam           5.3
     5  Feed-forward              3.3          12  Tokens, batches               5.1
     6  Embedding, positions      3.4, 3.5     13  Greedy and beam search        6.1
     7  LayerNorm, residual       3.1, 5.4     14  From text to text, checkpoints 6.1

Shape letters, on every reshape: B batch, S source length, T target length, D d_model, H heads, K head size (D/H),
F feed-forward size, V vocabulary, N layers, W beams. Besides: L a length that is either S or T, t target tokens decoded
so far, R rows that have a label, B' sources that are still searched. (In code, F is torch.nn.functional.) A mask says
True where attention is allowed. Sequences are padded on the right only.

Where this file departs from the paper:
  - The projections of attention carry biases, as torch.nn's do; the paper's formula shows none.
  - Pre-norm (norm="pre") is offered beside the paper's post-norm, with the final norm that it needs.
  - Source and target may have tables of their own (src_vocab_size); the tie is then the target's two uses only.
  - The smoothing mass never falls on PAD, which is no word (section 10).
  - SentencePiece with byte fallback stands in for the paper's BPE and word pieces.
"""

import argparse
import gzip
import hashlib
import io
import math
import os
import pickle
import re
import shutil
import sys
import unicodedata
import zipfile
import zlib
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import nn
from torch.nn import functional as F

# --- 1. Ids and configuration (Table 3) ----------------------------------------------------------------------------
# Four ids are fixed in every vocabulary. PAD is 0, so that a tensor of zeros is a batch of nothing. BOS starts the
# decoder's input and is never a label; EOS ends source and target, and is the label that teaches the model to stop.

PAD, BOS, EOS, UNK = 0, 1, 2, 3

# One switch for the places where a formula of this file has a faster twin: attention, LayerNorm, products (kernels of
# PyTorch) and the loss (section 10). False runs the formulas as they are written; the tests hold each pair to the same
# numbers.
FUSED = True


@dataclass(frozen=True)
class Config:
    """Sizes of a model. Lengths are in tokens and include BOS or EOS. Raises ValueError for sizes that cannot be."""

    vocab_size: int  # V of the target; of the source as well, unless src_vocab_size is given
    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 2048
    n_layers: int = 6
    dropout: float = 0.1
    norm: str = "post"
    max_len: int = 256
    src_vocab_size: int | None = None  # None: one table for source, target and output (§3.4)

    def __post_init__(self):
        for name in ("d_model", "n_heads", "d_ff", "n_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("vocab_size", "src_vocab_size"):
            if getattr(self, name) is not None and getattr(self, name) <= UNK:
                raise ValueError(f"{name} must be more than the {UNK + 1} fixed ids, not {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model {self.d_model} cannot be split into {self.n_heads} heads of equal size")
        if self.d_model % 2:
            raise ValueError(f"d_model must be even, for pairs of sine and cosine, not {self.d_model}")
        if not 0 <= self.dropout < 1 or self.norm not in ("post", "pre"):
            raise ValueError(f"dropout is from 0 to below 1, norm 'post' or 'pre', not {self.dropout}, {self.norm!r}")
        if self.max_len < 2:
            raise ValueError(f"max_len must be at least 2 (a token and its EOS), not {self.max_len}")


PRESETS = {  # tiny, for small corpora, after "Good for Misconceived Reasons" (Wu et al., ACL 2021)
    "tiny": dict(n_layers=4, d_model=128, n_heads=4, d_ff=256, dropout=0.3),
    "small": dict(n_layers=4, d_model=256, n_heads=8, d_ff=1024, dropout=0.1),
    "base": dict(n_layers=6, d_model=512, n_heads=8, d_ff=2048, dropout=0.1),
    "big": dict(n_layers=6, d_model=1024, n_heads=16, d_ff=4096, dropout=0.3),
}

# --- 2. Masks (§3.2.3) ---------------------------------------------------------------------------------------------
# Two things must not be looked at: padding, because it is not there, and the future, because the decoder is to
# predict it. Both masks are boolean, True = may attend, and broadcast over heads.
#
# Only keys are masked, never queries. A pad position as a query computes something nobody reads: it is nobody's key,
# and its label is PAD, which the loss leaves out, so its gradient is exactly 0. Masking the row too would leave it
# nothing to attend to, and a softmax over nothing is 0/0 = NaN.


def padding_mask(ids):
    """(B,L) ids -> (B,1,1,L): True at real tokens."""
    return (ids != PAD)[:, None, None, :]


def causal_mask(length, device=None):
    """(1,1,L,L): position i (a row) may see position j (a column) when j <= i."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()


# --- 3. Scaled dot-product attention (§3.2.1) ----------------------------------------------------------------------
# Every query takes a weighted average of the values; the weight is how well it matches each key.
#
#     Attention(q, k, v) = softmax(q k^T / sqrt(K)) v
#
# For q and k with independent entries of mean 0 and variance 1 the product has variance K; without the root the softmax
# would sit where it is nearly one-hot and its gradient nearly 0.
#   query (B,H,T,K)   key, value (B,H,S,K)   mask (B|1,1,T|1,S)   ->   (B,H,T,K)


def attention_weights(query, key, mask=None):
    """The formula's softmax: (B,H,T,S), rows sum to 1. A row with nothing to see gets zeros, not NaN."""
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # (B,H,T,S); scaled first, for fp16's sake
    if mask is None:
        return scores.softmax(-1)
    # The lowest finite number, not -inf: a row of -inf alone would be NaN, and its gradient would ruin every weight.
    # That row's softmax is uniform; the second fill makes it 0. All other rows are 0 there already.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).masked_fill(~mask, 0.0)


def attention(query, key, value, mask=None, causal=False):
    """Weighted average of `value` (§3.2.1). `causal` stands for causal_mask and needs as many queries as keys: the
    fused kernel aligns its triangle at the top left, so one cached query over S keys would see the first key only."""
    if causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(f"causal attention needs equal lengths, not {query.shape[-2]} and {key.shape[-2]}")
    # On a CPU, for sentences, the kernel's backward takes several times as long as the formula's: not in training.
    if FUSED and not (query.requires_grad and query.device.type == "cpu"):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    if causal:
        mask = causal_mask(query.shape[-2], query.device)
    return attention_weights(query, key, mask) @ value


# --- 4. Multi-head attention (§3.2.2) ------------------------------------------------------------------------------
# One average per query is blunt. H heads, each over its own projection to K = D/H dimensions, can look at H places
# for H reasons, at the price of one head of size D.
#
#     MultiHead(x, m) = Concat(head_1 .. head_H) W^O,    head_h = Attention(x W^Q_h, m W^K_h, m W^V_h)
#
# The H projections of each kind lie side by side in one D x D matrix, and the three kinds in one (3D, D) matrix, so
# that self-attention projects in a single product. Cross-attention takes the first third for the queries and the other
# two for the memory. The paper has it in three places: encoder self-attention, decoder self-attention (causal), and
# cross-attention, whose queries come from the decoder and whose keys and values come from the encoder.


# A search feeds one target token at a time, and would compute the keys and values of all earlier ones again at every
# step. What it keeps instead, per decoder layer: the keys and values of the target tokens so far, which grow by
# one each step and belong to a beam (row), and those of the memory, which never change and belong to a source. (The
# queries of earlier tokens are of no more use: what they asked for is already in those tokens' states.)


@dataclass
class LayerCache:
    """Keys and values side by side as the projections gave them, not yet split into heads: rows are then contiguous,
    and quick to reorder."""

    memory: torch.Tensor  # (B,S,2D) of the sources
    tokens: torch.Tensor | None = None  # (B*W,t,2D) of the target tokens

    @property
    def length(self):
        return 0 if self.tokens is None else self.tokens.shape[1]

    def append(self, new):
        """new (B*W,T,2D) -> all so far, (B*W,t+T,2D)"""
        self.tokens = new if self.tokens is None else torch.cat([self.tokens, new], 1)
        return self.tokens


@dataclass
class Cache:
    """All layers' caches. Every layer is reordered together: one forgotten would mix two beams' histories, and the
    search would still run, only wrong."""

    layers: list

    @property
    def length(self):
        return self.layers[0].length

    def reorder(self, rows):
        """Row r continues what was row rows[r]: (B*W,) indices."""
        for layer in self.layers:
            layer.tokens = layer.tokens.index_select(0, rows)

    def keep_sources(self, sources):
        """Only these of the B sources stay. The memory is touched here and nowhere else."""
        for layer in self.layers:
            layer.memory = layer.memory.index_select(0, sources)


ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x, weight, bias=None):
    """x W^T + b: x (..., i), weight (o, i), bias (o,) -> (..., o). In a search on a CPU it goes to oneDNN, which is in
    PyTorch too: MKL, which PyTorch's own linear calls, has half its speed on processors that are not Intel's."""
    exact = x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if FUSED and ONEDNN and exact and x.device.type == "cpu" and not torch.is_grad_enabled():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)  # W^Q, W^K, W^V, each transposed, one below the other
        self.out = nn.Linear(d_model, d_model)  # W^O

    def split(self, x, parts):
        """(B,L,parts*D) -> (parts,B,H,L,K). View before transpose: a view straight to (B,H,L,K) has the same shape and
        mixes positions with heads."""
        B, L, _ = x.shape
        return x.view(B, L, parts, self.n_heads, -1).permute(2, 0, 3, 1, 4)

    def merge(self, heads):
        """(B,H,T,K) -> (B,T,D), then W^O."""
        return linear(heads.transpose(1, 2).flatten(2), self.out.weight, self.out.bias)  # (B,T,H,K) -> (B,T,D)

    def forward(self, x, mask=None, causal=False, cache=None):
        """Self-attention. x (B,T,D) -> (B,T,D). With a cache, x holds the newest T tokens only, and the keys and
        values of the earlier ones come out of the cache instead of being computed again."""
        qkv = linear(x, self.qkv.weight, self.qkv.bias)  # (B,T,3D)
        query, key, value = self.split(qkv, 3)  # (B,H,T,K) each
        if cache is not None:
            key, value = self.split(cache.append(qkv[:, :, x.shape[-1] :]), 2)  # (B,H,t+T,K), t tokens before these
        return self.merge(attention(query, key, value, mask, causal))

    def memory_keys_values(self, memory):
        """What cross-attention needs of the memory (B,S,D): keys and values, (B,S,2D). They are the same for every
        target token, so a search computes them once."""
        D = memory.shape[-1]
        return linear(memory, self.qkv.weight[D:], self.qkv.bias[D:])

    def cross(self, x, keys_values, mask):
        """Cross-attention. x (B*W,T,D), keys and values (B,S,2D), mask (B,1,1,S) -> (B*W,T,D).

        Queries do not see one another here, so the W beams of one source may stand side by side as W*T queries of
        that source: the memory is never copied for each beam. In training W is 1 and the reshape does nothing."""
        D = x.shape[-1]
        key, value = self.split(keys_values, 2)  # (B,H,S,K) each
        query = linear(x.reshape(key.shape[0], -1, D), self.qkv.weight[:D], self.qkv.bias[:D])  # (B,W*T,D)
        (query,) = self.split(query, 1)  # (B,H,W*T,K)
        return self.merge(attention(query, key, value, mask)).view_as(x)  # (B,W*T,D) -> (B*W,T,D)


# --- 5. Position-wise feed-forward (§3.3) --------------------------------------------------------------------------
# Attention moves information between positions; this thinks about each position alone, with the same two matrices
# everywhere. (B,T,D) -> (B,T,F) -> (B,T,D), F = 4D in the paper.
#
#     FFN(x) = max(0, x W1 + b1) W2 + b2


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w1 = nn.Linear(d_model, d_ff)
        self.w2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return linear(linear(x, self.w1.weight, self.w1.bias).relu(), self.w2.weight, self.w2.bias)


# --- 6. Embedding and positions (§3.4, §3.5) -----------------------------------------------------------------------
# A token is a row of the table. Attention knows no order (permute keys and values together and nothing changes), so
# each position adds a fingerprint of its own: pairs of sine and cosine, of wavelengths from 2 pi to 10000 * 2 pi.
#
#     PE(pos, 2i) = sin(pos / 10000^(2i/D))      PE(pos, 2i+1) = cos(pos / 10000^(2i/D))
#
# A shift by k turns each pair by the angle k * frequency, so PE(pos+k) is a fixed linear map of PE(pos): "k to the
# left" is something a head can learn.
#
# Scales: the table's rows have entries of standard deviation D^-0.5 (section 9), so a row times sqrt(D) has entries
# near 1, as the sinusoids have, and as an output matrix the same rows give logits near 1. Without sqrt(D) the
# positions would drown the words. With nn.Embedding's default deviation of 1 the logits would have deviation sqrt(D),
# and the first loss would be tens of nats instead of ln V + 1/2.


def sinusoids(length, d_model):
    """(length, D), §3.5. The frequencies 10000^(-2i/D) are made in log space, as exp of a product, in float64."""
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))  # (D/2,)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (length, D/2)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()  # (length, D/2, 2) -> (length, D)


class Dropout(nn.Module):
    """Each number is 0 with probability p, the others grow by 1/(1-p), so that the mean stays (§5.4)."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        # PyTorch's CPU dropout takes one slow draw for each number. Here a draw of 64 bits makes four coins of 16 bits,
        # in a third of the time; p is met to 2^-16.
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        coins = draws.view(torch.int16)[: x.numel()].view(x.shape)  # uniform over -2^15 .. 2^15 - 1
        keep = coins >= min(round(self.p * 2**16), 2**16 - 1) - 2**15  # (the threshold must itself fit into 16 bits)
        return x * keep.to(x.dtype).mul_(1 / (1 - self.p))


class Embedding(nn.Module):
    def __init__(self, table, max_len, dropout):
        super().__init__()
        self.table = table  # (V,D), shared with whoever else has it
        # A buffer moves with the model; persistent=False keeps it out of checkpoints: it is a formula, not a weight.
        self.register_buffer("positions", sinusoids(max_len, table.shape[1]), persistent=False)
        self.dropout = Dropout(dropout)  # §5.4: "to the sums of the embeddings and the positional encodings"

    def forward(self, ids, start=0):
        """(B,L) ids of positions start .. start+L-1 -> (B,L,D). Raises ValueError past max_len."""
        end = start + ids.shape[1]
        if end > len(self.positions):  # a slice past the end comes back short, and one row of it would be broadcast
            raise ValueError(f"a sequence of {end} tokens is longer than the model's max_len of {len(self.positions)}")
        words = F.embedding(ids, self.table) * math.sqrt(self.table.shape[1])
        return self.dropout(words + self.positions[start:end])  # (B,L,D) + (L,D)


# --- 7. LayerNorm and the residual connection (§3.1, §5.4) ---------------------------------------------------------
# Each position's D numbers are shifted and scaled to mean 0 and variance 1, then to a learned mean and scale:
#
#     LN(x) = (x - mean) / sqrt(variance + eps) * weight + bias        variance over D, divided by D, not D - 1
#
# and each sub-layer learns a correction to its input, not a replacement. Where the norm stands is the one choice:
#
#     post-norm (the paper)   x = LN(x + Dropout(f(x)))      the sum itself is normed: deep stacks need the warm-up
#     pre-norm                x = x + Dropout(f(LN(x)))      a clear path from loss to input: forgiving; the sum grows
#                                                            with depth, so each stack ends in one more norm


class LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.eps = eps

    def forward(self, x):
        if FUSED:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


class Residual(nn.Module):
    """One sub-layer's norm and dropout; the sub-layer itself comes as a function (B,L,D) -> (B,L,D)."""

    def __init__(self, config):
        super().__init__()
        self.norm = LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)  # §5.4: "to the output of each sub-layer, before it is added"
        self.pre = config.norm == "pre"

    def forward(self, x, sublayer):
        if self.pre:
            return x + self.dropout(sublayer(self.norm(x)))
        return self.norm(x + self.dropout(sublayer(x)))


# --- 8. Encoder and decoder (§3.1) ---------------------------------------------------------------------------------
# An encoder layer looks around in the source, then thinks. A decoder layer looks back over the target so far, then
# into the source, then thinks. What goes in comes out in the same shape, so layers can be stacked:
#
#     encoder layer   x (B,S,D) -> self-attention -> feed-forward -> (B,S,D)
#     decoder layer   x (B,T,D) -> causal self-attention -> cross-attention to memory (B,S,D) -> feed-forward -> (B,T,D)
#
# Each of these sub-layers stands inside a residual connection with a norm of its own: 2 in an encoder layer, 3 in a
# decoder layer.


class EncoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(2))

    def forward(self, x, mask):
        """x (B,S,D), mask (B,1,1,S) -> (B,S,D)"""
        x = self.residuals[0](x, lambda x: self.attention(x, mask))
        return self.residuals[1](x, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.cross_attention = MultiHeadAttention(config.d_model, config.n_heads)
        self.feed_forward = FeedForward(config.d_model, config.d_ff)
        self.residuals = nn.ModuleList(Residual(config) for _ in range(3))

    def forward(self, x, memory, memory_mask, cache=None):
        """x (B,T,D), memory (B,S,D), memory_mask (B,1,1,S) -> (B,T,D). A LayerCache holds what earlier calls computed:
        x is then only the newest tokens, (B*W,T,D) for W beams."""
        mask, causal = None, cache is None
        if cache is not None and x.shape[1] > 1:  # several new tokens over t old ones: the triangle's lower rows
            mask = causal_mask(cache.length + x.shape[1], x.device)[:, :, cache.length :]  # (1,1,T,t+T)
        # (A single new token may see all that came before it: no mask at all.)
        # No padding mask on the target: pads stand on the right, where the causal mask hides them from all real tokens.
        x = self.residuals[0](x, lambda x: self.attention(x, mask, causal, cache))
        if cache is None:
            keys_values = self.cross_attention.memory_keys_values(memory)
        else:
            keys_values = cache.memory
        x = self.residuals[1](x, lambda x: self.cross_attention.cross(x, keys_values, memory_mask))
        return self.residuals[2](x, self.feed_forward)


class Stack(nn.Module):
    """N layers one after the other, and pre-norm's final norm."""

    def __init__(self, layer, config):
        super().__init__()
        self.layers = nn.ModuleList(layer(config) for _ in range(config.n_layers))
        self.norm = LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()

    def forward(self, x, *context, caches=None):
        for i, layer in enumerate(self.layers):
            x = layer(x, *context) if caches is None else layer(x, *context, caches[i])
        return self.norm(x)


# --- 9. The model (§3, §3.4) ---------------------------------------------------------------------------------------
# forward:  src, tgt  ->  memory = encoder(embed(src))  ->  states = decoder(embed(tgt), memory)  ->  states x table^T
#
# §3.4: one (V,D) table embeds the source, embeds the target, and maps states to logits. A word's vector thus learns
# from all three, and one matrix stands in place of three. It needs one vocabulary for both languages.


def at_least_float32(x):
    """A sum over V terms in bfloat16 would keep two digits, so losses leave half precision first."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Transformer(nn.Module):
    """Encoder-decoder of the paper. forward(src (B,S), tgt (B,T)) -> logits (B,T,V).

    src ends each row with EOS; tgt starts with BOS; both are padded with PAD on the right."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        table = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        src_table = table
        if config.src_vocab_size is not None:
            src_table = nn.Parameter(torch.empty(config.src_vocab_size, config.d_model))
        self.src_embedding = Embedding(src_table, config.max_len, config.dropout)
        self.tgt_embedding = Embedding(table, config.max_len, config.dropout)
        self.encoder = Stack(EncoderLayer, config)
        self.decoder = Stack(DecoderLayer, config)
        self.init_weights()

    def init_weights(self):
        """All initialisation, in one place. Biases 0, norms 1 and 0; tables as section 6 says.

        Xavier (Glorot and Bengio, 2010) keeps variances level through a matrix by its two sizes. The three stacked
        projections are three D x D matrices, so each third is drawn by its own sizes; drawn as one (3D, D) matrix
        they would start smaller by a factor of sqrt(2)."""
        for module in self.modules():
            if isinstance(module, Embedding):  # a shared table is drawn twice: harmless
                nn.init.normal_(module.table, std=self.config.d_model**-0.5)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                for third in module.qkv.weight.data.chunk(3):
                    nn.init.xavier_uniform_(third)

    def encode(self, src):
        """src (B,S) -> memory (B,S,D)"""
        return self.encoder(self.src_embedding(src), padding_mask(src))

    def decode(self, tgt, memory, src_mask, cache=None):
        """tgt (B,T), memory (B,S,D), src_mask = padding_mask(src) -> states (B,T,D), which `logits` turns into scores.

        With a cache from `start_cache`, tgt holds only the tokens that the cache has not seen, (B*W,T), and its
        position is the number of cached tokens; memory may be None, as the cache has its keys and values."""
        if cache is None:
            return self.decoder(self.tgt_embedding(tgt), memory, src_mask)
        return self.decoder(self.tgt_embedding(tgt, cache.length), memory, src_mask, caches=cache.layers)

    def logits(self, states):
        """(..., D) -> (..., V)"""
        return linear(states, self.tgt_embedding.table)

    def forward(self, src, tgt):
        return self.logits(self.decode(tgt, self.encode(src), padding_mask(src)))

    def log_probs(self, states):
        """(..., D) -> (..., V), natural logarithms of probabilities"""
        return at_least_float32(self.logits(states)).log_softmax(-1)

    def next_log_probs(self, last, src_mask, cache):
        """Log-probabilities (B*W,V) of what follows the newest tokens `last` (B*W,1); the cache stands for the rest."""
        return self.log_probs(self.decode(last, None, src_mask, cache)[:, -1])  # states (B*W,1,D)

    def label_log_probs(self, src, tgt_in, tgt_out):
        """(B,T) log-probability of each label (see `collate`), 0 where there is none; with few logits at a time."""
        states, real = self.decode(tgt_in, self.encode(src), padding_mask(src)), tgt_out != PAD  # (B,T,D), (B,T)
        out = torch.zeros(real.shape, device=real.device, dtype=torch.promote_types(states.dtype, torch.float32))
        rows = max(1, (1 << 24) // self.config.vocab_size)
        labels = zip(states[real].split(rows), tgt_out[real].split(rows))  # (rows,D), (rows,)
        out[real] = torch.cat([self.log_probs(h).gather(1, y[:, None]).squeeze(1) for h, y in labels]).to(out.dtype)
        return out

    def start_cache(self, memory):
        """A Cache for decoding against this memory: its keys and values, computed once, and no target tokens yet."""
        return Cache([LayerCache(layer.cross_attention.memory_keys_values(memory)) for layer in self.decoder.layers])

    def set_dropout(self, p):
        """Another dropout for the same weights, as fine-tuning may want."""
        self.config = replace(self.config, dropout=p)
        for module in self.modules():
            if isinstance(module, Dropout):
                module.p = p

    @property
    def device(self):
        return self.tgt_embedding.table.device

    def n_parameters(self):
        """Trainable numbers; a shared table counts once."""
        return sum(p.numel() for p in self.parameters())


# --- 10. Label-smoothed loss (§5.4) --------------------------------------------------------------------------------
# Cross-entropy alone is never content: it pays for probability 1.0. Smoothing (Szegedy et al., 2015) asks for 1 - e
# on the label y and spreads e evenly over the vocabulary, here without PAD, which is no word but our way to fill a
# rectangle (BOS and the bytes get their share like any other piece):
#
#     NLL      = -log p_y                                     true negative log-likelihood, what perplexity is made of
#     smoothed = (1 - e) NLL + e mean_{k != PAD} (-log p_k)   what is trained; its minimum is not 0, but the entropy
#                                                             of the smoothed target
#
# Sums and a count come back, never means: an update may consist of several batches, and a mean of means would weigh a
# token in a short batch more than one in a long batch. Who updates divides once, by all the tokens of the update.


@dataclass
class LossSums:
    smoothed: torch.Tensor  # (), sum over real target tokens
    nll: torch.Tensor  # (), in nats, no gradient; exp(nll / tokens) is perplexity
    tokens: int


def label_smoothed_loss(logits, labels, smoothing=0.1):
    """logits (B,T,V) for labels (B,T), with PAD where there is none -> LossSums. The formula, as it is written above.
    Pad positions take no part: not in the sums, not in the count, and no gradient reaches them."""
    real = labels != PAD  # (B,T)
    log_probs = at_least_float32(logits[real]).log_softmax(-1)  # (tokens,V)
    nll = -log_probs.gather(1, labels[real][:, None]).sum()
    spread = -(log_probs.sum() - log_probs[:, PAD].sum()) / (log_probs.shape[1] - 1)
    return LossSums((1 - smoothing) * nll + smoothing * spread, nll.detach(), len(log_probs))


# In training, logits are the largest thing there is: B*T*V numbers, which autograd reads and writes half a dozen times,
# from main memory, as no cache holds them. But their gradient is known without autograd,
#
#     d smoothed / d z = softmax(z) - target,     target = 1 - e at the label, plus e/(V-1) everywhere but at PAD
#
# so the last product, the loss and both gradients can be had a few rows at a time, and the whole (B,T,V) is never
# stored. The output projection belongs to it for that reason. The gradients are made in the forward pass, while the
# rows are at hand: all that backward can add is one factor, the gradient of the sum itself. Validation asks for no
# gradient and skips them. Tested equal to the formula, gradients included.


class FusedLoss(torch.autograd.Function):
    CHUNK = 1 << 22  # logits at a time: 16 MB, which a processor's cache holds; an accelerator gets more, below

    @staticmethod
    def forward(ctx, states, table, labels, smoothing):
        """states (R,D), table (V,D), labels (R,) without PAD -> smoothed and NLL, summed."""
        V = len(table)
        device = states.device.type
        d_states, d_table = torch.empty_like(states), torch.zeros_like(table)  # d_table sums over the chunks
        dtype = torch.promote_types(table.dtype, torch.float32)
        if torch.is_autocast_enabled(device):  # products in half precision, sums and softmax in float32
            states, table = (x.to(torch.get_autocast_dtype(device)) for x in (states, table))
        share = torch.full((V,), smoothing / (V - 1), device=states.device, dtype=dtype)  # (V,) of the smoothed target
        share[PAD] = 0.0
        smoothed = nll = torch.zeros((), device=states.device, dtype=dtype)
        rows = max(1, FusedLoss.CHUNK * (1 if device == "cpu" else 16) // V)
        with torch.autocast(device, enabled=False):
            for h, y, d_h in zip(states.split(rows), labels.split(rows), d_states.split(rows)):
                log_probs = at_least_float32(h @ table.T).log_softmax(-1)  # (rows,V)
                nll_rows = -log_probs.gather(1, y[:, None]).sum()
                nll = nll + nll_rows
                smoothed = smoothed + (1 - smoothing) * nll_rows - log_probs.sum(0) @ share
                if ctx.needs_input_grad[0]:
                    d_logits = log_probs.exp_().sub_(share)  # (rows,V), in place: no second copy
                    d_logits.scatter_add_(1, y[:, None], torch.full_like(d_logits[:, :1], smoothing - 1))
                    d_logits = d_logits.to(h.dtype)
                    d_h.copy_(d_logits @ table)
                    d_table += d_logits.T @ h
        ctx.save_for_backward(d_states, d_table)
        ctx.mark_non_differentiable(nll)
        return smoothed, nll

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_smoothed, _):
        d_states, d_table = ctx.saved_tensors
        return d_smoothed * d_states, d_smoothed * d_table, None, None


def training_loss(model, src, tgt_in, tgt_out, smoothing=0.1):
    """LossSums of a batch (see `collate`): what forward and label_smoothed_loss give, without the pads' share of the
    work and without the logits' memory."""
    states = model.decode(tgt_in, model.encode(src), padding_mask(src))  # (B,T,D)
    if not FUSED:
        return label_smoothed_loss(model.logits(states), tgt_out, smoothing)
    real = tgt_out != PAD  # (B,T)
    smoothed, nll = FusedLoss.apply(states[real], model.tgt_embedding.table, tgt_out[real], smoothing)
    return LossSums(smoothed, nll, int(real.sum()))


# --- 11. Learning rate and optimizer (§5.3) ------------------------------------------------------------------------
# The rate rises in a straight line for `warmup` updates, then falls with the root of the step:
#
#     rate(step) = D^-0.5 min(step^-0.5, step * warmup^-1.5)          peak (D * warmup)^-0.5 at step = warmup
#
# Adam's second moment is a guess at first, and post-norm's upper layers get large gradients at the start: full steps
# would be taken on noise.


def noam_rate(step, d_model, warmup):
    """Rate of update `step`, counted from 1 (§5.3, equation 3). Raises ValueError for step or warmup below 1."""
    if step < 1 or warmup < 1:
        raise ValueError(f"steps and warm-up are counted from 1, not {step} and {warmup}")
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def adam(model):
    """Adam with the paper's constants (§5.3). The rate is set before each update, from noam_rate."""
    return torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


# --- 12. Tokens and batches (§5.1) ---------------------------------------------------------------------------------
# Text is normalised the same way everywhere (training, translating, scoring), cut into pieces by SentencePiece, and
# kept as ids in flat arrays. Batches hold sentences of about the same length and a bounded number of tokens.


def normalize(text):
    """NFC, with every run of white space made one space and none at the ends. ZWJ and ZWNJ, which decide how
    letters join, stay. U+2581 is what SentencePiece writes for a space and U+0000 what it ends strings with: both count
    as space. A lone surrogate, which UTF-8 cannot carry, becomes U+FFFD."""
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(unicodedata.normalize("NFC", text).replace("\u2581", " ").replace("\0", " ").split())


class Tokenizer:
    """SentencePiece (Kudo and Richardson, 2018) with our fixed ids and our normalisation in place of its own. It cuts
    and joins targets, and sources too unless .source is another one (separate vocabularies)."""

    def __init__(self, model_bytes, source=None):
        """model_bytes: a SentencePiece model. Raises ValueError if it is none or its four fixed ids are not ours."""
        if not model_bytes:
            raise ValueError("not a SentencePiece model: it is empty")
        self.model_bytes, self.source = model_bytes, source or self
        self.sha256 = hashlib.sha256(model_bytes + (source.model_bytes if source else b"")).hexdigest()
        try:
            self.pieces = sentencepiece.SentencePieceProcessor(model_proto=model_bytes)
        except RuntimeError as error:
            raise ValueError(f"not a SentencePiece model: {error}") from None
        ids = self.pieces.pad_id(), self.pieces.bos_id(), self.pieces.eos_id(), self.pieces.unk_id()
        if ids != (PAD, BOS, EOS, UNK):
            raise ValueError(
                f"the tokenizer has PAD, BOS, EOS, UNK = {ids}, not {(PAD, BOS, EOS, UNK)}: train it with "
                f"--pad_id={PAD} --bos_id={BOS} --eos_id={EOS} --unk_id={UNK}"
            )

    @classmethod
    def train(cls, lines, vocab_size, kind="bpe", tags=()):
        """Learn at most vocab_size pieces from lines of text (any iterable), by byte pair encoding (§5.1) or as a
        unigram model (kind="unigram"; Kudo, 2018). A small corpus has fewer to give: see .vocab_size. `tags` ("<2bn>")
        are words that stay one piece. Raises ValueError for a vocab_size that cannot hold the alphabet, naming one that
        can, and for what cannot be a tag."""
        for tag in tags:
            taken = re.fullmatch("<s>|</s>|<pad>|<unk>|<0x[0-9A-F]{2}>", tag) or list(tags).count(tag) > 1
            if taken or not tag or normalize(tag) != tag or " " in tag:
                raise ValueError(f"{tag!r} cannot be a tag: it is no single word, or taken, or text for ever")
        alphabet = {" "}  # always there: SentencePiece writes a space before the first word

        def stream():
            for line in map(normalize, lines):
                if line:
                    alphabet.update(line)
                    yield line

        model = io.BytesIO()
        # Every character of the corpus gets a piece, and the 256 bytes stand by for characters never seen, so nothing
        # that a user types is lost.
        # fmt: off
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=stream(), model_writer=model, vocab_size=vocab_size, model_type=kind,
                hard_vocab_limit=False, pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK, unk_surface="\ufffd",
                normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=1.0,
                byte_fallback=True, max_sentence_length=1 << 20, user_defined_symbols=list(tags), minloglevel=2,
            )
        # fmt: on
        except RuntimeError:
            smallest = len(alphabet) + 256 + UNK + 1 + len(tags)
            if len(alphabet) == 1:
                raise ValueError("there is no text to learn a vocabulary from") from None
            if vocab_size < smallest:
                raise ValueError(
                    f"vocab_size {vocab_size} is too small for this text: its characters, 256 bytes and "
                    f"the fixed ids need {smallest}"
                ) from None
            raise
        return cls(model.getvalue())

    @property
    def vocab_size(self):
        return self.pieces.get_piece_size()

    def encode(self, text):
        """Text, normalised here -> ids, without BOS and EOS. What looks like a control piece ("</s>") stays text."""
        return self.pieces.encode(normalize(text))

    def decode(self, ids):
        """Ids -> normalised text: one line, whatever the ids. decode(encode(text)) == normalize(text)."""
        return normalize(self.pieces.decode(list(ids)))


class TokenRows:
    """Many id sequences in one flat array: row i is ids[offsets[i]:offsets[i+1]]. A list of lists would spend some
    30 bytes on what fits in 2."""

    def __init__(self, ids, offsets):
        self.ids, self.offsets = ids, offsets

    @classmethod
    def encode(cls, tokenizer, lines, chunk=10000):
        """Lines -> rows, without BOS and EOS; chunk by chunk, so that few Python ints live at a time."""
        dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        parts, lengths = [np.zeros(0, dtype)], []
        for start in range(0, len(lines), chunk):
            rows = tokenizer.pieces.encode([normalize(line) for line in lines[start : start + chunk]], num_threads=-1)
            parts.append(np.fromiter(chain.from_iterable(rows), dtype))
            lengths += map(len, rows)
        return cls(np.concatenate(parts), np.cumsum([0, *lengths], dtype=np.int64))

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        return self.ids[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths(self):
        return np.diff(self.offsets)

    def select(self, keep):
        """The rows where the boolean array `keep` is True."""
        lengths = self.lengths
        return TokenRows(self.ids[np.repeat(keep, lengths)], np.concatenate([[0], np.cumsum(lengths[keep])]))


def encode_pairs(tokenizer, pairs):
    """[(source, target), ...] -> their TokenRows."""
    return tuple(TokenRows.encode(part, side) for part, side in zip((tokenizer.source, tokenizer), zip(*pairs)))


def pad_rows(rows):
    """List of id sequences -> (B,L) int64, PAD on the right."""
    out = np.full((len(rows), max(map(len, rows))), PAD, np.int64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return torch.from_numpy(out)


def collate(src_rows, tgt_rows, indices):
    """Pairs -> src (B,S) ending in EOS, tgt_in (B,T) starting with BOS, tgt_out (B,T) ending in EOS.

    The decoder reads tgt_in and must say tgt_out: the same target, one place apart. So position t is trained on
    the true tokens before t, all positions at once."""
    src = pad_rows([[*src_rows[i], EOS] for i in indices])
    tgt_in = pad_rows([[BOS, *tgt_rows[i]] for i in indices])
    tgt_out = pad_rows([[*tgt_rows[i], EOS] for i in indices])
    return src, tgt_in, tgt_out


class TokenBatchSampler:
    """Batches of pairs of similar length, each at most `batch_tokens` padded tokens on its larger side.

    The pairs of an epoch are shuffled, sorted by length (target first, then source; the shuffle decides among equals),
    cut into batches, and the batches shuffled. Sorted lengths are the same in every epoch, so the cuts are too: they
    are made once, and the number of batches never changes. The order is a pure function of (seed, epoch); each pair
    comes once an epoch.
    """

    def __init__(self, src_lengths, tgt_lengths, batch_tokens, seed=0):
        """Lengths in tokens, EOS included. Raises ValueError if a single pair is over the budget."""
        self.src_lengths, self.tgt_lengths, self.seed = np.asarray(src_lengths), np.asarray(tgt_lengths), seed
        larger = np.maximum(self.src_lengths, self.tgt_lengths)
        if len(larger) and larger.max() > batch_tokens:
            raise ValueError(f"a pair of {larger.max()} tokens does not fit into a batch of {batch_tokens} tokens")
        self.cuts, longest = [0], 0
        for i, size in enumerate(larger[self._sorted(np.arange(len(larger)))].tolist()):
            longest = max(longest, size)
            if (i + 1 - self.cuts[-1]) * longest > batch_tokens:
                self.cuts.append(i)
                longest = size
        self.cuts.append(len(larger))

    def _sorted(self, order):
        return order[np.lexsort((self.src_lengths[order], self.tgt_lengths[order]))]  # stable; by target first

    def __len__(self):
        """Batches in an epoch."""
        return len(self.cuts) - 1 if len(self.src_lengths) else 0

    def epoch(self, epoch):
        """The batches of this epoch (from 0), as index arrays."""
        rng = np.random.default_rng([self.seed, epoch])
        order = self._sorted(rng.permutation(len(self.src_lengths)))
        return [order[self.cuts[b] : self.cuts[b + 1]] for b in rng.permutation(len(self))]


# --- 13. Search (§6.1) ---------------------------------------------------------------------------------------------
# The model gives log p(next token | source, tokens so far); a translation is a whole sequence with a high sum of those,
# its EOS included. Greedy search takes the best token at each step. Beam search keeps the W best beginnings, because
# a first word that looks second best may lead to the best sentence.
#
# Longer hypotheses have lower sums, so finished ones are compared by (Wu et al., 2016, §7)
#
#     score = log_prob / lp(n),   lp(n) = ((5 + n) / 6)^alpha,   n tokens with EOS, alpha 0.6 in §6.1


@dataclass
class Hypothesis:
    """A finished translation: tokens without BOS and EOS, log-probability of tokens and EOS in nats, and
    score = log_prob / length_penalty(len(tokens) + 1, alpha)."""

    tokens: list
    log_prob: float
    score: float


def length_penalty(n, alpha):
    return ((5 + n) / 6) ** alpha


NOT_FINITE = "no translation is left: the limits allow none, or the model's numbers are not finite (damaged weights)"


@contextmanager
def evaluation(model):
    """`with evaluation(model)`: no dropout, no gradients; the model's mode is restored whatever happens inside."""
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(training)


@dataclass
class Limits:
    """What may be said. Tokens of the vocabulary that may not come next are ruled out after the softmax, and nothing is
    made up for it: a log_prob is the model's own."""

    most: torch.Tensor  # (B,) tokens, without EOS. At the limit only EOS is left: every hypothesis is whole
    least: torch.Tensor  # (B,)
    prefix: torch.Tensor  # (B,P) how the translation must begin; PAD where it is free
    no_repeat_ngram: int  # no n-gram of this length comes twice; 0 for no such rule

    @classmethod
    def of(cls, model, src, extra_len=50, min_extra=None, prefix=None, no_repeat_ngram=0):
        """For sources (B,S): at most extra_len tokens more than the source (§6.1), at least min_extra more (negative:
        fewer), within what the decoder can count to: BOS and the tokens must fit into its max_len."""
        length, room = (src != PAD).sum(1) - 1, model.config.max_len - 1
        prefix = pad_rows(prefix or [[]] * len(src)).to(src.device)  # (B,P)
        if prefix.shape[1] > room:
            raise ValueError(f"a prefix of {prefix.shape[1]} tokens is over the limit of {room}")
        most = torch.maximum((length + extra_len).clamp(0, room), (prefix != PAD).sum(1))
        least = torch.zeros_like(most) if min_extra is None else torch.minimum((length + min_extra).clamp(0), most)
        return cls(most, least, prefix, no_repeat_ngram)

    def keep_sources(self, sources):
        self.most, self.least, self.prefix = self.most[sources], self.least[sources], self.prefix[sources]

    def rule_out(self, log_probs, tokens):
        """log_probs (B,W,V) of what follows tokens (B,W,t), which begin with BOS: -inf, in place, for what may not."""
        n, P = tokens.shape[2] - 1, self.prefix.shape[1]  # n said so far
        # The only token that may come next, for each source; PAD where there is a choice.
        only = torch.where(self.most == n, EOS, PAD)  # (B,)
        if n < P:
            only = torch.where(self.prefix[:, n] != PAD, self.prefix[:, n], only)
        forced = only.any()
        if forced:
            rows = only.nonzero().flatten()  # (b,)
            chosen = only[rows, None, None].expand(-1, tokens.shape[1], 1)  # (b,W,1)
            kept = log_probs[rows].gather(2, chosen)  # (b,W,1) before any other rule strikes it
        log_probs[:, :, PAD : BOS + 1] = -torch.inf
        if (self.least > n).any():
            log_probs[:, :, EOS].masked_fill_((self.least > n)[:, None], -torch.inf)
        N = self.no_repeat_ngram
        if 0 < N <= n:
            grams = tokens[:, :, 1:].unfold(2, N, 1)  # (B,W,n-N+1,N) all n-grams so far
            begun = tokens[:, :, n + 2 - N :]  # (B,W,N-1) the one that the next token completes
            again = (grams[..., :-1] == begun[:, :, None]).all(-1)  # (B,W,n-N+1)
            log_probs.scatter_(2, grams[..., -1].masked_fill(~again, PAD), -torch.inf)
        if forced:
            log_probs[rows] = torch.full_like(log_probs[rows], -torch.inf).scatter_(2, chosen, kept)


def follow(model, src, pick, alpha, limits):
    """src (B,S) -> for each source a list of one Hypothesis: at every step the token that `pick` takes. Search at its
    plainest, to be read before the beam. pick: log_probs (B,V) -> tokens (B,1)."""
    with evaluation(model):
        limits, src_mask = Limits.of(model, src, **limits), padding_mask(src)
        cache = model.start_cache(model.encode(src))
        tokens = src.new_full((len(src), 1), BOS)  # (B,t)
        log_prob = torch.zeros(len(src), device=src.device)
        lengths = torch.full((len(src),), -1, device=src.device)  # (B,) without EOS; -1: not ended yet
        while (lengths < 0).any() and log_prob.isfinite().all():
            log_probs = model.next_log_probs(tokens[:, -1:], src_mask, cache)  # (B,V)
            limits.rule_out(log_probs[:, None], tokens[:, None])
            token = pick(log_probs)  # (B,1)
            log_prob += torch.where(lengths < 0, log_probs.gather(1, token).squeeze(1), 0.0)
            # a row that has ended runs on unheard until the last one ends; its limit must not stop it
            lengths = torch.where((lengths < 0) & (token.squeeze(1) == EOS), tokens.shape[1] - 1, lengths)
            tokens = torch.cat([tokens, token], 1)  # (B,t+1)
        sums = log_prob.tolist()
        if not all(map(math.isfinite, sums)):
            raise ValueError(NOT_FINITE)
        rows = [row[1 : 1 + n].tolist() for row, n in zip(tokens, lengths.tolist())]
        return [[Hypothesis(row, s, s / length_penalty(len(row) + 1, alpha))] for row, s in zip(rows, sums)]


def greedy_search(model, src, alpha=0.6, **limits):
    """The most probable token at every step. (A beam of one must give the same.) **limits: see Limits.of."""
    return follow(model, src, lambda log_probs: log_probs.argmax(-1, keepdim=True), alpha, limits)


def beam_search(model, src, beam_size=4, alpha=0.6, n_best=1, **limits):
    """src (B,S) -> for each source up to n_best Hypotheses, best first (§6.1; stopping as proven below). **limits: see
    Limits.of. Each source's result is its own: no step mixes sources, and one that is done leaves the batch. (To
    rounding: a product over another number of rows may differ in its last bit, and so decide between equals.)
    Raises ValueError for n_best outside 1 .. beam_size, for alpha < 0, and for a model whose numbers are not finite."""
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best must be from 1 to the beam size {beam_size}, not {n_best}")
    if alpha < 0:
        raise ValueError(f"alpha must be at least 0, not {alpha}")
    W, V = beam_size, model.config.vocab_size
    finished = [[] for _ in range(len(src))]  # per source, its n_best best Hypotheses so far, best first
    with evaluation(model):
        # --- the state: B sources still searched, W beginnings each, best first -----------------------------------
        source = torch.arange(len(src), device=src.device)  # (B,)  which row of `src` (it shrinks as sources finish)
        src_mask = padding_mask(src)  # (B,1,1,S)
        limits = Limits.of(model, src, **limits)
        tokens = src.new_full((len(src), W, 1), BOS)  # (B,W,t)  t counts BOS
        # All W beginnings are the same at first. Only one may grow, or the beam would hold W copies of it for ever.
        log_prob = torch.full((len(src), W), -torch.inf, device=src.device)  # (B,W)
        log_prob[:, 0] = 0.0
        cache = model.start_cache(model.encode(src))  # memory (B,S,2D); target tokens, none as yet, (B*W,t,2D)

        while len(source):
            B, _, t = tokens.shape
            # --- grow: all continuations of all beams of a source compete in one pool ------------------------------
            step = model.next_log_probs(tokens[:, :, -1].reshape(B * W, 1), src_mask, cache).view(B, W, V)
            limits.rule_out(step, tokens)
            # Each beam has one continuation that ends (EOS), so at most W of the best 2W end, and at least W go on.
            # Those 2W are among the best 2W of each beam, so sums are made of W*2W and not of W*V.
            C = min(2 * W, V)
            likely, token = step.topk(C)  # (B,W,C) of each beam
            pool = (log_prob[:, :, None] + likely).flatten(1)  # (B,W*C)
            pool_log_prob, index = pool.topk(min(2 * W, W * C))  # (B,2W), best first
            beam, token = index // C, token.flatten(1).gather(1, index)  # (B,2W) which beam it continues, and with what
            ends = token == EOS  # (B,2W)

            # --- finish: an ending counts if it is among the best W of the pool ------------------------------------
            # It takes no place in the beam, which goes on at full width; so W more candidates were drawn.
            n = t  # tokens of a hypothesis that ends now: t - 1 after BOS, and EOS
            counts = ends[:, :W] & (pool_log_prob[:, :W] > -torch.inf)  # (B,W)
            for b, k in counts.nonzero().tolist():
                total = pool_log_prob[b, k].item()
                best = finished[source[b]]
                best.append(Hypothesis(tokens[b, beam[b, k], 1:].tolist(), total, total / length_penalty(n, alpha)))
                best.sort(key=lambda h: -h.score)  # stable: of equals the earlier stays ahead
                del best[n_best:]

            # --- go on: the best W that do not end -----------------------------------------------------------------
            # (A tiny vocabulary may have fewer than W. The rest are at -inf, hold any token, and stay there.)
            log_prob, pick = pool_log_prob.masked_fill(ends, -torch.inf).topk(W)  # (B,W), best first
            parent, token = beam.gather(1, pick), token.gather(1, pick)  # (B,W) whom each continues, and with what
            history = tokens.gather(1, parent[:, :, None].expand(B, W, t))  # (B,W,t)
            tokens = torch.cat([history, token[:, :, None]], 2)  # (B,W,t+1)

            # --- stop a source when nothing unfinished can win -----------------------------------------------------
            # A beginning's log_prob only falls as it grows, and lp only rises with length, so the most it can ever
            # score is its present log_prob over lp at the limit (log_prob is negative: a larger lp lifts it). Once
            # the n_best-th finished score is not below that of the best beginning (the first: they are sorted), no
            # continuation can displace it. At the limit every beginning has ended and log_prob is -inf. (NaN is not
            # above -inf either: a damaged model leaves here with nothing finished.) A beam of one is greedy search,
            # by definition: it follows the most probable token, and that was EOS.
            bound = log_prob[:, 0] / length_penalty(limits.most + 1, alpha)  # (B,)
            alive = [
                reach > -math.inf and not (len(best) >= n_best and (best[-1].score >= reach or W == 1))
                for best, reach in zip((finished[i] for i in source.tolist()), bound.tolist())
            ]
            keep = torch.tensor(alive, dtype=torch.bool, device=src.device).nonzero().flatten()  # (B',)

            # --- the cache follows: row b*W + w must hold the keys and values of the beam that w continues ---------
            rows = (torch.arange(B, device=src.device)[:, None] * W + parent)[keep].flatten()  # (B'*W,)
            cache.reorder(rows)
            if len(keep) < B:
                cache.keep_sources(keep)
                limits.keep_sources(keep)
                source, src_mask = source[keep], src_mask[keep]
                tokens, log_prob = tokens[keep], log_prob[keep]
    if not all(finished):
        raise ValueError(NOT_FINITE)
    return finished


# --- 14. From text to text; checkpoints (§6.1) ---------------------------------------------------------------------
# What training and translating share: the way from lines to lines, reading, scoring, and the file that holds a model.
# Text is read by one rule and translated by one function, so that what validation measures is what a user gets.


def search_lines(model, tokenizer, lines, n_best=1, prefix="", batch_tokens=32768, beam_size=4, search=None, **options):
    """Lines of text -> for each a list of up to n_best (text, Hypothesis), best first, no text twice; of a blank line,
    which never reaches the model, an empty list. `prefix` begins every translation; **options as beam_search has them.

    A batch holds up to batch_tokens padded tokens of the longest output possible (see Limits.of) times beams: that
    bounds the cache whatever the model says. search(src, line numbers, **limits) takes the place of beam search.
    Raises ValueError naming a line of more tokens than the model can read."""
    rows = [tokenizer.source.encode(line) + [EOS] for line in lines]
    for number, row in enumerate(rows, 1):
        if len(row) > model.config.max_len:
            raise ValueError(f"line {number} has {len(row)} tokens, the limit is {model.config.max_len}")
    found, forced = [[] for _ in lines], tokenizer.encode(prefix)
    wanted = [i for i, row in enumerate(rows) if len(row) > 1]
    lengths = [len(rows[i]) + len(forced) + options.get("extra_len", 50) for i in wanted]
    sampler = TokenBatchSampler(lengths, lengths, max([batch_tokens // beam_size] + lengths))  # one row always fits
    for batch in sampler.epoch(0):
        numbers = [wanted[i] for i in batch]
        src, rules = pad_rows([rows[i] for i in numbers]).to(model.device), dict(options, prefix=[forced] * len(batch))
        if search is not None:
            results = search(src, numbers, **rules)
        else:  # several token sequences may be one text: ask for more than are wanted
            results = beam_search(model, src, beam_size, n_best=1 if n_best == 1 else beam_size, **rules)
        for i, hypotheses in zip(numbers, results):
            texts = {}
            for h in hypotheses:
                texts.setdefault(tokenizer.decode(h.tokens), h)
            found[i] = list(texts.items())[:n_best]
    return found


def translate(model, tokenizer, lines, **options):
    """Lines of text -> one line of text for each, in order; options as search_lines has them."""
    return [found[0][0] if found else "" for found in search_lines(model, tokenizer, lines, **options)]


def read_lines(file, errors="strict"):
    """An open binary file -> its lines as text, one by one. UTF-8 whatever the locale; only LF and CRLF end a line
    (str.splitlines would also cut at U+2028, U+0085, form feed and a lone CR, and shift one side of a corpus against
    the other); a BOM at the start is dropped. Raises ValueError naming file and line where the bytes are no UTF-8; with
    errors="surrogateescape" they become lone surrogates instead, by which such a line can be told."""
    for number, line in enumerate(file, 1):  # binary files are split at LF alone
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        line = line.removesuffix(b"\n").removesuffix(b"\r")
        try:
            yield line.decode("utf-8", errors)
        except UnicodeDecodeError as error:
            name = getattr(file, "name", "input")
            raise ValueError(f"{name}, line {number}: byte {line[error.start]:#04x} is not UTF-8") from None


def read_text(path, errors="strict"):
    """The lines of a file, one by one, by the rules of read_lines; also of a .gz. Raises OSError and ValueError."""
    with gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb") as file:
        try:
            yield from read_lines(file, errors)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is cut short or damaged: {error}") from None


def number(kind, least, below):
    """A type for argparse: an int or float from `least` to below `below`."""

    def number(text):
        if not least <= kind(text) < below:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least} and below {below}")
        return kind(text)

    return number  # argparse says "invalid number value"


def prepare_streams():
    """UTF-8 on stdin, stdout and stderr whatever the locale. A closed stderr gets a sink: print would take stdout."""
    sys.stderr = sys.stderr or open(os.devnull, "w")
    for stream in filter(None, (sys.stdin, sys.stdout, sys.stderr)):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace" if stream is sys.stderr else "strict")


def out_of_memory(error):
    return isinstance(error, MemoryError) or bool(re.search("out of memory|allocate memory", str(error)))


def explain(error):
    """One line for the user out of an error that the user can mend; any other goes on its way with its traceback."""
    if isinstance(error, (MemoryError, RuntimeError)):
        if not out_of_memory(error):
            raise error
        return f"out of memory: try a smaller --batch-tokens, beam or model ({str(error)[:200]})"
    if isinstance(error, OSError) and error.filename:
        return " ".join(f"{error.filename}: {error.strerror}".split("\n"))
    return " ".join(str(error).split("\n"))


def pick_device(name):
    """'auto', 'cpu', 'cuda' or 'mps' -> torch.device. Raises ValueError for one that is not there."""
    there = dict(cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available(), cpu=True)
    if name == "auto":
        name = next(kind for kind in there if there[kind])
    if not there[name]:
        raise ValueError(f"--device {name}: this machine or this PyTorch has none")
    return torch.device(name)


def score_pairs(model, src_rows, tgt_rows, batch_tokens=8192):
    """For each pair a list of log-probabilities, in nats, of its target's tokens and EOS: as the search gives them."""
    out, lengths = [None] * len(src_rows), (src_rows.lengths + 1, tgt_rows.lengths + 1)
    with evaluation(model):
        for batch in TokenBatchSampler(*lengths, max(batch_tokens, *(x.max() for x in lengths))).epoch(0):
            log_probs = model.label_log_probs(*(x.to(model.device) for x in collate(src_rows, tgt_rows, batch)))
            for i, row in zip(batch, log_probs.tolist()):
                out[i] = row[: lengths[1][i]]
    return out


def pairs_nll(model, src_rows, tgt_rows, batch_tokens=8192):
    """True negative log-likelihood of targets given sources, in nats, summed -> (nll, tokens with EOS)."""
    scores = score_pairs(model, src_rows, tgt_rows, batch_tokens)
    return -math.fsum(map(math.fsum, scores)), sum(map(len, scores))


def perplexity(nll, tokens):
    """exp(nll / tokens): how many equally likely pieces the model wavers between. Never more than a float can hold."""
    return math.exp(min(nll / tokens, 700.0))


# A checkpoint is one file that needs no other: weights, configuration, the tokenizer itself. It is read with
# weights_only=True, so that a hostile pickle cannot run code, and strictly, so that a renamed weight is an error and
# not a layer at its random start.


def write_atomically(path, write, previous=None):
    """Call write(temporary path in the same folder), flush it to the disk, and only then give it its name: a reader,
    or whoever comes after a crash, finds the old file or the new one, never half of one. The old one stays under the
    name `previous`, if one is given."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "r+b") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(temporary, path)
        if os.name == "posix":  # the new name itself is on disk only once the folder is
            folder = os.open(path.parent, os.O_RDONLY)
            with suppress(OSError):  # some file systems cannot
                os.fsync(folder)
            os.close(folder)
    except OSError as error:
        raise error if error.filename or not error.errno else OSError(error.errno, error.strerror, str(path))
    finally:
        temporary.unlink(missing_ok=True)


FORMAT = 1  # of a checkpoint; a change that old programs cannot read gets another number


def save_checkpoint(path, model, tokenizer, previous=None, **rest):
    """Write model, configuration and tokenizer, and whatever else `rest` holds (tensors, numbers, strings, lists,
    dicts): optimizer state, step, hashes, flags; the old file becomes `previous`. Raises OSError if the disk will not
    have it."""
    content = dict(rest, format=FORMAT, config=asdict(model.config), model=model.state_dict())
    content |= dict(tokenizer=tokenizer.model_bytes, tokenizer_sha256=tokenizer.sha256)
    if tokenizer.source is not tokenizer:
        content["source_tokenizer"] = tokenizer.source.model_bytes
    try:
        write_atomically(path, lambda temporary: torch.save(content, temporary), previous)
    except RuntimeError:  # what torch.save makes of a full disk
        needed, free = n_bytes(content), shutil.disk_usage(Path(path).parent).free
        raise OSError(f"{path} cannot be written: it needs {needed} bytes, and {free} are free") from None


def n_bytes(content):
    """Bytes of all tensors in nested dicts and lists: the size of a checkpoint, but for a little."""
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list):
        return sum(map(n_bytes, content))
    return content.nbytes if isinstance(content, torch.Tensor) else len(content) if isinstance(content, bytes) else 0


def load_checkpoint(path, device="cpu"):
    """-> model in eval mode on `device`, tokenizer, and a dict of the rest. Raises OSError if the file cannot be read,
    ValueError if it is not a whole checkpoint of this program."""
    with open(path, "rb"):  # missing, a folder, or not ours to read: say that, and not that it is damaged
        pass
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not whole, or nothing that torch.save wrote")
        if zipfile.ZipFile(path).testzip() is not None:  # torch.load does not look at the checksums
            raise ValueError("its contents have changed since it was written")
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, this program reads {FORMAT}")
        source = content.pop("source_tokenizer", None)
        tokenizer = Tokenizer(content.pop("tokenizer"), source and Tokenizer(source))
        if tokenizer.sha256 != content["tokenizer_sha256"]:
            raise ValueError("its tokenizer does not have the hash that it was saved with")
        model = Transformer(Config(**content.pop("config")))
        model.load_state_dict(content.pop("model"))
    except MemoryError:
        raise
    except Exception as error:  # zip, pickle, key and shape errors: all mean the same to a user
        reason = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:200]
        if isinstance(error, pickle.UnpicklingError):  # whose own text advises to trust the file
            reason = "it holds other things than tensors and plain values"
        raise ValueError(f"{path} is not a checkpoint of this program: {reason}") from None
    return model.to(device).eval(), tokenizer, content


def average_checkpoints(paths, device="cpu"):
    """Mean of the weights of several checkpoints of one run (§6.1: the last 5 or 20) -> as load_checkpoint, with the
    rest of the last one. The mean of points that circle a minimum lies nearer to it than any of them.
    Raises ValueError for no path, or for checkpoints whose configuration or tokenizer differ."""
    if not paths:
        raise ValueError("there is no checkpoint to average")
    total = None
    for path in paths:
        model, tokenizer, rest = load_checkpoint(path)
        kind = (model.config, tokenizer.sha256)
        if total is None:
            total, first = {name: p.double() for name, p in model.state_dict().items()}, kind  # float64: no rounding
        elif kind != first:
            raise ValueError(f"{path} has another configuration or tokenizer than {paths[0]}")
        else:
            for name, p in model.state_dict().items():
                total[name] += p
    model.load_state_dict({name: p / len(paths) for name, p in total.items()})
    return model.to(device), tokenizer, rest
