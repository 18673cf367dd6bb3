"""The proofs. Each compares with something computed another way (torch.nn with the same weights, brute force, a
formula, an unbroken run) and can fail. They need nothing but the repository: python -m pytest -q test_transformer.py"""

import contextlib
import errno
import gzip
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from torch import nn
from torch.nn import functional as F

import train
import transformer as tf
import translate
from transformer import BOS, EOS, PAD, UNK, Config, Transformer

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)  # models this small are slower with more


@pytest.fixture(params=[True, False], ids=["fused", "formula"])
def fused(request, monkeypatch):
    """Run a test with PyTorch's fused kernels and with the formulas of the file."""
    monkeypatch.setattr(tf, "FUSED", request.param)
    return request.param


def small(seed=0, dtype=torch.float64, spread=1.0, **changes):
    """A small random model in float64. `spread` scales its table: the larger, the more decided its predictions."""
    torch.manual_seed(seed)
    model = Transformer(
        Config(
            **{**dict(vocab_size=11, d_model=16, n_heads=4, d_ff=24, n_layers=2, dropout=0.0, max_len=64), **changes}
        )
    )
    for name, p in model.named_parameters():  # biases and norms away from 0 and 1, or an error in them would not show
        if p.dim() == 1:
            nn.init.normal_(p, mean=float(name.endswith("norm.weight")), std=0.1)
    model.tgt_embedding.table.data *= spread
    return model.to(dtype).eval()


def random_ids(*shape, vocab=11, seed=0):
    return torch.randint(4, vocab, shape, generator=torch.Generator().manual_seed(seed))


def batch_of(lengths, vocab=11, seed=0):
    """Sources of these lengths, EOS included, padded on the right."""
    return tf.pad_rows([[*random_ids(n - 1, vocab=vocab, seed=seed + i).tolist(), EOS] for i, n in enumerate(lengths)])


# --- Configuration and sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset, paper", [("base", 65e6), ("big", 213e6)])
def test_parameter_counts_match_table_3(preset, paper):
    c = Config(37000, **tf.PRESETS[preset])
    with torch.device("meta"):
        count = Transformer(c).n_parameters()
    D, F_, N = c.d_model, c.d_ff, c.n_layers
    feed_forward = 2 * D * F_ + F_ + D
    norm, attention = 2 * D, 4 * (D * D + D)
    by_hand = 37000 * D + N * (attention + feed_forward + 2 * norm) + N * (2 * attention + feed_forward + 3 * norm)
    assert count == by_hand
    # 63.1M and 214.2M: the paper's two numbers cannot both come from one vocabulary (65M would need 40,700 pieces,
    # 213M 35,800), so they are matched to within 3.5%.
    assert abs(count / paper - 1) < 0.035


@pytest.mark.parametrize(
    "wrong",
    [
        dict(n_heads=3),
        dict(d_model=15, n_heads=1),
        dict(norm="sideways"),
        dict(dropout=1.0),
        dict(vocab_size=3),
        dict(n_layers=0),
        dict(max_len=1),
        dict(src_vocab_size=2),
    ],
)
def test_config_refuses_what_cannot_be(wrong):
    with pytest.raises(ValueError):
        Config(**{**dict(vocab_size=11, d_model=16, n_heads=4), **wrong})


def test_shapes_of_every_module():
    B, S, T, D, H, V = 3, 7, 5, 16, 4, 11
    c = Config(V, d_model=D, n_heads=H, d_ff=24, n_layers=2)
    x, memory = torch.randn(B, T, D), torch.randn(B, S, D)
    src = batch_of([7, 3, 5])
    mask = tf.padding_mask(src)
    assert mask.shape == (B, 1, 1, S) and tf.causal_mask(T).shape == (1, 1, T, T)
    q, k = torch.randn(B, H, T, D // H), torch.randn(B, H, S, D // H)
    assert tf.attention(q, k, k, mask).shape == (B, H, T, D // H)
    assert tf.attention_weights(q, k, mask).shape == (B, H, T, S)
    attention = tf.MultiHeadAttention(D, H)
    assert attention(x).shape == (B, T, D)
    keys_values = attention.memory_keys_values(memory)
    assert keys_values.shape == (B, S, 2 * D)
    assert attention.cross(x, keys_values, mask).shape == (B, T, D)
    assert attention.cross(torch.randn(B * 2, T, D), keys_values, mask).shape == (B * 2, T, D)
    assert tf.FeedForward(D, 24)(x).shape == (B, T, D)
    assert tf.LayerNorm(D)(x).shape == tf.Residual(c)(x, lambda x: x).shape == (B, T, D)
    assert tf.sinusoids(T, D).shape == (T, D)
    assert tf.EncoderLayer(c)(memory, mask).shape == (B, S, D)
    assert tf.DecoderLayer(c)(x, memory, mask).shape == (B, T, D)
    model = Transformer(c)
    assert model.src_embedding(src).shape == (B, S, D)
    assert model.encode(src).shape == (B, S, D)
    assert model.decode(random_ids(B, T), memory, mask).shape == (B, T, D)
    assert model(src, random_ids(B, T)).shape == (B, T, V)


# --- The same numbers as torch.nn, outputs and gradients -----------------------------------------------------------


def test_products_in_a_search_equal_those_in_training():
    """float32 without gradients may take another library: the same numbers, for every shape that is used."""
    x, weight, bias = torch.randn(3, 7, 32), torch.randn(96, 32), torch.randn(96)
    for a, w, b in ((x, weight, bias), (x, weight[32:], bias[32:]), (x[:, ::2], weight, None), (x[0, 0], weight, bias)):
        expected = F.linear(a.double(), w.double(), None if b is None else b.double())
        for context in (torch.no_grad(), torch.inference_mode(), contextlib.nullcontext()):
            with context:
                torch.testing.assert_close(tf.linear(a, w, b).double(), expected, atol=1e-4, rtol=1e-4)
    assert tf.linear(x.double(), weight.double()).dtype == torch.float64
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert tf.linear(x, weight, bias).dtype == torch.bfloat16
    assert tf.linear(x, weight.requires_grad_(), bias).requires_grad


def copy_attention(ours, theirs):
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    return [
        (ours.qkv.weight, theirs.in_proj_weight),
        (ours.qkv.bias, theirs.in_proj_bias),
        *copy_linear(ours.out, theirs.out_proj),
    ]


def copy_linear(ours, theirs):  # a Linear or a norm
    theirs.weight.data.copy_(ours.weight)
    theirs.bias.data.copy_(ours.bias)
    return [(ours.weight, theirs.weight), (ours.bias, theirs.bias)]


def copy_layer(ours, theirs):
    """Weights of our encoder or decoder layer into torch's -> the pairs of parameters that must get equal gradients."""
    pairs = copy_attention(ours.attention, theirs.self_attn)
    if isinstance(ours, tf.DecoderLayer):
        pairs += copy_attention(ours.cross_attention, theirs.multihead_attn)
    pairs += copy_linear(ours.feed_forward.w1, theirs.linear1) + copy_linear(ours.feed_forward.w2, theirs.linear2)
    for i, residual in enumerate(ours.residuals, 1):
        pairs += copy_linear(residual.norm, getattr(theirs, f"norm{i}"))
    return pairs


def torch_layer(kind, c):
    return kind(
        c.d_model, c.n_heads, c.d_ff, dropout=0.0, batch_first=True, norm_first=c.norm == "pre", dtype=torch.float64
    ).train()


def assert_same_gradients(loss_ours, loss_theirs, pairs, inputs):
    grads_ours = torch.autograd.grad(loss_ours, [p for p, _ in pairs] + inputs)
    grads_theirs = torch.autograd.grad(loss_theirs, [p for _, p in pairs] + inputs)
    for a, b in zip(grads_ours, grads_theirs):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "stack"])
def test_encoder_equals_torch(norm, whole, fused):
    model = small(norm=norm)
    c, src = model.config, batch_of([7, 3, 5])
    x = torch.randn(3, 7, c.d_model, dtype=torch.float64, requires_grad=True)
    if whole:
        final = nn.LayerNorm(c.d_model, dtype=torch.float64) if norm == "pre" else None
        theirs = nn.TransformerEncoder(
            torch_layer(nn.TransformerEncoderLayer, c), c.n_layers, final, enable_nested_tensor=False
        )
        pairs = sum((copy_layer(a, b) for a, b in zip(model.encoder.layers, theirs.layers)), [])
        pairs += copy_linear(model.encoder.norm, final) if final else []
        ours = model.encoder
    else:
        ours, theirs = model.encoder.layers[0], torch_layer(nn.TransformerEncoderLayer, c)
        pairs = copy_layer(ours, theirs)
    a, b = ours(x, tf.padding_mask(src)), theirs(x, src_key_padding_mask=src == PAD)
    with torch.no_grad():  # without gradients, attention runs in the fused kernel (if FUSED)
        torch.testing.assert_close(ours(x, tf.padding_mask(src)), a, atol=1e-10, rtol=1e-8)
    real = src != PAD
    torch.testing.assert_close(a[real], b[real], atol=1e-10, rtol=1e-8)
    weight = torch.randn_like(a[real])
    assert_same_gradients((a[real] * weight).sum(), (b[real] * weight).sum(), pairs, [x])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("whole", [False, True], ids=["layer", "stack"])
def test_decoder_equals_torch(norm, whole, fused):
    model = small(norm=norm)
    c, src = model.config, batch_of([7, 3, 5])
    x = torch.randn(3, 6, c.d_model, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(3, 7, c.d_model, dtype=torch.float64, requires_grad=True)
    if whole:
        final = nn.LayerNorm(c.d_model, dtype=torch.float64) if norm == "pre" else None
        theirs = nn.TransformerDecoder(torch_layer(nn.TransformerDecoderLayer, c), c.n_layers, final)
        pairs = sum((copy_layer(a, b) for a, b in zip(model.decoder.layers, theirs.layers)), [])
        pairs += copy_linear(model.decoder.norm, final) if final else []
        ours = model.decoder
    else:
        ours, theirs = model.decoder.layers[0], torch_layer(nn.TransformerDecoderLayer, c)
        pairs = copy_layer(ours, theirs)
    future = ~tf.causal_mask(6)[0, 0]  # torch's masks say True where attention is forbidden
    a = ours(x, memory, tf.padding_mask(src))
    with torch.no_grad():
        torch.testing.assert_close(ours(x, memory, tf.padding_mask(src)), a, atol=1e-10, rtol=1e-8)
    b = theirs(x, memory, tgt_mask=future, memory_key_padding_mask=src == PAD)
    torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)
    weight = torch.randn_like(a)
    assert_same_gradients((a * weight).sum(), (b * weight).sum(), pairs, [x, memory])


def test_formulas_equal_kernels():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64) for n in (5, 7, 7))
    mask = torch.rand(2, 1, 5, 7) < 0.6
    mask[..., 0] = True
    ours = tf.attention_weights(q, k, mask) @ v
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, mask))
    x = torch.randn(3, 5, 16, dtype=torch.float64) * 3 + 2
    norm = tf.LayerNorm(16).double()
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    kernel = F.layer_norm(x, (16,), norm.weight, norm.bias, 1e-5)
    tf.FUSED = False
    try:
        torch.testing.assert_close(norm(x), kernel)
    finally:
        tf.FUSED = True


def test_training_and_evaluation_agree_without_dropout_on_padded_batches():
    """In training the attention is the formula, in evaluation the kernel; nn.TransformerEncoder once disagreed here."""
    model = small(dtype=torch.float32).train()
    src, tgt = F.pad(batch_of([4, 4, 3]), (0, 3), value=PAD), random_ids(3, 5)  # every item has at least three pads
    training = model(src, tgt)
    with tf.evaluation(model):
        evaluated = model(src, tgt)
    assert training.requires_grad and training.shape == evaluated.shape
    torch.testing.assert_close(training.detach(), evaluated)


# --- Masks ---------------------------------------------------------------------------------------------------------


def test_masks_say_true_where_attention_is_allowed():
    assert tf.padding_mask(torch.tensor([[5, EOS, PAD]])).tolist() == [[[[True, True, False]]]]
    assert tf.causal_mask(3)[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]


@torch.no_grad()
def test_future_targets_do_not_leak(fused):
    model, src = small(), batch_of([6, 4])
    tgt = random_ids(2, 8)
    logits = model(src, tgt)
    for t in range(1, 8):
        changed = tgt.clone()
        changed[:, t:] = random_ids(2, 8 - t, seed=9 + t)
        moved = model(src, changed)
        torch.testing.assert_close(moved[:, :t], logits[:, :t], atol=1e-12, rtol=0)
        assert not torch.allclose(moved[:, t], logits[:, t], atol=1e-3) or torch.equal(changed[:, t], tgt[:, t])


def test_a_removed_causal_mask_is_noticed(monkeypatch):
    """The leak test above can fail: without the mask, the future shows."""
    model, src, tgt = small(), batch_of([6, 4]), random_ids(2, 8)
    monkeypatch.setattr(tf, "FUSED", False)
    monkeypatch.setattr(tf, "causal_mask", lambda n, device=None: torch.ones(1, 1, n, n, dtype=torch.bool))
    changed = tgt.clone()
    changed[:, -1] = 4 + (tgt[:, -1] - 3) % 7
    assert not torch.allclose(model(src, changed)[:, 0], model(src, tgt)[:, 0], atol=1e-6)


@torch.no_grad()
def test_content_and_amount_of_padding_do_not_matter(fused):
    model = small(dtype=torch.float32)
    src, tgt = batch_of([4]), random_ids(1, 5)
    memory, logits = model.encode(src), model(src, tgt)
    long = F.pad(src, (0, 16), value=PAD)
    mask = tf.padding_mask(long)
    for filler in (PAD, 7):  # other ids under the same mask
        noisy = long.masked_fill(long == PAD, filler)
        padded_memory = model.encoder(model.src_embedding(noisy), mask)
        torch.testing.assert_close(padded_memory[:, :4], memory, atol=1e-5, rtol=1e-5)
        padded = model.logits(model.decode(tgt, padded_memory, mask))
        torch.testing.assert_close(padded, logits, atol=1e-5, rtol=1e-5)
    # pads at the end of the target, whatever they are, change nothing before them
    torch.testing.assert_close(model(src, F.pad(tgt, (0, 4), value=PAD))[:, :5], logits, atol=1e-5, rtol=1e-5)


def test_no_gradient_reaches_padding(fused):
    model, src = small(), batch_of([6, 3])
    x = model.src_embedding(src).detach().requires_grad_()
    memory = model.encoder(x, tf.padding_mask(src))
    states = model.decode(random_ids(2, 4), memory, tf.padding_mask(src))
    labels = torch.tensor([[5, 6, 7, EOS], [5, EOS, PAD, PAD]])
    states.retain_grad()
    tf.label_smoothed_loss(model.logits(states), labels).smoothed.backward()
    assert (x.grad[1, 3:] == 0).all() and (x.grad[1, :3] != 0).all()
    assert (states.grad[1, 2:] == 0).all() and (states.grad[1, :2] != 0).any()


def test_an_empty_source_ruins_nothing(fused):
    model = small(dtype=torch.float32).train()
    src = batch_of([5, 4, 3])
    src[1] = PAD  # nothing to attend to
    loss = tf.training_loss(model, src, random_ids(3, 4), random_ids(3, 4, seed=1))
    loss.smoothed.backward()
    assert math.isfinite(loss.smoothed.item())
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_targets_of_any_padding_stay_finite(fused):
    """Padding belongs on the right; on the left it makes no sense, but must not make NaN either."""
    model = small().train()
    tgt = random_ids(8, 8).tril()  # 1 .. 8 real tokens, then PAD
    for ids in (tgt, tgt.flip(1)):
        loss = tf.training_loss(model, batch_of([5] * 8), ids, ids)
        loss.smoothed.backward()
        assert math.isfinite(loss.smoothed) and all(p.grad.isfinite().all() for p in model.parameters())


def test_fully_masked_rows_are_finite_in_half_precision():
    for dtype in (torch.float16, torch.bfloat16):
        q, k = torch.randn(1, 1, 3, 8, dtype=dtype) * 50, torch.randn(1, 1, 4, 8, dtype=dtype)
        mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
        mask[..., 1, :] = False
        weights = tf.attention_weights(q, k, mask)
        assert weights.isfinite().all() and (weights[..., 1, :] == 0).all()


def test_causal_kernel_refuses_unequal_lengths():
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError):
        tf.attention(q, k, k, causal=True)


# --- Positions, norms, attention: numbers by hand ------------------------------------------------------------------


def test_positions_of_three_words_at_d_model_4():
    expected = torch.tensor(
        [[0, 1, 0, 1], [0.841471, 0.540302, 0.009999833, 0.99995], [0.909297, -0.416147, 0.019998667, 0.9998]]
    )
    torch.testing.assert_close(tf.sinusoids(3, 4), expected, atol=1e-6, rtol=1e-6)


def test_a_shift_of_position_is_a_rotation():
    D, k = 32, 7
    table = tf.sinusoids(100, D).double()
    for i in range(D // 2):
        angle = k / 10000 ** (2 * i / D)
        turn = torch.tensor(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]], dtype=torch.float64
        )
        pair = table[:, 2 * i : 2 * i + 2]
        torch.testing.assert_close(pair[:-k] @ turn.T, pair[k:], atol=1e-6, rtol=0)


def test_layer_norm_of_one_two_three(fused):
    out = tf.LayerNorm(3)(torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(out, torch.tensor([-1.224736, 0.0, 1.224736]), atol=1e-5, rtol=0)


def test_attention_of_three_words_by_hand():
    words = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, None]  # q = k = v, K = 2
    # products [[1,0,1],[0,1,1],[1,1,2]] / sqrt(2); exp of 0, 1/sqrt(2), 2/sqrt(2) = 1, 2.02811, 4.11325
    weights = torch.tensor(
        [[0.401112, 0.197776, 0.401112], [0.197776, 0.401112, 0.401112], [0.248254, 0.248254, 0.503492]]
    )
    torch.testing.assert_close(tf.attention_weights(words, words)[0, 0], weights, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        tf.attention(words, words, words)[0, 0, 2], torch.tensor([0.751746, 0.751746]), atol=1e-5, rtol=0
    )


def test_position_runs_along_the_sentence_not_the_batch():
    model = small()
    ids = random_ids(1, 5)
    twice = model.encode(ids.repeat(2, 1))
    torch.testing.assert_close(twice[0], twice[1])
    swapped = ids[:, [1, 0, 2, 3, 4]]
    assert not torch.allclose(model.encode(swapped)[:, [1, 0, 2, 3, 4]], twice[:1], atol=1e-3)


def test_embedding_is_the_scaled_row_plus_the_position():
    model, ids = small(), random_ids(2, 5)
    expected = model.tgt_embedding.table[ids] * 4.0 + tf.sinusoids(8, 16)[3:]  # sqrt(16) = 4
    torch.testing.assert_close(model.tgt_embedding(ids, start=3), expected.to(torch.float64))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_is_where_the_paper_puts_it(norm, monkeypatch):
    """On each sub-layer's output (2 in an encoder layer, 3 in a decoder layer) and on the two embedding sums."""
    model, seen = small(norm=norm, dropout=0.3, n_layers=3).train(), []
    monkeypatch.setattr(tf.Dropout, "forward", lambda self, x: seen.append((self, x.shape)) or x)
    model(batch_of([6, 4]), random_ids(2, 5))
    assert len(seen) == len({id(module) for module, _ in seen}) == 3 * 2 + 3 * 3 + 2
    assert {shape for _, shape in seen} == {(2, 6, 16), (2, 5, 16)}
    assert all(module.p == 0.3 for module, _ in seen)
    model.set_dropout(0.7)
    assert all(module.p == 0.7 for module, _ in seen) and model.config.dropout == 0.7


def test_length_limit_is_exact():
    model = small(max_len=8)
    assert model.encode(random_ids(1, 8)).shape == (1, 8, 16)
    for n in (9, 24):
        with pytest.raises(ValueError, match=f"{n} tokens.*max_len of 8"):
            model.encode(random_ids(1, n))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_mean_and_is_off_in_eval(p):
    torch.manual_seed(0)
    drop, x = tf.Dropout(p), torch.ones(1000, 999)
    y = drop(x)
    assert abs((y == 0).double().mean().item() - p) < 3e-3
    assert abs(y.double().mean().item() - 1) < 3e-3
    assert torch.equal(y[y != 0].unique(), torch.tensor([1 / (1 - p)]))
    assert (tf.Dropout(0.999999)(x) == 0).double().mean() > 0.999
    # neighbours are independent: each quarter of a 64-bit draw is a coin of its own
    zero = (y == 0).double().flatten()[: 999 * 1000 // 4 * 4].view(-1, 4)
    both = (zero.T @ zero) / len(zero)
    assert (both - p * p).abs()[~torch.eye(4, dtype=torch.bool)].max() < 4e-3
    assert ((zero.mean(0) - p).abs() < 4e-3).all()
    assert torch.equal(drop.eval()(x), x)


# --- Loss and schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("src_vocab", [None, 500], ids=["tied", "untied"])
def test_first_loss_is_ln_v(norm, src_vocab):
    V = 8000
    torch.manual_seed(0)
    model = Transformer(Config(V, d_model=128, n_heads=4, d_ff=256, n_layers=3, norm=norm, src_vocab_size=src_vocab))
    loss = tf.training_loss(
        model, random_ids(16, 12, vocab=500), random_ids(16, 12, vocab=V), random_ids(16, 12, vocab=V, seed=1)
    )
    assert abs(loss.nll.item() / loss.tokens / math.log(V) - 1) < 0.1
    assert loss.nll.item() / loss.tokens == pytest.approx(math.log(V) + 0.5, abs=0.2)  # logits of variance 1 cost 1/2


def test_each_projection_is_initialised_by_its_own_shape():
    bound = math.sqrt(6 / (128 + 128))  # Xavier, uniform, of a D x D matrix
    attention = Transformer(Config(11, d_model=128, n_heads=4, d_ff=256, n_layers=1)).decoder.layers[0].cross_attention
    for third in attention.qkv.weight.chunk(3):
        assert 0.98 * bound < third.abs().max() <= bound


def test_the_tie_is_three_way_and_counts_once():
    tied, untied = small(), small(src_vocab_size=9)
    assert tied.src_embedding.table is tied.tgt_embedding.table
    assert untied.src_embedding.table is not untied.tgt_embedding.table
    assert untied.n_parameters() - tied.n_parameters() == 9 * 16
    assert untied(random_ids(2, 5, vocab=9), random_ids(2, 4)).shape == (2, 4, 11)


def textbook_kl(logits, labels, smoothing):
    """Label smoothing as a divergence from a written-out target distribution, plus that distribution's entropy: the
    cross-entropy. PAD gets no mass, and rows whose label is PAD are left out."""
    V = logits.shape[-1]
    log_probs, labels = logits.reshape(-1, V).log_softmax(-1), labels.flatten()
    target = torch.full_like(log_probs, smoothing / (V - 1))
    target.scatter_add_(1, labels[:, None], torch.full_like(target[:, :1], 1 - smoothing))
    target[:, PAD] = 0
    target[labels == PAD] = 0
    entropy = -torch.special.xlogy(target, target).sum()
    return F.kl_div(log_probs, target, reduction="sum") + entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_smoothed_loss_equals_the_kl_form(smoothing):
    torch.manual_seed(0)
    logits = (torch.randn(3, 6, 11, dtype=torch.float64) * 3).requires_grad_()
    labels = random_ids(3, 6)
    labels[0, 4:], labels[1, 1:] = PAD, PAD
    ours, theirs = tf.label_smoothed_loss(logits, labels, smoothing), textbook_kl(logits, labels, smoothing)
    torch.testing.assert_close(ours.smoothed, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(x, logits)[0] for x in (ours.smoothed, theirs)))
    nll = F.cross_entropy(logits.reshape(-1, 11), labels.flatten(), ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(ours.nll, nll)
    assert ours.tokens == 4 + 1 + 6
    if smoothing == 0:
        torch.testing.assert_close(ours.smoothed, nll)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
def test_fused_loss_equals_the_formula(smoothing, chunk, monkeypatch):
    monkeypatch.setattr(tf.FusedLoss, "CHUNK", chunk)
    model = small()
    src, tgt_in = batch_of([6, 4, 5]), random_ids(3, 6)
    labels = random_ids(3, 6, seed=1)
    labels[0, 4:], labels[1, 1:] = PAD, PAD
    fused = tf.training_loss(model, src, tgt_in, labels, smoothing)
    formula = tf.label_smoothed_loss(model(src, tgt_in), labels, smoothing)
    torch.testing.assert_close(fused.smoothed, formula.smoothed)
    torch.testing.assert_close(fused.nll, formula.nll)
    assert fused.tokens == formula.tokens
    # three times the loss: the backward has to pass the incoming gradient on
    for a, b in zip(*(torch.autograd.grad(3 * x.smoothed, list(model.parameters())) for x in (fused, formula))):
        torch.testing.assert_close(a, b)


def test_fused_loss_in_half_precision_stays_near():
    model = small(dtype=torch.float32, vocab_size=300, d_model=64)
    src, tgt = batch_of([6, 4, 5], vocab=300), random_ids(3, 6, vocab=300)
    exact = tf.training_loss(model, src, tgt, tgt)
    with torch.autocast("cpu", torch.bfloat16):
        half = tf.training_loss(model, src, tgt, tgt)
    assert half.smoothed.dtype == torch.float32
    assert half.smoothed.item() == pytest.approx(exact.smoothed.item(), rel=0.02)
    half.smoothed.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("scale", [1.0, 1e4, -1e4])
def test_loss_is_finite_at_the_edges(smoothing, scale):
    logits = torch.randn(2, 3, 11) * scale
    nothing = torch.full((2, 3), PAD)
    for labels in (
        random_ids(2, 3),
        torch.tensor([[5, PAD, PAD], [PAD, PAD, PAD]]),
        nothing,
    ):  # no pad; one token; none
        loss = tf.label_smoothed_loss(logits, labels, smoothing)
        real = labels != PAD
        states = logits[real] @ torch.eye(11)
        fused, _ = tf.FusedLoss.apply(states, torch.eye(11), labels[real], smoothing)
        assert math.isfinite(loss.smoothed) and loss.tokens == real.sum()
        torch.testing.assert_close(fused, loss.smoothed)


def test_loss_does_not_depend_on_padding():
    model = small()
    rows = [(random_ids(n + 1, seed=n).tolist(), random_ids(n, seed=50 + n).tolist()) for n in (2, 5, 9)]
    src, tgt = (tf.TokenRows(np.concatenate(x), np.cumsum([0, *map(len, x)])) for x in zip(*rows))
    alone = [tf.training_loss(model, *tf.collate(src, tgt, [i])) for i in range(3)]
    batch = tf.collate(src, tgt, [0, 1, 2])
    together = tf.training_loss(model, *(F.pad(x, (0, 50 - x.shape[1]), value=PAD) for x in batch))
    assert together.tokens == sum(x.tokens for x in alone) == 2 + 5 + 9 + 3
    assert together.smoothed.item() == pytest.approx(sum(x.smoothed.item() for x in alone), rel=1e-10)


def test_accumulated_batches_equal_one_batch():
    model = small()
    lengths = np.random.default_rng(0).integers(1, 20, 32)
    rows = tf.TokenRows(np.concatenate([random_ids(n, seed=int(n)).numpy() for n in lengths]), np.cumsum([0, *lengths]))
    tokens = int((lengths + 1).sum())

    def gradient(batches):
        model.zero_grad()
        for batch in batches:
            (tf.training_loss(model, *tf.collate(rows, rows, batch)).smoothed / tokens).backward()
        return [p.grad.clone() for p in model.parameters()]

    for a, b in zip(gradient([range(32)]), gradient([range(i, i + 4) for i in range(0, 32, 4)])):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


def test_noam_rate():
    D, warmup = 512, 4000
    assert tf.noam_rate(1, D, warmup) == pytest.approx(D**-0.5 * warmup**-1.5)
    assert tf.noam_rate(warmup, D, warmup) == pytest.approx((D * warmup) ** -0.5)  # 0.000699 for the paper's base model
    assert tf.noam_rate(4 * warmup, D, warmup) == pytest.approx((D * warmup) ** -0.5 / 2)
    assert max(range(1, 20000), key=lambda s: tf.noam_rate(s, D, warmup)) == warmup
    with pytest.raises(ValueError):
        tf.noam_rate(0, D, warmup)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_is_adam_at_noams_rate_with_clipping(corpus, tmp_path, accumulate):
    """Two updates of train.py against torch's Adam by hand, on the mean over all tokens of the update's batches."""
    flags = ["--data", str(corpus), *TINY, "--dropout", "0", "--steps", "2", "--clip", "0.05", "--rate-scale", "0.7"]
    settings = train.settings_of(train.parse_arguments([*flags, "--out", str(tmp_path / "run")]))
    settings["accumulate"] = accumulate
    run = train.Run(settings, train.Ranks("cpu"), dry_run=True)
    run.prepare(None)
    run.model.double().train()  # in float32, Adam would blow rounding up where a gradient is 0 in truth: key biases
    run.optimizer = tf.adam(run.model)
    by_hand = Transformer(run.model.config).double().train()
    by_hand.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.Adam(by_hand.parameters(), betas=(0.9, 0.98), eps=1e-9)
    for step in (1, 2):
        optimizer.zero_grad()
        batches = [
            tf.collate(*run.train_rows, b) for b in run.sampler.epoch(0)[(step - 1) * accumulate : step * accumulate]
        ]
        tokens = sum((tgt_out != PAD).sum() for _, _, tgt_out in batches)
        sum(textbook_kl(by_hand(src, tgt_in), tgt_out, 0.1) / tokens for src, tgt_in, tgt_out in batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
        optimizer.param_groups[0]["lr"] = rate = 0.7 * 32**-0.5 * min(step**-0.5, step * 10**-1.5)
        optimizer.step()
        assert run.update()[3:] == (pytest.approx(norm.item()), pytest.approx(rate))
    for a, b in zip(run.model.parameters(), by_hand.parameters()):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=0)


def test_adam_has_the_papers_constants():
    group = tf.adam(small()).param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.98), 1e-9)


# --- Tokens and batches --------------------------------------------------------------------------------------------

TEXT = ["the cat sat on the mat", "a dog ran to the house"] * 4
TEXT += ["আমি ভাত খাই।", "নদীর ধারে একটি গাছ আছে।"] * 4
TEXT += ["க்ஷ தமிழ்"] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return tf.Tokenizer.train(TEXT, 400)


def test_fixed_ids(tokenizer):
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    names = [tokenizer.pieces.id_to_piece(i) for i in range(4)]
    assert names == ["<pad>", "<s>", "</s>", "<unk>"]


@pytest.mark.parametrize(
    "text",
    [
        "</s> <pad> <unk> <s> <0x41>",
        "漢字 😀 é",
        "  two  spaces ",
        "\ta\tb",
        "a\u00a0b\u3000c",
        "क्\u200dष \u200c",
        "a\u2028b\u0085c\x0cd\x0be\x1cf",
        "\u2581under",
        "\0nul",
        "lone \ud800",
        "\ufeffbom",
        "\ufffd",
        "\u200e\u200f\u061c",
        "e\u0301",
        "",
        " ",
        "\U0001f469\u200d\U0001f4bb",
    ],
)
def test_decode_of_encode_is_the_normalised_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tf.normalize(text)
    assert min(ids, default=4) > UNK  # neither unknown nor a control piece


def test_round_trip_of_random_unicode(tokenizer):
    rng = random.Random(0)
    for _ in range(500):
        text = "".join(
            chr(rng.choice([rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x110000)]))
            for _ in range(rng.randrange(30))
        )
        normal = tf.normalize(text)
        assert tokenizer.decode(tokenizer.encode(text)) == normal == tf.normalize(normal)


def test_normalisation_rules():
    assert tf.normalize("e\u0301") == "\u00e9"
    assert tf.normalize("ﬁ Ａ ①") == "ﬁ Ａ ①"  # NFC, not NFKC
    assert tf.normalize(" a \t\u2003 b\r\n") == "a b"
    assert tf.normalize("क्\u200dष\u200c") == "क्\u200dष\u200c"  # joiners stay


def test_broken_bytes_decode_without_harm(tokenizer):
    ids = tokenizer.encode("😀")
    rng = random.Random(0)
    assert tokenizer.decode(ids) == "😀"
    for broken in (ids[:-1], rng.sample(ids, len(ids)), [UNK, PAD, EOS], [4 + 0x0A, 4 + 0x0D]):
        out = tokenizer.decode(broken)
        assert isinstance(out, str) and "\n" not in out and "\u2047" not in out


def test_tokenizer_is_deterministic_and_carries_its_hash(tokenizer):
    again = tf.Tokenizer.train(TEXT, 400)
    assert again.sha256 == tokenizer.sha256 == tf.Tokenizer(tokenizer.model_bytes).sha256


def test_vocabulary_limits():
    with pytest.raises(ValueError, match="need [0-9]+"):
        tf.Tokenizer.train(TEXT, 100)
    few = tf.Tokenizer.train(["ab ab", "abc"], 8000)
    assert few.vocab_size < 300
    with pytest.raises(ValueError):
        tf.Tokenizer.train(["", "  "], 1000)
    with pytest.raises(ValueError):
        tf.Tokenizer(b"not a model")


def test_token_rows_hold_what_was_encoded(tokenizer):
    rows = tf.TokenRows.encode(tokenizer, TEXT, chunk=3)
    assert rows.ids.dtype == np.uint16 and len(rows) == len(TEXT)
    assert [rows[i].tolist() for i in range(len(rows))] == [tokenizer.encode(line) for line in TEXT]
    keep = np.arange(len(TEXT)) % 3 == 1
    assert [row.tolist() for row in rows.select(keep)] == [rows[i].tolist() for i in np.flatnonzero(keep)]


def test_collate_shifts_the_target_by_one():
    src = tf.TokenRows(np.array([5, 6, 7, 8]), np.array([0, 3, 4]))
    tgt = tf.TokenRows(np.array([9, 10, 4, 5, 6]), np.array([0, 2, 5]))
    a, b, c = tf.collate(src, tgt, [0, 1])
    assert a.tolist() == [[5, 6, 7, EOS], [8, EOS, PAD, PAD]]
    assert b.tolist() == [[BOS, 9, 10, PAD], [BOS, 4, 5, 6]]
    assert c.tolist() == [[9, 10, EOS, PAD], [4, 5, 6, EOS]]


@pytest.mark.parametrize("budget", [60, 200, 5000])
def test_sampler_keeps_its_promises(budget):
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(2, 60, 1000), rng.integers(2, 60, 1000)
    sampler = tf.TokenBatchSampler(src, tgt, budget, seed=3)
    epochs = [sampler.epoch(e) for e in range(3)]
    for batches in epochs:
        assert len(batches) == len(sampler)
        assert sorted(np.concatenate(batches)) == list(range(1000))  # each pair once
        assert all(len(b) * max(src[b].max(), tgt[b].max()) <= budget for b in batches)  # padded size
    orders = [np.concatenate(b).tolist() for b in epochs]
    assert orders[0] != orders[1] != orders[2]
    again = tf.TokenBatchSampler(src, tgt, budget, seed=3)
    assert [np.concatenate(again.epoch(e)).tolist() for e in (2, 0, 1)] == [orders[2], orders[0], orders[1]]
    assert np.concatenate(tf.TokenBatchSampler(src, tgt, budget, seed=4).epoch(0)).tolist() != orders[0]
    if budget == 5000:  # sorting pays: little padding
        used = sum(tgt[b].sum() for b in epochs[0])
        assert used / sum(len(b) * tgt[b].max() for b in epochs[0]) > 0.85


def test_sampler_refuses_a_pair_over_the_budget_and_takes_none():
    with pytest.raises(ValueError, match="61 tokens"):
        tf.TokenBatchSampler([5, 61], [5, 5], 60)
    assert tf.TokenBatchSampler([], [], 60).epoch(0) == []


def test_lines_end_at_lf_and_crlf_only(tmp_path):
    text = "one\r\ntwo\u2028still two\u0085and\x0cmore\x0b\x1c\nthr\ree\n\nfive"
    path = tmp_path / "my text, v2 [é]"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    expected = ["one", "two\u2028still two\u0085and\x0cmore\x0b\x1c", "thr\ree", "", "five"]
    assert list(tf.read_text(path)) == expected
    (tmp_path / "x.gz").write_bytes(gzip.compress(text.encode()))
    assert list(tf.read_text(tmp_path / "x.gz")) == expected
    (tmp_path / "y.gz").write_bytes(gzip.compress(os.urandom(999))[:500])
    with pytest.raises(ValueError, match="y.gz"):
        list(tf.read_text(tmp_path / "y.gz"))
    path.write_bytes(b"fine\nnot \x92 fine\n")
    with pytest.raises(ValueError, match="line 2"):
        list(tf.read_text(path))


# --- Search --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["post", "pre"])
@torch.no_grad()
def test_cached_decoding_equals_full_decoding(norm, fused):
    model, src = small(norm=norm), batch_of([7, 2, 4])
    memory, mask = model.encode(src), tf.padding_mask(src)
    tgt = random_ids(3, 30)
    full = model.logits(model.decode(tgt, memory, mask))
    for chunks in ([1] * 30, [1, 2, 3, 10, 14], [30]):  # token by token, and several at once
        cache, start = model.start_cache(memory), 0
        for n in chunks:
            step = model.logits(model.decode(tgt[:, start : start + n], None, mask, cache))
            torch.testing.assert_close(step, full[:, start : start + n], atol=1e-10, rtol=0)
            start += n
            assert cache.length == start


def test_beams_share_their_memory():
    """W beams of a source, side by side, see what each would see alone."""
    model, src = small(), batch_of([7, 3])
    memory, mask, W = model.encode(src), tf.padding_mask(src), 3
    tgt = random_ids(2 * W, 5)
    alone = model.decode(tgt, memory.repeat_interleave(W, 0), mask.repeat_interleave(W, 0))
    cache = model.start_cache(memory)
    steps = [model.decode(tgt[:, t : t + 1], None, mask, cache) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, 1), alone, atol=1e-10, rtol=0)


@torch.no_grad()
def plain_beam_search(model, src, W, alpha, limit, n_best=1):
    """The same search in plain words: one sentence, no cache, no batch, and it never stops before the limit."""
    beam, done = [((BOS,), 0.0)], []
    for n in range(1, limit + 2):
        logits = model(src.expand(len(beam), -1), torch.tensor([tokens for tokens, _ in beam]))[:, -1].log_softmax(-1)
        logits[:, [PAD, BOS]] = -math.inf
        if n == limit + 1:
            logits[:, [i for i in range(logits.shape[1]) if i != EOS]] = -math.inf
        pool = [
            (tokens + (v,), total + p)
            for (tokens, total), row in zip(beam, logits.tolist())
            for v, p in enumerate(row)
            if p > -math.inf
        ]
        pool = sorted(pool, key=lambda x: -x[1])[: 2 * W]
        done += [(tokens, total, total / ((5 + n) / 6) ** alpha) for tokens, total in pool[:W] if tokens[-1] == EOS]
        if done and W == 1:
            break
        beam = [x for x in pool if x[0][-1] != EOS][:W]
    done = sorted(done, key=lambda x: -x[2])[:n_best]
    return [tf.Hypothesis(list(tokens[1:-1]), total, score) for tokens, total, score in done]


def assert_same_hypotheses(ours, theirs):
    assert [h.tokens for h in ours] == [h.tokens for h in theirs]
    for a, b in zip(ours, theirs):
        assert (a.log_prob, a.score) == (pytest.approx(b.log_prob, abs=1e-4), pytest.approx(b.score, abs=1e-4))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_equals_the_plain_one_which_never_stops_early(alpha):
    for seed in range(12):
        model, src = small(seed, spread=4.0, vocab_size=8), batch_of([5, 2, 4], vocab=8, seed=seed)
        for W in (1, 2, 5, 8):
            n_best = min(W, 3)
            for i, ours in enumerate(tf.beam_search(model, src, W, alpha, n_best, extra_len=3)):
                n = int((src[i] != PAD).sum())
                assert_same_hypotheses(ours, plain_beam_search(model, src[i : i + 1, :n], W, alpha, n - 1 + 3, n_best))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_a_wide_beam_equals_brute_force(alpha):
    limit, V = 3, 7
    for seed in range(5):
        model, src = small(seed, spread=3.0, vocab_size=V), batch_of([2], vocab=V, seed=seed)
        every = []
        for n in range(limit + 1):
            for tokens in itertools.product(range(UNK, V), repeat=n):  # all but PAD, BOS and EOS
                log_probs = model(src, torch.tensor([[BOS, *tokens]])).log_softmax(-1)[0]
                total = sum(log_probs[t, v].item() for t, v in enumerate([*tokens, EOS]))
                every.append((total / ((5 + n + 1) / 6) ** alpha, list(tokens)))
        best = sorted(every, key=lambda x: -x[0])[:10]
        found = tf.beam_search(model, src, 90, alpha, n_best=10, extra_len=limit - 1)[0]
        assert [h.tokens for h in found] == [tokens for _, tokens in best]
        assert [h.score for h in found] == pytest.approx([score for score, _ in best], abs=1e-4)


def test_beam_of_one_is_greedy():
    for seed in range(10):
        model, src = small(seed, spread=3.0), batch_of([5, 2, 7, 1], seed=seed)
        for alpha in (0.0, 0.6, 2.0):
            for a, b in zip(
                tf.beam_search(model, src, 1, alpha, extra_len=8), tf.greedy_search(model, src, alpha, extra_len=8)
            ):
                assert_same_hypotheses(a, b)


def test_a_batch_equals_its_sentences_one_by_one():
    for seed in range(5):
        model, lengths = small(seed, spread=3.0), [1, 9, 4, 4, 12, 2, 7]
        src = batch_of(lengths, seed=seed)
        for search in (
            lambda s: tf.beam_search(model, s, 5, n_best=2, extra_len=10),
            lambda s: tf.greedy_search(model, s, extra_len=10),
        ):
            together = search(src)
            for i, n in enumerate(lengths):
                assert_same_hypotheses(together[i], search(src[i : i + 1, :n])[0])
            order = [3, 0, 6, 5, 1, 2, 4]  # another order, and more padding
            for i, hypotheses in zip(order, search(F.pad(src[order], (0, 9), value=PAD))):
                assert_same_hypotheses(hypotheses, together[i])


def test_one_best_does_not_depend_on_n_best():
    for seed in range(10):
        model, src = small(seed, spread=3.0), batch_of([5, 3], seed=seed)
        for one, many in zip(tf.beam_search(model, src, 6), tf.beam_search(model, src, 6, n_best=6)):
            assert one[0].tokens == many[0].tokens
            assert len({tuple(h.tokens) for h in many}) == len(many) == 6  # no repeats
            assert [h.score for h in many] == sorted((h.score for h in many), reverse=True)


def test_search_stops_early(monkeypatch):
    """A model that is sure of EOS ends after a few steps, not at the limit."""
    model, src = small(), batch_of([6, 4])
    steps = []
    plain = Transformer.next_log_probs

    def sure_of_eos(model, last, *rest):
        log_probs = plain(model, last, *rest)
        steps.append(1)
        log_probs[:] = math.log(0.02 / 9)
        log_probs[:, EOS] = math.log(0.98)
        return log_probs

    monkeypatch.setattr(Transformer, "next_log_probs", sure_of_eos)
    tf.beam_search(model, src, 4)
    assert len(steps) <= 3
    steps.clear()
    tf.greedy_search(model, src)
    assert len(steps) == 1


def test_search_never_says_pad_or_bos_and_keeps_the_limit():
    model = small(spread=0.0)  # all logits equal: PAD and BOS as likely as anything
    for hypotheses in tf.beam_search(model, batch_of([3, 6]), 8, n_best=8, extra_len=2):
        for h in hypotheses:
            assert not {PAD, BOS, EOS} & set(h.tokens)
    for extra in (0, 2):
        model = small(spread=0.0)
        found = tf.beam_search(model, batch_of([3, 6]), 11, alpha=9.0, extra_len=extra)
        assert [len(h[0].tokens) for h in found] == [2 + extra, 5 + extra]  # so large an alpha wants length
    assert len(tf.greedy_search(small(spread=0.0, max_len=10), batch_of([9]))[0][0].tokens) <= 9


def ruled_search(model, src, W, alpha, least, most, prefix, ngram):
    """plain_beam_search with the rules, which are told here in other words."""
    beam, done = [((BOS,), 0.0)], []
    for n in range(most + 1):  # tokens so far
        if not beam:  # every token has been said
            break
        pool = []
        logits = model(src.expand(len(beam), -1), torch.tensor([tokens for tokens, _ in beam]))[:, -1].log_softmax(-1)
        for (tokens, total), row in zip(beam, logits.tolist()):
            said = tokens[1:]
            grams = [said[i : i + ngram] for i in range(len(said) - ngram + 1)]
            for v, p in enumerate(row):
                fine = v not in (PAD, BOS) and not (v == EOS and n < least)
                fine = fine and not (ngram and v != EOS and (*said, v)[-ngram:] in grams and n >= ngram)
                if n == most:
                    fine = v == EOS
                if n < len(prefix):
                    fine = v == prefix[n]
                if fine:
                    pool.append((tokens + (v,), total + p))
        pool = sorted(pool, key=lambda x: -x[1])[: 2 * W]
        done += [(t, p, p / ((6 + n) / 6) ** alpha) for t, p in pool[:W] if t[-1] == EOS]
        beam = [x for x in pool if x[0][-1] != EOS][:W]
    return [tf.Hypothesis(list(t[1:-1]), p, s) for t, p, s in sorted(done, key=lambda x: -x[2])[:1]]


@torch.no_grad()
@pytest.mark.parametrize("min_extra, ngram, prefixes", [(-2, 0, 0), (1, 0, 0), (None, 1, 0), (None, 2, 1), (0, 3, 1)])
def test_what_may_be_said_can_be_limited(min_extra, ngram, prefixes):
    """Shortest and longest, no n-gram twice, forced beginnings of other lengths in one batch."""
    for seed in range(8):
        model, lengths = small(seed, spread=4.0, vocab_size=9), [5, 2, 4]
        src = batch_of(lengths, vocab=9, seed=seed)
        prefix = [[], [5], [7, 6, 7, 8, 5]] if prefixes else None
        rules = dict(extra_len=3, min_extra=min_extra, prefix=prefix, no_repeat_ngram=ngram)
        for W in (2, 4):
            for i, ours in enumerate(tf.beam_search(model, src, W, 0.6, **rules)):
                n = lengths[i] - 1
                least, most = max(0, n + (min_extra if min_extra is not None else -99)), n + 3
                begin = prefix[i] if prefix else []
                most = max(most, len(begin))
                expected = ruled_search(
                    model, src[i : i + 1, : lengths[i]], W, 0.6, min(least, most), most, begin, ngram
                )
                assert_same_hypotheses(ours, expected)
        for a, b in zip(tf.beam_search(model, src, 1, **rules), tf.greedy_search(model, src, **rules)):
            assert_same_hypotheses(a, b)
    with pytest.raises(ValueError, match="prefix of 70 tokens"):
        tf.beam_search(model, src, prefix=[[5] * 70, [], []])


@torch.no_grad()
def test_samples_follow_the_model_and_not_the_batch():
    model, src = small(3, spread=3.0), batch_of([4])
    first = model(src, torch.tensor([[BOS]]))[0, 0].double()
    first[[PAD, BOS]] = -math.inf
    many = src.expand(3000, -1)

    def shares(**how):
        found = translate.sample_search(model, many, seeds=[(1, i) for i in range(3000)], extra_len=8, **how)
        firsts = torch.tensor([(h[0].tokens + [EOS])[0] for h in found])
        return torch.bincount(firsts, minlength=11) / 3000

    for temperature in (0.5, 1.0, 2.0):
        p = (first / temperature).softmax(0)
        assert (shares(temperature=temperature) - p).abs().max() < 4 * math.sqrt(0.25 / 3000)
    p, order = first.softmax(0).sort(descending=True)
    top = shares(top_k=3)
    assert set(top.nonzero().flatten().tolist()) == set(order[:3].tolist())
    n = int((p.cumsum(0) < 0.7).sum()) + 1  # the fewest that make up 0.7
    assert set(shares(top_p=0.7).nonzero().flatten().tolist()) == set(order[:n].tolist())
    assert_same_hypotheses(translate.sample_search(model, src, top_k=1)[0], tf.greedy_search(model, src)[0])
    src, seeds = batch_of([4, 9, 2, 6]), [7, 8, 9, 10]
    together = translate.sample_search(model, src, seeds=seeds)
    for i, n in enumerate([4, 9, 2, 6]):
        assert_same_hypotheses(
            translate.sample_search(model, src[i : i + 1, :n], seeds=seeds[i : i + 1])[0], together[i]
        )
    assert any(a != b for a, b in zip(together, translate.sample_search(model, src, seeds=[1, 2, 3, 4])))


@torch.no_grad()
def test_an_ensemble_averages_probabilities():
    """Models of other sizes: as if one model gave the mean; one model twice is that model."""
    models = [small(0, spread=3.0), small(1, spread=3.0, n_layers=1, d_model=8, n_heads=2, max_len=30)]
    ensemble, src = translate.Ensemble(models), batch_of([4, 7, 2])
    assert ensemble.config.max_len == 30

    class Mean:
        def __call__(self, src, tgt):
            return torch.stack([model(src, tgt).softmax(-1) for model in models]).mean(0).log()

    for i, ours in enumerate(tf.beam_search(ensemble, src, 3, extra_len=4)):
        n = [4, 7, 2][i]
        assert_same_hypotheses(ours, plain_beam_search(Mean(), src[i : i + 1, :n], 3, 0.6, n - 1 + 4))
    for a, b in zip(tf.beam_search(translate.Ensemble([models[0]] * 2), src), tf.beam_search(models[0], src)):
        assert_same_hypotheses(a, b)
    with pytest.raises(ValueError, match="vocabularies"):
        translate.Ensemble([models[0], small(vocab_size=12)])


def test_search_leaves_the_mode_alone_and_refuses_nonsense():
    model, src = small().train(), batch_of([3])
    tf.beam_search(model, src)
    assert model.training
    with pytest.raises(ValueError):
        tf.beam_search(model, src, 2, n_best=3)
    with pytest.raises(ValueError):
        tf.beam_search(model, src, 2, alpha=-1)
    model.tgt_embedding.table.data[:] = math.nan
    for search in (tf.beam_search, tf.greedy_search):
        with pytest.raises(ValueError, match="finite"):
            search(model, src)
    assert model.training


def test_eval_mode_repeats_itself():
    model = small(dropout=0.5, dtype=torch.float32)
    assert tf.beam_search(model, batch_of([5])) == tf.beam_search(model, batch_of([5]))


# --- The whole chain -----------------------------------------------------------------------------------------------


def demo_pairs(n, start=0):
    lines = (HERE / "data" / "demo.tsv").read_text("utf-8").split("\n")
    return lines[start : start + n]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small corpus in a folder whose name is a trap for careless path handling."""
    path = tmp_path_factory.mktemp("my data, v2 [é]") / "pairs.tsv"
    path.write_text("\n".join(demo_pairs(200)) + "\n", "utf-8")
    return path


TINY = "--d-model 32 --n-heads 2 --d-ff 48 --n-layers 1 --vocab-size 420 --batch-tokens 300 --val-pairs 6".split()
TINY += ["--warmup-steps", "10"]


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """A checkpoint that knows 20 pairs by heart, made by train.py, and the files of these pairs."""
    folder = tmp_path_factory.mktemp("memory")
    pairs = [line.split("\t") for line in demo_pairs(20, 1000)]
    for name, side in zip(("src", "tgt"), zip(*pairs)):
        (folder / name).write_text("\n".join(side) + "\n", "utf-8")
    status = train.main(
        [
            "--src",
            str(folder / "src"),
            "--tgt",
            str(folder / "tgt"),
            "--overfit",
            "20",
            "--out",
            str(folder / "run"),
            "--preset",
            "tiny",
            "--vocab-size",
            "450",
            "--steps",
            "250",
            "--eval-every",
            "250",
        ]
    )
    assert status == 0  # it says itself that all 20 came back
    return folder


def test_twenty_pairs_are_memorised_and_translated_back(memorised, capfdbinary):
    arguments = ["--checkpoint", str(memorised / "run" / "best.pt"), "--input", str(memorised / "src")]
    assert translate.main([*arguments, "--output", str(memorised / "out")]) == 0
    assert (memorised / "out").read_bytes() == (memorised / "tgt").read_bytes()
    capfdbinary.readouterr()
    assert translate.main(arguments) == 0
    assert capfdbinary.readouterr().out == (memorised / "tgt").read_bytes()  # stdout: translations and nothing else
    assert translate.main([*arguments, "--reference", str(memorised / "tgt"), "--beam", "1"]) == 0
    out, report = capfdbinary.readouterr()
    assert (
        out == b"" and re.search(rb"this model +100.00 +100.00 +0.00\n", report) and b"exact matches 100.0%" in report
    )


def test_teacher_forced_argmax_equals_greedy_on_memorised_pairs(memorised):
    model, tokenizer, _ = tf.load_checkpoint(memorised / "run" / "best.pt")
    rows = tf.encode_pairs(tokenizer, zip(*(tf.read_text(memorised / side) for side in ("src", "tgt"))))
    src, tgt_in, tgt_out = tf.collate(*rows, range(20))
    forced = model(src, tgt_in).argmax(-1).masked_fill(tgt_out == PAD, PAD)
    assert torch.equal(forced, tgt_out)
    assert [h[0].tokens for h in tf.greedy_search(model, src)] == [rows[1][i].tolist() for i in range(20)]


def test_a_line_in_is_a_line_out(memorised):
    """Blank lines, lines that are not lines, a line over the limit, and one of each script, through a pipe."""
    known, answer = (next(tf.read_text(memorised / side)) for side in ("src", "tgt"))
    lines = [
        "",
        known,
        " ",
        "x " * 5000,
        "a\u2028b\u0085c",
        "one\rtwo",
        known + "\r",
        "-",
        "\u200b",
        "漢字 😀",
        "</s> <pad>",
    ]
    command = [sys.executable, HERE / "translate.py", "--checkpoint", memorised / "run" / "best.pt", "--beam", "2"]
    environment = dict(os.environ, LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    done = subprocess.run(command, input="\n".join(lines).encode(), capture_output=True, env=environment)
    out = done.stdout.decode("utf-8").split("\n")
    assert len(out) == len(lines) + 1 and out.pop() == ""
    assert out[0] == out[2] == "" and out[1] == out[6] == answer
    assert not any(set("\r\u2028\u0085") & set(line) for line in out)
    # one line was too long: it is named, and translated in parts
    assert done.returncode == 0 and b"line 4 has more than 255 tokens: translated in" in done.stderr
    assert b"Traceback" not in done.stderr


def rows_of(folder):
    """The training lines of metrics.jsonl, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("tokens_per_second", "memory_mb", "minutes")}
        for row in rows
        if "loss" in row
    ]


def weights_of(path):
    return torch.load(path, weights_only=True)


def assert_same_training(a, b):
    a, b = (weights_of(folder / "last.pt") for folder in (a, b))
    assert a["state"]["step"] == b["state"]["step"]
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    moments = [[x for p in c["optimizer"]["state"].values() for x in p.values()] for c in (a, b)]
    assert all(torch.equal(x, y) for x, y in zip(*moments))


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_a_stopped_run_resumed_equals_an_unbroken_one(corpus, tmp_path, norm, capfd):
    """Dropout on, two batches an update, stops within and across epochs, in and after the warm-up."""
    flags = [
        "--data",
        str(corpus),
        *TINY,
        "--norm",
        norm,
        "--dropout",
        "0.2",
        "--accumulate",
        "2",
        "--log-every",
        "2",
        "--eval-every",
        "10",
        "--save-every",
        "4",
    ]
    assert train.main([*flags, "--steps", "20", "--out", str(tmp_path / "whole")]) == 0
    assert train.main([*flags, "--steps", "4", "--out", str(tmp_path / "parts")]) == 0
    capfd.readouterr()
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "14"]) == 0
    assert "resumed at step 4" in capfd.readouterr().err
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "20"]) == 0
    assert_same_training(tmp_path / "whole", tmp_path / "parts")
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "parts")
    capfd.readouterr()
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "20"]) == 0
    assert "already at step 20 of 20" in capfd.readouterr().err


def test_a_signal_saves_and_says_how_to_go_on(corpus, tmp_path):
    flags = [
        "--data",
        corpus,
        *TINY,
        "--steps",
        "100000",
        "--save-every",
        "100000",
        "--out",
        tmp_path / "run",
        "--log-every",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, HERE / "train.py", *flags], stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    for line in process.stderr:
        if line.startswith("step 3/"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.communicate()[1]
    assert process.returncode == 143
    assert f"--resume {tmp_path / 'run'}" in rest and "Traceback" not in rest
    assert weights_of(tmp_path / "run" / "last.pt")["state"]["step"] >= 3


def test_updates_that_are_not_finite_are_skipped_and_ten_in_a_row_stop(corpus, tmp_path, monkeypatch, capfd):
    plain, calls, bad = tf.training_loss, [], {3, 4}

    def sometimes_infinite(model, *batch):
        sums = plain(model, *batch)
        if model.training:
            calls.append(1)
            if len(calls) in bad:
                sums.smoothed = sums.smoothed * math.inf
        return sums

    monkeypatch.setattr(tf, "training_loss", sometimes_infinite)
    flags = ["--data", str(corpus), *TINY, "--steps", "6"]
    assert train.main([*flags, "--out", str(tmp_path / "a")]) == 0
    last = weights_of(tmp_path / "a" / "last.pt")
    assert (last["state"]["step"], last["state"]["batches"], last["state"]["skipped"]) == (6, 8, 2)
    assert all(p.isfinite().all() for p in last["model"].values())
    bad.update(range(11, 1000))
    assert train.main([*flags, "--out", str(tmp_path / "b")]) == 1
    assert "ten updates in a row" in capfd.readouterr().err


def test_what_a_run_leaves_behind(corpus, tmp_path, tokenizer):
    run = tmp_path / "run"
    flags = ["--data", str(corpus), *TINY, "--steps", "6", "--eval-every", "2", "--average", "2", "--save-every", "100"]
    assert train.main([*flags, "--out", str(run)]) == 0
    mean = tf.average_checkpoints([run / "step-00000004.pt", run / "step-00000006.pt"])[0].state_dict()
    assert all(torch.equal(p, mean[name]) for name, p in weights_of(run / "average.pt")["model"].items())
    for name in ("best.pt", "last.pt"):
        model, tokenizer, rest = tf.load_checkpoint(run / name)
        assert not model.training and rest["tokenizer_sha256"] == tokenizer.sha256
        assert {"data_fingerprint", "git_commit", "versions", "flags", "state"} <= set(rest)
    assert not any("positions" in name for name in weights_of(run / "last.pt")["model"])
    assert (tmp_path / "best.pt").resolve() == (run / "best.pt").resolve()
    assert not os.path.isabs(os.readlink(tmp_path / "best.pt"))
    assert sorted(p.name for p in run.glob("step-*.pt")) == ["step-00000004.pt", "step-00000006.pt"]
    assert not list(run.glob("*.tmp")) and [p.name for p in run.glob(".*")] == [".lock"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kinds = [(row["kind"], row["step"]) for row in rows if "kind" in row]
    assert kinds[:4] == [("valid", 2), ("valid", 4), ("valid", 6), ("average", 6)] and kinds[4][0] == "best"
    best = max((row for row in rows if row.get("kind") in ("valid", "average")), key=lambda row: row["chrf"])
    board = json.loads((tmp_path / "leaderboard.json").read_text())
    assert (board[0]["chrf"], board[0]["step"]) == (pytest.approx(best["chrf"]), best["step"])
    assert board[0]["data_fingerprint"] == rest["data_fingerprint"]
    # the last weights are the run's own, not the average, and know the best score so far
    last = weights_of(run / "last.pt")
    newest = weights_of(run / "step-00000006.pt")
    assert all(torch.equal(last["model"][name], newest["model"][name]) for name in newest["model"])
    assert last["state"]["best"] == pytest.approx(best["chrf"]) and last["state"]["finished"]


def test_flags_do_what_they_say(corpus, tmp_path, capfd):
    def run(*flags):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        assert train.main(["--data", str(corpus), *TINY, "--out", str(out), *flags]) == 0
        return out, capfd.readouterr().err, weights_of(out / "last.pt")

    _, log, last = run("--precision", "bf16", "--epochs", "1", "--max-pairs", "100", "--clip", "0", "--norm", "pre")
    assert (
        "read 200 pairs, took 100 at random" in log
        and last["config"]["norm"] == "pre"
        and last["state"]["batches"] == last["state"]["step"]
    )
    assert all(p.dtype == torch.float32 for p in last["model"].values())
    # with a rate of nothing nothing gets better: the second and third validation use the patience up
    out, log, last = run(
        "--steps", "50", "--eval-every", "2", "--patience", "2", "--rate-scale", "1e-9", "--best-by", "bleu"
    )
    assert last["state"]["step"] == 6 and "no better bleu for 2 validations" in log
    assert train.main(["--resume", str(out)]) == 0
    assert weights_of(out / "last.pt")["state"]["step"] == 6
    assert train.main(["--data", str(corpus), *TINY, "--dry-run", "--out", str(tmp_path / "dry")]) == 0
    assert "source: " in capfd.readouterr().err and not (tmp_path / "dry").exists()


def test_fine_tuning_starts_from_given_weights(memorised, corpus, tmp_path, capfd):
    """New data, fresh optimizer and step; the weights, the sizes and the tokenizer are the checkpoint's."""
    start = memorised / "run" / "best.pt"
    flags = ["--data", str(corpus), "--val-pairs", "6", "--init-from", str(start), "--dropout", "0.25", "--steps", "1"]
    assert train.main([*flags, "--rate-scale", "1e-9", "--out", str(tmp_path / "run")]) == 0
    (old, old_tokenizer, _), (new, new_tokenizer, rest) = map(tf.load_checkpoint, (start, tmp_path / "run" / "last.pt"))
    assert rest["state"]["step"] == 1 and old_tokenizer.sha256 == new_tokenizer.sha256
    for a, b in zip(old.parameters(), new.parameters()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert new.config.dropout == 0.25 and old.config.dropout == 0.0
    assert train.main([*flags, "--d-model", "64", "--out", str(tmp_path / "other")]) == 1
    assert "--d-model is decided by what --init-from brings" in capfd.readouterr().err


def test_errors_are_explained_or_passed_on():
    missing = FileNotFoundError(2, "No such file or directory", "a.tsv")
    assert tf.explain(missing) == "a.tsv: No such file or directory"
    assert tf.explain(ValueError("this and that")) == "this and that"
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        assert "out of memory" in tf.explain(error)
    with pytest.raises(RuntimeError, match="a fault of ours"):  # its traceback is what one wants to see
        tf.explain(RuntimeError("a fault of ours"))


def test_average_is_the_mean_and_refuses_mixtures(tmp_path, tokenizer):
    models = [small(seed, torch.float32) for seed in range(3)]
    for i, model in enumerate(models):
        tf.save_checkpoint(tmp_path / f"{i}.pt", model, tokenizer, step=i)
    mean, _, rest = tf.average_checkpoints([tmp_path / f"{i}.pt" for i in range(3)])
    for name, p in mean.named_parameters():
        torch.testing.assert_close(p, sum(dict(m.named_parameters())[name] for m in models) / 3)
    assert rest["step"] == 2
    tf.save_checkpoint(tmp_path / "other.pt", small(d_ff=32, dtype=torch.float32), tokenizer)
    with pytest.raises(ValueError, match="other.pt"):
        tf.average_checkpoints([tmp_path / "0.pt", tmp_path / "other.pt"])
    with pytest.raises(ValueError):
        tf.average_checkpoints([])


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["HOSTILE_MARK"],)


def test_damaged_and_hostile_files_are_refused(tmp_path, tokenizer, monkeypatch):
    path = tmp_path / "a.pt"
    tf.save_checkpoint(path, small(dtype=torch.float32), tokenizer)
    tf.load_checkpoint(path)
    whole = path.read_bytes()
    monkeypatch.setenv("HOSTILE_MARK", str(tmp_path / "mark"))
    foreign = io.BytesIO()
    torch.save({"format": 2}, foreign)
    flips = [bytearray(whole) for _ in range(20)]
    for i, flip in enumerate(flips):  # one bit of the weights, somewhere
        flip[len(whole) // 2 + 37 * i] ^= 1 << i % 8
    for content in (
        b"",
        b"text",
        whole[: len(whole) // 2],
        pickle.dumps(Hostile()),
        foreign.getvalue(),
        *map(bytes, flips),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.pt is not a checkpoint"):
            tf.load_checkpoint(path)
    torch.save(Hostile(), path)
    with pytest.raises(ValueError):
        tf.load_checkpoint(path)
    assert not (tmp_path / "mark").exists()


def test_the_default_checkpoint_is_never_one_that_memorised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, (name, config) in enumerate({"old": {}, "new": {}, "test": {"overfit": 5}}.items()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "best.pt").write_text(name)
        (folder / "config.json").write_text(json.dumps(config))
        os.utime(folder / "best.pt", (i, i))
    assert translate.find_checkpoint().read_text() == "new"
    (tmp_path / "runs" / "best.pt").symlink_to(Path("old") / "best.pt")
    assert translate.find_checkpoint().read_text() == "old"


def test_links_replace_links_only(corpus, tmp_path, monkeypatch):
    """A run in the folder of another one, or in the present folder, must not put its link in place of a checkpoint."""
    flags = ["--data", str(corpus), *TINY, "--steps", "2"]
    outer = tmp_path / "outer"
    assert train.main([*flags, "--out", str(outer)]) == 0
    before = (outer / "best.pt").read_bytes()
    assert train.main([*flags, "--out", str(outer / "inner")]) == 0
    assert (outer / "best.pt").read_bytes() == before and not (outer / "best.pt").is_symlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert train.main([*flags, "--out", "."]) == 0
    assert not (tmp_path / "here" / "best.pt").is_symlink()
    assert (tmp_path / "best.pt").resolve() == tmp_path / "here" / "best.pt"
    for content in ("{bad", '[{"run": "x"}]', "5"):  # somebody's file of the same name
        (tmp_path / "leaderboard.json").write_text(content)
        train.main(["--resume", ".", "--steps", str(3 + len(content))])
        assert (tmp_path / "leaderboard.json").read_text() == content


def test_a_disk_that_is_full_costs_saves_not_the_run(corpus, tmp_path, monkeypatch, capfd):
    plain, full = tf.save_checkpoint, {"on": True}

    def save(path, *args, **rest):
        if full["on"] and path.name == "best.pt":
            raise OSError(f"{path} cannot be written")
        plain(path, *args, **rest)

    monkeypatch.setattr(tf, "save_checkpoint", save)
    flags = ["--data", str(corpus), *TINY, "--steps", "4", "--eval-every", "2", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0  # to the end, with the last weights in the place of the best
    assert "there is no older one" in capfd.readouterr().err and not (tmp_path / "run" / "best.pt").exists()
    assert weights_of(tmp_path / "run" / "last.pt")["state"]["best"] is None
    full["on"] = False
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "6"]) == 0
    assert weights_of(tmp_path / "run" / "best.pt")["state"]["step"] == 6


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_really_full_disk_says_how_much_is_missing(tmp_path, tokenizer, monkeypatch):
    model = small(dtype=torch.float32)
    monkeypatch.setattr(tf, "write_atomically", lambda path, write, previous: write("/dev/full"))
    with pytest.raises(OSError, match="cannot be written: it needs [0-9]+ bytes, and [0-9]+ are free|No space"):
        tf.save_checkpoint(tmp_path / "a.pt", model, tokenizer)


def test_stale_files_of_killed_saves_are_removed(corpus, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".last.pt.123.tmp").write_bytes(b"half")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 5}\n')
    (run / "notes.txt").write_text("mine")
    assert train.main(["--data", str(corpus), *TINY, "--steps", "1", "--out", str(run)]) == 0
    assert not (run / ".last.pt.123.tmp").exists() and (run / "notes.txt").read_text() == "mine"
    assert len(rows_of(run)) == 1


def test_closed_streams(memorised):
    """Without stdin, stdout or stderr: no traceback, and never a message among the translations."""
    best = memorised / "run" / "best.pt"
    source, answer = (next(tf.read_text(memorised / side)) for side in ("src", "tgt"))

    def shell(redirect, text=""):
        line = f'"$0" "$1" --checkpoint "$2" {text} {redirect}'
        return subprocess.run(["bash", "-c", line, sys.executable, HERE / "translate.py", best], capture_output=True)

    done = shell("<&-")
    assert done.returncode == 1 and b"stdin is closed" in done.stderr and b"Traceback" not in done.stderr
    done = shell(">&-", "hello")
    assert done.returncode == 1 and b"stdout is closed" in done.stderr and b"Traceback" not in done.stderr
    done = shell("2>&-", f"'{source}'")
    assert done.returncode == 0 and done.stdout.decode() == answer + "\n"


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(temporary):
        temporary.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError):
        tf.write_atomically(path, fails)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


# --- translate.py --------------------------------------------------------------------------------------------------


@pytest.fixture
def run_translate(memorised, capfdbinary):
    """translate.py with these flags on the memorised model -> status, stdout, stderr."""

    def run(*flags, checkpoint=memorised / "run" / "best.pt"):
        capfdbinary.readouterr()
        status = translate.main(["--checkpoint", str(checkpoint), *map(str, flags)])
        out, err = capfdbinary.readouterr()
        return status, out.decode("utf-8"), err.decode("utf-8")

    return run


def pairs_of(memorised):
    return list(zip(*(list(tf.read_text(memorised / side)) for side in ("src", "tgt"))))


def test_text_to_text_is_one_way(memorised, run_translate):
    """What validation says of these lines is what translate.py says, whatever the size of its batches."""
    model, tokenizer, _ = tf.load_checkpoint(memorised / "run" / "best.pt")
    sources = [src for src, _ in pairs_of(memorised)] + ["", "quite unknown words 5", "a"]
    expected = tf.translate(model, tokenizer, sources)
    (memorised / "in").write_text("".join(line + "\n" for line in sources), "utf-8")
    for flags in ([], ["--batch-tokens", "1"], ["--batch-lines", "4"], ["--threads", "1"]):
        assert run_translate("--input", memorised / "in", *flags)[1].split("\n")[:-1] == expected
    with pytest.raises(ValueError, match=r"line 2 has \d+ tokens, the limit is 256"):
        tf.translate(model, tokenizer, ["a", "৯" * 300])


def test_scores_and_n_best_are_the_models_own(memorised, run_translate):
    model, tokenizer, _ = tf.load_checkpoint(memorised / "run" / "best.pt")
    source = pairs_of(memorised)[0][0] + " and more"
    status, out, _ = run_translate(
        "--n-best", "4", "--beam", "6", "--alpha", "1", source, "", pairs_of(memorised)[1][0]
    )
    rows = [line.split("\t") for line in out.split("\n")[:-1]]
    assert [row[0] for row in rows] == ["1"] * 4 + ["2"] + ["3"] * 4 and rows[4][1:] == ["", "", ""]
    assert len({row[3] for row in rows[:4]}) == 4  # no text twice
    scores = [float(row[1]) for row in rows[:4]]
    assert scores == sorted(scores, reverse=True)
    objects = [
        json.loads(x)
        for x in run_translate("--json", "--n-best", "4", "--beam", "6", "--alpha", "1", source, "")[1].splitlines()
    ]
    assert objects[1] == dict(line=2, source="", hypotheses=[])
    for row, h in zip(rows, objects[0]["hypotheses"]):
        assert (h["text"], f"{h['score']:.6f}", f"{h['log_prob']:.6f}") == (row[3], row[1], row[2])
        n = len(h["tokens"]) + 1
        assert h["score"] == pytest.approx(h["log_prob"] / ((5 + n) / 6)) and len(h["token_log_probs"]) == n
        assert sum(h["token_log_probs"]) == pytest.approx(h["log_prob"], abs=1e-3)
        ids = [tokenizer.pieces.piece_to_id(piece) for piece in h["tokens"]]
        src = torch.tensor([tokenizer.encode(source) + [EOS]])
        log_probs = model(src, torch.tensor([[BOS, *ids]])).log_softmax(-1)[0]
        assert h["token_log_probs"] == pytest.approx(
            [log_probs[t, v].item() for t, v in enumerate([*ids, EOS])], abs=1e-3
        )
    # best first does not depend on how many are asked for
    assert run_translate("--beam", "6", "--alpha", "1", source)[1] == rows[0][3] + "\n"


def test_given_translations_are_scored_as_the_search_scores_its_own(memorised, run_translate):
    files = ["--input", memorised / "src", "--reference", memorised / "tgt"]
    searched = run_translate("--input", memorised / "src", "--scores")[1]
    status, scored, _ = run_translate("--score", *files)
    assert status == 0
    for a, b in zip(searched.splitlines(), scored.splitlines()):
        a, b = a.split("\t"), b.split("\t")
        assert (a[0], a[3]) == (b[0], b[3]) and [float(x) for x in a[1:3]] == pytest.approx(
            [float(x) for x in b[1:3]], abs=1e-4
        )
    rows = [json.loads(line) for line in run_translate("--score", "--json", *files)[1].splitlines()]
    assert all(sum(row["token_log_probs"]) == pytest.approx(row["log_prob"]) for row in rows)
    (memorised / "a").write_text("word\n\nword\n")
    (memorised / "b").write_text("x\ny\n\n")
    status, scored, err = run_translate("--score", "--input", memorised / "a", "--reference", memorised / "b")
    assert status == 1 and "line 2 is not scored" in err and scored.split("\n")[1] == "2\t\t\ty"
    assert float(scored.split("\n")[2].split("\t")[2]) < 0  # of nothing but an end


def test_search_flags_reach_the_search(memorised, run_translate):
    source, answer = pairs_of(memorised)[0]
    ids = tf.load_checkpoint(memorised / "run" / "best.pt")[1].encode
    assert (
        run_translate("--max-len", "0", source)[1] != ""
        and len(ids(run_translate("--max-len", "3", "--min-len", "3", source)[1])) > 0
    )
    other = pairs_of(memorised)[1][1].split()[0]
    assert run_translate("--prefix", other, source)[1].startswith(other)
    shortest = run_translate("--json", "--min-len", "9", source)[1]
    assert len(json.loads(shortest)["hypotheses"][0]["tokens"]) >= len(ids(source)) + 9
    unrepeated = json.loads(run_translate("--json", "--min-len", "30", "--no-repeat-ngram", "1", source)[1])[
        "hypotheses"
    ][0]["tokens"]
    assert len(set(unrepeated)) == len(unrepeated)
    samples = [run_translate("--temperature", "3", "--seed", str(seed), source, source)[1] for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2] and len(set(samples[0].split("\n")[:-1])) == 2
    assert run_translate("--top-k", "1", source)[1] == run_translate("--beam", "1", source)[1] == answer + "\n"
    assert run_translate("--top-p", "0.01", source)[1] == answer + "\n"
    assert run_translate("--precision", "bf16", source)[1] == answer + "\n"


def test_an_ensemble_on_the_command_line(memorised, corpus, tmp_path, run_translate):
    source, answer = pairs_of(memorised)[0]
    last = memorised / "run" / "last.pt"
    status, out, err = run_translate("--checkpoint", last, "--scores", source)
    assert out == run_translate("--scores", source)[1] and err.count("parameters") == 2  # the same model twice
    assert train.main(["--data", str(corpus), *TINY, "--steps", "1", "--out", str(tmp_path / "run")]) == 0
    status, _, err = run_translate("--checkpoint", tmp_path / "run" / "best.pt", source)
    assert status == 1 and "another tokenizer than" in err


def test_long_lines_are_translated_in_parts_and_none_is_lost(memorised, run_translate):
    tokenizer = tf.load_checkpoint(memorised / "run" / "best.pt")[1]
    (src1, tgt1), (src2, tgt2) = pairs_of(memorised)[:2]
    line = " ".join([src1, src2] * 12)
    status, out, err = run_translate("short", line, src1)
    out = out.split("\n")
    assert status == 0 and len(out) == 4 and out[2] == tgt1
    assert re.search(r"line 2 has more than 255 tokens: translated in \d+ parts", err)
    rng = random.Random(0)
    for borders in ("one. two three! ", "word ", "x", "猫が好き。", "a b c "):
        text = "".join(rng.choice([borders, borders, "😀"]) for _ in range(60)).strip()
        for limit in (5, 9, 40):
            parts = translate.split_to_fit(tokenizer, text, limit)
            assert all(0 < len(tokenizer.encode(part)) <= limit for part in parts)
            assert "".join("".join(parts).split()) == "".join(text.split())
    assert translate.split_to_fit(tokenizer, "One is here. Two is. Three!", 12)[0].endswith(".")


def test_a_pipe_that_stays_open_is_answered_line_by_line(memorised):
    command = [sys.executable, HERE / "translate.py", "--checkpoint", memorised / "run" / "best.pt", "--threads", "1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for source, answer in pairs_of(memorised)[:3]:
        process.stdin.write(source.encode() + b"\n")
        process.stdin.flush()
        assert process.stdout.readline().decode() == answer + "\n"  # and would wait here for ever if it were held back
    process.stdin.write(b"\xef\xbb\xbfno newline, not the first line")
    out, _ = process.communicate(timeout=30)
    assert out.count(b"\n") == 1 and process.returncode == 0
    done = subprocess.run(command, input=b"one\ntwo\nbad \xff\nfour\n", capture_output=True)
    assert done.returncode == 1 and done.stdout.count(b"\n") == 2 and b"input, line 3" in done.stderr
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"one\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)  # quiet
    assert b"Traceback" not in process.communicate(timeout=30)[1] and process.returncode == 130


def test_nothing_that_is_read_is_overwritten_and_stderr_is_not_needed(memorised, tmp_path):
    command = [sys.executable, HERE / "translate.py", "--threads", "1", "--checkpoint", memorised / "run" / "best.pt"]
    text = (memorised / "src").read_bytes()
    (tmp_path / "in").write_bytes(text)
    with open(tmp_path / "in", "rb") as stdin:
        done = subprocess.run([*command, "--output", tmp_path / "in"], stdin=stdin, capture_output=True)
    assert done.returncode == 1 and b"would overwrite" in done.stderr and (tmp_path / "in").read_bytes() == text
    reader, writer = os.pipe()
    os.close(reader)  # nobody hears what stderr says
    done = subprocess.run([*command, "--input", tmp_path / "in"], stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    assert done.returncode == 0 and done.stdout == (memorised / "tgt").read_bytes()


def test_damaged_weights_and_impossible_limits_are_told(memorised, tmp_path, run_translate):
    content = weights_of(memorised / "run" / "best.pt")
    content["model"] = {name: p * math.nan for name, p in content["model"].items()}
    torch.save(content, tmp_path / "nan.pt")
    files = ["--input", memorised / "src", "--reference", memorised / "tgt"]
    for flags in (["hello"], ["--temperature", "1", "hello"], ["--top-k", "3", "hello"], ["--score", *files]):
        status, out, err = run_translate(*flags, checkpoint=tmp_path / "nan.pt")
        assert status == 1 and out == "" and "not finite (damaged weights)" in err
    model, src = small(vocab_size=5), batch_of([3, 3], vocab=5)
    for search in (tf.greedy_search, tf.beam_search):  # three tokens, none of them twice, of a vocabulary of two
        with pytest.raises(ValueError, match="the limits allow none"):
            search(model, src, extra_len=1, min_extra=1, no_repeat_ngram=1)


def test_samples_do_not_depend_on_the_blocks_or_on_long_lines(memorised, run_translate):
    lines = [src for src, _ in pairs_of(memorised)][:6]
    lines[2] = " ".join(lines * 8)  # in parts
    (memorised / "long").write_text("".join(line + "\n" for line in lines), "utf-8")
    flags = ["--temperature", "2", "--input", memorised / "long"]
    together, alone = run_translate(*flags)[1], run_translate(*flags, "--batch-lines", "1")[1]
    assert together == alone and len(set(together.split("\n"))) == 7


def test_the_prompt_takes_commands(memorised, monkeypatch, run_translate):
    (src1, tgt1), (src2, tgt2) = pairs_of(memorised)[:2]
    lines = iter([src1, ":nbest 2", src2, ":beam x", ":nonsense", ":nbest 1", ":attention", src1, ""])
    monkeypatch.setattr("builtins.input", lambda: next(lines))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True, reconfigure=lambda **_: None))
    status, out, err = run_translate()
    out = out.split("\n")
    assert status == 0 and out[0] == tgt1 and out[1].endswith(tgt2) and out[2].startswith("1\t") and out[3] == tgt1
    assert "beam 4, n-best 2" in err and err.count("commands: ") == 2 and "in per cent" in err


def test_attention_is_the_models_and_sums_to_one(memorised, run_translate, tmp_path, monkeypatch):
    model, tokenizer, _ = tf.load_checkpoint(memorised / "run" / "best.pt")
    source, answer = pairs_of(memorised)[0]
    src, tgt = tokenizer.encode(source), tokenizer.encode(answer)
    weights = translate.attention_of(model, src, tgt)
    N, H = model.config.n_layers, model.config.n_heads
    assert weights.shape == (N, H, len(tgt) + 1, len(src) + 1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    seen, plain = [], tf.MultiHeadAttention.cross

    def cross(self, x, keys_values, mask):
        D, K = x.shape[-1], x.shape[-1] // self.n_heads
        query = (x[0] @ self.qkv.weight[:D].T + self.qkv.bias[:D]).view(-1, self.n_heads, K).transpose(0, 1)
        key = keys_values[0, :, :D].view(-1, self.n_heads, K).transpose(0, 1)
        seen.append((query @ key.transpose(1, 2) / math.sqrt(K)).softmax(-1))
        return plain(self, x, keys_values, mask)

    monkeypatch.setattr(tf.MultiHeadAttention, "cross", cross)
    with torch.no_grad():
        model(torch.tensor([src + [EOS]]), torch.tensor([[BOS] + tgt]))
    torch.testing.assert_close(torch.stack(seen), weights, atol=1e-5, rtol=1e-4)
    status, out, err = run_translate("--attention", source)
    assert status == 0 and out == answer + "\n" and f"layer {N}, mean of the heads" in err
    table = err.split("\n")[-len(tgt) - 2 : -1]
    for line, row in zip(table, weights[-1].mean(0)):
        assert [int(x) for x in line.split()[-len(src) - 1 :]] == [round(100 * w.item()) for w in row]
    assert "layer 2, head 1" in run_translate("--attention", "--layer", "2", "--head", "1", source)[2]
    assert "--layer 9: the model has 4" in run_translate("--attention", "--layer", "9", source)[2]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run_translate("--attention", tmp_path / "a.png", source)
    assert status == 1 and "pip install matplotlib" in err


def test_attention_is_drawn(run_translate, memorised, tmp_path):
    """An .svg keeps its text; pixels have numbers where a script must be shaped, and a legend beside them."""
    pytest.importorskip("matplotlib")
    source = pairs_of(memorised)[0][0]
    status, _, err = run_translate("--attention", tmp_path / "a.svg", source, source)
    assert status == 0 and (tmp_path / "a-2.svg").exists() and "numbers stand" not in err
    assert "layer 4, head 4" in (tmp_path / "a.svg").read_text("utf-8") and re.search(
        "[ক-হ]", (tmp_path / "a.svg").read_text("utf-8")
    )
    status, _, err = run_translate("--attention", tmp_path / "a.png", "--head", "1", source)
    assert (
        status == 0
        and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        and "numbers stand for the tokens" in err
    )
    assert "cannot be drawn" in run_translate("--attention", tmp_path / "none" / "a.png", source)[2]


def test_reports_are_sacrebleus_own(memorised, run_translate, tmp_path):
    sources, references = zip(*pairs_of(memorised))
    references = [r if i % 3 else r + " বাড়তি শব্দ" for i, r in enumerate(references)]
    (tmp_path / "ref").write_text("".join(line + "\n" for line in references), "utf-8")
    status, out, err = run_translate(
        "--input", memorised / "src", "--reference", tmp_path / "ref", "--output", tmp_path / "out"
    )
    outputs = list(tf.read_text(tmp_path / "out"))
    assert status == 0 and out == ""
    expected = [
        sacrebleu.corpus_bleu(outputs, [references]).score,
        sacrebleu.corpus_chrf(outputs, [references], word_order=2).score,
        sacrebleu.corpus_ter(outputs, [references]).score,
    ]
    row = next(line for line in err.split("\n") if line.startswith("this model"))
    assert row.split()[2:] == [f"{x:.2f}" for x in expected]
    copied = next(line for line in err.split("\n") if line.startswith("the source, copied"))
    assert copied.split()[3] == f"{sacrebleu.corpus_bleu(sources, [references]).score:.2f}"
    lengths = [line.split() for line in err.split("\n") if re.match(r"\d+ to \d+ ", line)]
    assert sum(int(row[-1]) for row in lengths) == len(sources)
    assert (
        "13a does not know this script's punctuation" in err and "TER: nrefs:1" in err and "exact matches 65.0%" in err
    )
    command = [
        sys.executable,
        "-m",
        "sacrebleu",
        tmp_path / "ref",
        "-i",
        tmp_path / "out",
        "-m",
        "bleu",
        "-b",
        "-w",
        "2",
    ]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == f"{expected[0]:.2f}"
    err = run_translate("--input", memorised / "src", "--reference", tmp_path / "ref", "--bleu-tokenizer", "intl")[2]
    assert "tok:intl" in err and "13a" not in err


def test_baselines_and_comparisons(memorised, run_translate, tmp_path):
    sources, references = zip(*pairs_of(memorised))
    (tmp_path / "other").write_text("".join(f"{r.split()[0]}\n" for r in references), "utf-8")
    files = ["--input", memorised / "src", "--reference", memorised / "tgt"]
    err = run_translate(*files, "--memory", memorised / "src", memorised / "tgt", "--compare", tmp_path / "other")[2]
    nearest = next(line for line in err.split("\n") if line.startswith("nearest training pair"))
    assert nearest.split()[3] == "100.00"  # its memory holds the very lines
    assert re.search(r"BLEU: [\d.]+ there, 100.00 here, p = 0.0", err)
    err = run_translate(*files, "--compare", memorised / "run" / "last.pt")[2]
    assert "the same translations" in err
    (tmp_path / "few").write_text("one\n")
    assert "few has 1 lines" in run_translate(*files, "--compare", tmp_path / "few")[2]
    assert "the same translations" in run_translate(*files, "--compare", memorised / "tgt")[2]
    found = translate.nearest_targets(
        ["the cat", "a rare word", "zzz"], ["the dog", "the cat sat", "rare", "the"], list("abcd")
    )
    assert found[:2] == ["b", "c"]
    assert translate.repeats("a b c " * 3) and not translate.repeats("a b c " * 2) and not translate.repeats("")


# --- Runs that survive anything, and several processes -------------------------------------------------------------


def start(*flags, processes=1, script=None, **options):
    """Real processes of train.py, connected as torchrun connects them -> their Popens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(processes):
        world = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        environment = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE), PYTHONUNBUFFERED="1")
        environment |= {name: str(value) for name, value in world.items()} if processes > 1 else {}
        command = [sys.executable, *(["-c", script] if script else [HERE / "train.py"]), *map(str, flags)]
        options = dict(stderr=subprocess.PIPE, text=True, encoding="utf-8") | options
        started.append(subprocess.Popen(command, env=environment, **options))
    return started


def finish(started):
    """-> exit statuses and what each has said. None outlives its test."""
    try:
        said = [process.communicate(timeout=90)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], said


@pytest.mark.parametrize("norm, processes, accumulate", [("post", 1, 3), ("pre", 2, 2)])
def test_killed_at_random_moments_a_run_ends_as_if_it_never_was(corpus, tmp_path, norm, processes, accumulate):
    """SIGKILL in the middle of updates, saves and validations, over three epochs and more, dropout on: the same
    weights, optimizer and metrics.jsonl, bit for bit."""
    flags = ["--data", corpus, *TINY, "--norm", norm, "--dropout", "0.2", "--accumulate", accumulate, "--steps", "60"]
    flags += ["--eval-every", "9", "--save-every", "2", "--log-every", "1", "--patience", "50", "--average", "2"]
    assert finish(start(*flags, "--out", tmp_path / "whole", processes=processes))[0] == [0] * processes
    rng, kills = random.Random(processes), 0
    begin = [*flags, "--out", tmp_path / "parts"]
    for at in (2, 12, 25, 33):
        running = start(*begin, processes=processes)
        for line in running[0].stderr:
            if line.startswith("step ") and int(re.match(r"step (\d+)", line)[1]) >= at:
                break
        time.sleep(rng.random() * 0.03)
        running[rng.randrange(processes)].kill()
        statuses, said = finish(running)
        kills += -signal.SIGKILL in statuses
        assert processes == 1 or statuses.count(-signal.SIGKILL) == 1  # the other has noticed, and says so in one line
        assert not any("Traceback" in text for text in said)
        begin = ["--resume", tmp_path / "parts"]
    assert kills >= 3  # or nothing was tested
    assert finish(start("--resume", tmp_path / "parts", processes=processes))[0] == [0] * processes
    assert_same_training(tmp_path / "whole", tmp_path / "parts")
    assert all_rows_of(tmp_path / "whole") == all_rows_of(tmp_path / "parts")
    a, b = (weights_of(tmp_path / name / "best.pt") for name in ("whole", "parts"))
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def all_rows_of(folder):
    """The lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("tokens_per_second", "memory_mb", "minutes", "seconds")}
        for row in rows
    ]


def test_a_run_killed_before_its_first_save_starts_again(corpus, tmp_path, capfd):
    run = tmp_path / "run"
    assert train.main(["--data", str(corpus), *TINY, "--steps", "2", "--out", str(run)]) == 0
    for path in run.glob("*.pt"):
        path.unlink()
    assert train.main(["--resume", str(run)]) == 0
    assert "no checkpoint yet: starting from the beginning" in capfd.readouterr().err
    (run / "last.pt").unlink()
    (run / "previous.pt").unlink()
    assert train.main(["--resume", str(run)]) == 1  # it has a best.pt that would be lost
    assert "last.pt: No such file" in capfd.readouterr().err and (run / "best.pt").exists()


def test_a_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path, tokenizer):
    """SIGKILL at any moment of a save: last.pt or previous.pt is whole, and at most one save older."""
    script = (
        "import sys, torch, transformer as tf\n"
        "model = tf.Transformer(tf.Config(420, 32, 2, 48, 1, 0.0))\n"
        "t = tf.Tokenizer(open(sys.argv[1], 'rb').read())\n"
        "for i in range(100000):\n"
        "    names = [sys.argv[2] + name for name in ('/last.pt', '/previous.pt')]\n"
        "    tf.save_checkpoint(names[0], model, t, names[1], i=i, pad=torch.ones(250000))\n"
        "    print(i, flush=True)\n"
    )
    (tmp_path / "t").write_bytes(tf.Tokenizer.train(TEXT, 400).model_bytes)
    rng = random.Random(0)
    for _ in range(3):
        [process] = start(tmp_path / "t", tmp_path, script=script, stdout=subprocess.PIPE)
        for _ in range(5):
            newest = int(process.stdout.readline())
        time.sleep(rng.random() * 0.05)
        process.kill()
        newest = max([newest, *map(int, process.communicate()[0].split())])
        found = []
        for name in ("last.pt", "previous.pt"):
            if (tmp_path / name).exists():
                found.append(tf.load_checkpoint(tmp_path / name)[2]["i"])
        assert found[0] >= newest and found == sorted(found, reverse=True)


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(corpus, tmp_path, capfd):
    flags = ["--data", str(corpus), *TINY, "--dropout", "0.2", "--log-every", "1", "--save-every", "2"]
    assert train.main([*flags, "--steps", "8", "--out", str(tmp_path / "whole")]) == 0
    run = tmp_path / "run"
    assert train.main([*flags, "--steps", "5", "--out", str(run)]) == 0
    last, previous = ((run / name).read_bytes() for name in ("last.pt", "previous.pt"))
    flipped = bytearray(last)
    flipped[len(last) // 2 : len(last) // 2 + 100] = bytes(100)  # more than the padding between two tensors
    for damaged in (bytes(flipped), last[: len(last) // 3], b""):
        (run / "last.pt").write_bytes(damaged)
        (run / "previous.pt").write_bytes(previous)
        capfd.readouterr()
        assert train.main(["--resume", str(run), "--steps", "8"]) == 0
        said = capfd.readouterr().err
        assert "last.pt is not a checkpoint" in said and "going on from previous.pt instead" in said
        assert_same_training(tmp_path / "whole", run)
        assert rows_of(tmp_path / "whole") == rows_of(run)
        for name in ("last.pt", "previous.pt"):
            tf.load_checkpoint(run / name)  # the damaged one has not taken the place of the good one
    (run / "last.pt").unlink()  # what a kill between two renamings leaves
    assert train.main(["--resume", str(run), "--steps", "9"]) == 0
    for name in ("last.pt", "previous.pt"):
        (run / name).write_bytes(b"nothing")
    assert train.main(["--resume", str(run)]) == 1
    assert "last.pt is not a checkpoint" in capfd.readouterr().err.strip().split("\n")[-1]


@pytest.mark.skipif(train.fcntl is None, reason="no locks here")
def test_two_runs_in_one_folder_are_refused(corpus, tmp_path, capfd):
    flags = ["--data", str(corpus), *TINY, "--steps", "2", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0
    with train.locked(tmp_path / "run" / ".lock", wait=False):
        assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 1
        assert "another process trains in" in capfd.readouterr().err
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0


def test_saves_by_the_clock(corpus, tmp_path, monkeypatch):
    saved = []
    plain = train.Run.save
    monkeypatch.setattr(
        train.Run, "save", lambda run, name, **k: saved.append((name, run.state["step"])) or plain(run, name, **k)
    )
    flags = ["--data", str(corpus), *TINY, "--steps", "4", "--eval-every", "4"]
    assert train.main([*flags, "--save-every", "0.00000001m", "--out", str(tmp_path / "a")]) == 0
    assert [step for name, step in saved if name == "last.pt"] == [0, 1, 2, 3, 4, 4]
    saved.clear()
    assert train.main([*flags, "--save-every", "10m", "--out", str(tmp_path / "b")]) == 0
    assert [step for name, step in saved if name == "last.pt"] == [0, 4, 4]
    saved.clear()
    assert train.main([*flags, "--steps", "7", "--save-every", "3", "--out", str(tmp_path / "c")]) == 0
    assert [step for name, step in saved if name == "last.pt"] == [0, 3, 4, 6, 7, 7]


def test_what_a_resume_may_change(corpus, tmp_path, capfd):
    """Length and care freely; what makes another run of it by --allow-changes, aloud; what it is, never."""
    run = str(tmp_path / "run")
    assert train.main(["--data", str(corpus), *TINY, "--steps", "12", "--out", run]) == 0
    place = weights_of(tmp_path / "run" / "last.pt")["state"]
    for change in (["--clip", "0.5"], ["--batch-tokens", "200"], ["--precision", "bf16"], ["--threads", "1"]):
        capfd.readouterr()
        assert train.main(["--resume", run, *change]) == 1
        assert f"{change[0]} was" in capfd.readouterr().err
    for change in (["--vocab-size", "500"], ["--d-model", "64"], ["--norm", "pre"], ["--max-ratio", "9"]):
        assert train.main(["--resume", run, *change, "--allow-changes"]) == 1
        assert "cannot change on --resume" in capfd.readouterr().err
    assert (
        train.main(["--resume", run, "--steps", "13", "--clip", "0.5", "--batch-tokens", "600", "--allow-changes"]) == 0
    )
    said, state = capfd.readouterr().err, weights_of(tmp_path / "run" / "last.pt")["state"]
    assert "changed: --clip was 1.0, is 0.5" in said and "changed: --batch-tokens was 300, is 600" in said
    assert state["batches_an_epoch"] < 0.7 * place["batches_an_epoch"]  # and the place in the epoch is the same
    epochs = [s["batches"] / s["batches_an_epoch"] for s in (place, state)]
    assert epochs[1] - epochs[0] == pytest.approx(1 / state["batches_an_epoch"], abs=0.6 / state["batches_an_epoch"])
    assert train.main(["--allow-changes"]) == 1


def test_the_second_signal_ends_at_once(corpus, tmp_path):
    """With the checkpoint as it was; nothing else is left running."""
    run = tmp_path / "run"
    flags = ["--data", corpus, *TINY, "--steps", "100000", "--eval-every", "2", "--log-every", "1", "--out", run]
    script = (
        "import sys, time, train\n"
        "plain = train.tf.translate\n"
        "def slow(*a, **k):\n    time.sleep(60 if run_once else 0)\n    run_once.append(1)\n    return plain(*a, **k)\n"
        "run_once = []\ntrain.tf.translate = slow\nsys.exit(train.main(sys.argv[1:]))"
    )
    [process] = start(*flags, script=script)
    for line in process.stderr:
        if line.startswith("step 4/"):  # the second validation hangs
            break
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert "once more to stop at once" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert weights_of(run / "last.pt")["state"]["step"] == 2


def prepared_run(corpus, tmp_path, *flags, precision=torch.float64):
    """A run without dropout, ready for its first update, in float64."""
    given = train.parse_arguments(
        ["--data", str(corpus), *TINY, "--dropout", "0", *flags, "--out", str(tmp_path / "x")]
    )
    run = train.Run(train.settings_of(given), train.Ranks("cpu"), dry_run=True)
    run.prepare(None)
    run.model.to(precision).train()
    return run


def gradients(run):
    out = [p.grad.clone() for p in run.model.parameters()]
    run.optimizer.zero_grad()
    return out


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_too_large_for_memory_is_cut_and_gives_the_same_gradient(corpus, tmp_path, where, monkeypatch, capfd):
    """The error comes before anything, or when half the gradient is already there: it must not count twice."""
    run = prepared_run(corpus, tmp_path)
    batches = run.sampler.epoch(0)[:3]
    whole = run.gradient(batches, 100, step=1)
    expected = gradients(run)
    plain, rows = tf.training_loss, max(map(len, batches)) // 2

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("can't allocate memory: you tried to allocate 99 bytes")

    def small_memory(model, src, *rest):
        sums = plain(model, src, *rest)
        if len(src) > rows and where == "forward":
            raise RuntimeError("CUDA out of memory. Tried to allocate 99 GiB")
        if len(src) > rows:  # the decoder's gradients are complete when the encoder's input is reached
            table = model.tgt_embedding.table
            sums.smoothed = sums.smoothed + 0 * Fails.apply(table[:1]).sum()
        return sums

    monkeypatch.setattr(tf, "training_loss", small_memory)
    capfd.readouterr()
    in_parts = run.gradient(batches, 100, step=1)
    assert in_parts == pytest.approx(whole, rel=1e-12)
    for a, b in zip(gradients(run), expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    said = capfd.readouterr().err
    assert re.search(r"out of memory with a batch of \d+ pairs of up to \d+ and \d+ tokens: .*--batch-tokens", said)
    run.gradient(batches, 100, step=1)
    assert "out of memory" not in capfd.readouterr().err  # it has learned what is too large
    rows = 0
    with pytest.raises(MemoryError, match="a batch of 1 pairs of up to .*--batch-tokens"):
        run.gradient(batches, 100, step=1)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit on memory")
def test_a_real_limit_on_memory_is_survived(corpus, tmp_path):
    script = (
        "import resource, sys, train\n"
        "plain = train.Run.train\n"
        "def limited(run):\n"
        "    pages = int(open('/proc/self/statm').read().split()[0])\n"
        "    limit = pages * 4096 + 120 * 2**20\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (limit, -1))\n"
        "    return plain(run)\n"
        "train.Run.train = limited\n"
        "validate = train.Run.validate\n"
        "def unlimited(run, *a, **k):\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "    return validate(run, *a, **k)\n"
        "train.Run.validate = unlimited\n"
        "train.keep_freed_memory = lambda: None\n"
        "sys.exit(train.main(sys.argv[1:]))"
    )
    flags = ["--data", corpus, *TINY, "--batch-tokens", "8000", "--d-model", "256", "--d-ff", "2048", "--steps", "2"]
    statuses, [said] = finish(start(*flags, "--out", tmp_path / "run", script=script))
    assert statuses == [0] and "cut in two from now on" in said, said


def test_fp16_scales_unscales_then_clips(corpus, tmp_path):
    """The gradient's length and the weights are those of float32 to half precision; an overflow costs the update and
    halves the scale; a resume goes on with the scale."""
    runs = {
        p: prepared_run(corpus, tmp_path, "--precision", p, "--clip", "0.1", precision=torch.float32)
        for p in ("fp32", "fp16")
    }
    norms = {}
    for name, run in runs.items():
        norms[name] = [run.update()[3] for _ in range(3)]
    assert runs["fp16"].scaler.get_scale() == 2.0**16 and runs["fp32"].scaler.get_scale() == 1.0
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)
    for p in runs["fp16"].model.parameters():
        assert p.dtype == torch.float32
    run = runs["fp16"]
    before = [p.clone() for p in run.model.parameters()]
    run.scaler.update(2.0**60)
    assert run.update() is None and run.state["step"] == 3
    assert all(map(torch.equal, before, run.model.parameters()))
    assert run.scaler.get_scale() == 2.0**59
    flags = ["--data", str(corpus), *TINY, "--precision", "fp16", "--log-every", "1"]
    assert train.main([*flags, "--steps", "6", "--out", str(tmp_path / "whole")]) == 0
    assert train.main([*flags, "--steps", "3", "--out", str(tmp_path / "parts")]) == 0
    assert train.main(["--resume", str(tmp_path / "parts"), "--steps", "6"]) == 0
    assert_same_training(tmp_path / "whole", tmp_path / "parts")
    assert weights_of(tmp_path / "parts" / "last.pt")["scaler"]["_growth_tracker"] == 6


def test_spikes_are_seen_against_the_usual_length(corpus, tmp_path, capfd):
    run = prepared_run(corpus, tmp_path)
    for norm in [1.0] * 19 + [50.0, 2.0, 9.9, 30.0]:
        run.watch(norm)
    said = capfd.readouterr().err
    assert run.state["spikes"] == 1 and "gradient of length 30" in said and "where 1 is usual" in said
    for _ in range(300):
        run.watch(40.0)
    assert len(run.state["norms"]) == 100 and run.state["spikes"] < 100  # what is usual has changed


def test_the_largest_batch_is_tried_first(corpus, tmp_path, capfd):
    run = prepared_run(corpus, tmp_path)
    before, seen = [p.clone() for p in run.model.parameters()], []
    plain = run.backward
    run.backward = lambda batch, tokens, last: seen.append(batch) or plain(batch, tokens, last)
    run.try_largest_batch()
    sizes = [
        len(b) * max(run.sampler.src_lengths[b].max(), run.sampler.tgt_lengths[b].max()) for b in run.sampler.epoch(3)
    ]
    largest = len(seen[0]) * max(run.sampler.src_lengths[seen[0]].max(), run.sampler.tgt_lengths[seen[0]].max())
    assert len(seen) == 1 and largest == max(sizes) and "the largest batch fits" in capfd.readouterr().err
    assert all(p.grad is None for p in run.model.parameters()) and all(map(torch.equal, before, run.model.parameters()))


FLOAT64 = "import sys, torch, train\ntorch.set_default_dtype(torch.float64)\nsys.exit(train.main(sys.argv[1:]))"


def test_two_processes_equal_one_with_the_same_batches(corpus, tmp_path):
    """In float64, without dropout: the same weights to 1e-9, whatever the token counts of the ranks' batches; the same
    pairs in an epoch; the same validation scores; one folder, written once."""
    flags = ["--data", corpus, *TINY, "--dropout", "0", "--steps", "18", "--eval-every", "6", "--log-every", "1"]
    two = start(*flags, "--accumulate", "2", "--out", tmp_path / "two", processes=2, script=FLOAT64)
    assert finish(start(*flags, "--accumulate", "4", "--out", tmp_path / "one", script=FLOAT64))[0] == [0]
    statuses, said = finish(two)
    assert statuses == [0, 0] and said[1].strip() == ""
    one, two = (weights_of(tmp_path / name / "last.pt") for name in ("one", "two"))
    for name, p in one["model"].items():
        assert p.dtype == torch.float64
        torch.testing.assert_close(two["model"][name], p, rtol=0, atol=1e-9)
    assert one["state"]["batches"] == two["state"]["batches"] == 72
    for a, b in zip(*(all_rows_of(tmp_path / name) for name in ("one", "two"))):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert b[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
    assert len(list(tmp_path.glob("two/last.pt"))) == 1 and json.loads((tmp_path / "leaderboard.json").read_text())


def test_each_pair_comes_once_an_epoch_over_all_processes(corpus, tmp_path):
    run = prepared_run(corpus, tmp_path)
    for size in (2, 3):
        seen = [[], []]
        for rank in range(size):
            run.ranks = SimpleNamespace(rank=rank, size=size, total=lambda values: values)
            run.batches, run.state["batches"], epochs = size, 0, 2 * len(run.sampler)
            run.gradient = lambda batches, tokens, step: seen[0].extend(batches) or (1.0, 1.0)
            while run.state["batches"] < epochs:
                run.update()
        pairs = np.concatenate(seen[0])
        extra = run.state["batches"] - epochs  # of the third epoch, where an update reaches over its border
        counts = np.bincount(pairs, minlength=len(run.train_rows[0]))
        assert counts.min() == 2 and (extra or counts.max() == 2) and counts.max() <= 3


def test_a_signal_to_one_process_stops_all_after_the_same_step(corpus, tmp_path):
    flags = ["--data", corpus, *TINY, "--steps", "100000", "--eval-every", "50", "--log-every", "1"]
    for number in (signal.SIGTERM, signal.SIGINT):
        run = tmp_path / number.name
        processes = start(*flags, "--save-every", "100000", "--out", run, processes=2)
        for line in processes[0].stderr:
            if line.startswith("step 3/"):
                break
        processes[1].send_signal(number)
        statuses, said = finish(processes)
        assert statuses == [128 + number] * 2 and "go on with: python train.py --resume" in said[0]
        assert not any("Traceback" in text for text in said)
        assert weights_of(run / "last.pt")["state"]["step"] == all_rows_of(run)[-1]["step"]


def test_torchrun_starts_as_many_as_it_is_told(corpus, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", HERE / "train.py"]
    flags = ["--data", corpus, *TINY, "--steps", "3", "--out", tmp_path / "run"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0 and "2 processes" in done.stderr and "best 3: nll" in done.stderr, done.stderr
    assert weights_of(tmp_path / "run" / "last.pt")["flags"]["processes"] == 2
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "4"]) == 1  # another run than with two
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "4", "--allow-changes"]) == 0


def test_a_save_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    """The file's bytes, then its name, then the folder: in another order a power cut leaves half a checkpoint."""
    done = []
    for name in ("fsync", "replace"):
        plain = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, plain=plain: done.append(name) or plain(*a))
    tf.write_atomically(tmp_path / "a", lambda path: path.write_text("x"), previous=tmp_path / "b")
    assert done == ["fsync", "replace", "fsync"]
    tf.write_atomically(tmp_path / "a", lambda path: path.write_text("y"), previous=tmp_path / "b")
    assert done[3:] == ["fsync", "replace", "replace", "fsync"] and (tmp_path / "b").read_text() == "x"


def test_a_damaged_last_checkpoint_never_becomes_the_previous_one(corpus, tmp_path):
    run = tmp_path / "run"
    assert train.main(["--data", str(corpus), *TINY, "--steps", "4", "--save-every", "2", "--out", str(run)]) == 0
    (run / "last.pt").write_bytes(b"junk")
    names = []
    with pytest.MonkeyPatch.context() as patch:
        plain = tf.save_checkpoint
        patch.setattr(
            tf,
            "save_checkpoint",
            lambda *a, **k: plain(*a, **k) or names.append(tf.load_checkpoint(run / "previous.pt")),
        )
        assert train.main(["--resume", str(run), "--steps", "5"]) == 0
    assert len(names) > 1  # whole after the first save, and after every other


def test_the_whole_state_comes_back(corpus, tmp_path):
    flags = [
        "--data",
        str(corpus),
        *TINY,
        "--log-every",
        "7",
        "--save-every",
        "3",
        "--patience",
        "9",
        "--eval-every",
        "4",
    ]
    assert train.main([*flags, "--steps", "16", "--out", str(tmp_path / "whole")]) == 0
    given = [*flags, "--steps", "16", "--out", str(tmp_path / "parts")]
    with pytest.MonkeyPatch.context() as patch:
        plain = train.Run.update

        def update(run):
            if run.state["step"] == 11:
                raise ValueError("enough")
            return plain(run)

        patch.setattr(train.Run, "update", update)
        assert train.main(given) == 1
    assert weights_of(tmp_path / "parts" / "last.pt")["state"]["step"] == 9
    assert train.main(["--resume", str(tmp_path / "parts")]) == 0
    a, b = (weights_of(tmp_path / name / "last.pt")["state"] for name in ("whole", "parts"))
    assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert len(a["norms"]) == 16 and a["stale"] + (a["best"] is not None) > 0
    assert all_rows_of(tmp_path / "whole") == all_rows_of(tmp_path / "parts")


def test_a_run_killed_at_its_end_is_brought_to_it(corpus, tmp_path, monkeypatch, capfd):
    """Killed in the average's validation, the best one's, or before it is published: done again, and counted once."""
    flags = ["--data", str(corpus), *TINY, "--steps", "6", "--eval-every", "2", "--average", "2"]
    assert train.main([*flags, "--out", str(tmp_path / "a" / "whole")]) == 0
    plain = train.Run.validate
    for kind in ("average", "best"):
        for moment in ("before", "after"):

            def validate(run, kind_="valid", *rest, **more):
                if kind_ == kind and moment == "before":
                    raise KeyboardInterrupt
                scores = plain(run, kind_, *rest, **more)
                if kind_ == kind:
                    raise KeyboardInterrupt
                return scores

            folder = tmp_path / f"{kind}-{moment}"
            with monkeypatch.context() as patch:
                patch.setattr(train.Run, "validate", validate)
                assert train.main([*flags, "--out", str(folder / "whole")]) == 130
            assert not weights_of(folder / "whole" / "last.pt")["state"]["finished"]
            assert train.main(["--resume", str(folder / "whole")]) == 0
            assert all_rows_of(folder / "whole") == all_rows_of(tmp_path / "a" / "whole")
            assert (folder / "leaderboard.json").exists() and (folder / "best.pt").exists()
            assert_same_training(folder / "whole", tmp_path / "a" / "whole")
    monkeypatch.undo()
    step = tmp_path / "best-after" / "whole" / "step-00000004.pt"
    step.write_bytes(b"junk")
    (step.parent / "step-mine.pt").write_bytes(b"junk")
    (step.parent / "metrics.jsonl").open("a").write('5\nnull\n{"a": 1}\n{"step": "x"}\n{"half')
    capfd.readouterr()
    assert train.main(["--resume", str(step.parent), "--steps", "7", "--average", "3"]) == 0  # it is left out
    assert "step-00000004.pt is not a checkpoint" in capfd.readouterr().err and (step.parent / "step-mine.pt").exists()


def test_a_signal_before_a_validation_leaves_it_for_later(corpus, tmp_path, monkeypatch):
    flags = ["--data", str(corpus), *TINY, "--eval-every", "2", "--log-every", "1"]
    assert train.main([*flags, "--steps", "5", "--out", str(tmp_path / "whole")]) == 0
    plain = train.Run.update

    def update(run):
        if run.state["step"] == 1:
            run.signal = signal.SIGTERM
        return plain(run)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "update", update)
        with pytest.raises(SystemExit) as stop:
            train.main([*flags, "--steps", "5", "--out", str(tmp_path / "parts")])
    assert stop.value.code == 143
    assert weights_of(tmp_path / "parts" / "last.pt")["state"]["due"] and not (tmp_path / "parts" / "best.pt").exists()
    assert train.main(["--resume", str(tmp_path / "parts")]) == 0
    assert all_rows_of(tmp_path / "parts") == all_rows_of(tmp_path / "whole")
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


def test_an_ignored_signal_stays_ignored(corpus, tmp_path):
    """nohup: a hang-up does not stop the run."""
    flags = [
        "--data",
        corpus,
        *TINY,
        "--steps",
        "200",
        "--eval-every",
        "200",
        "--log-every",
        "1",
        "--out",
        tmp_path / "run",
    ]
    script = (
        "import signal, sys, train\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nsys.exit(train.main(sys.argv[1:]))"
    )
    [process] = start(*flags, script=script)
    for line in process.stderr:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGHUP)
    statuses, _ = finish([process])
    assert statuses == [0]


def test_a_resume_changes_what_it_says_it_changes(corpus, tmp_path, capfd):
    run = str(tmp_path / "run")
    assert train.main(["--data", str(corpus), *TINY, "--epochs", "0.5", "--accumulate", "2", "--out", run]) == 0
    steps = weights_of(tmp_path / "run" / "last.pt")["state"]["step"]
    assert (
        train.main(
            [
                "--resume",
                run,
                "--epochs",
                "1",
                "--dropout",
                "0.5",
                "--precision",
                "fp16",
                "--accumulate",
                "1",
                "--allow-changes",
            ]
        )
        == 0
    )
    last = weights_of(tmp_path / "run" / "last.pt")
    assert last["config"]["dropout"] == 0.5 and "scale" in last["scaler"]
    state = last["state"]  # the whole epoch, and not more
    assert state["batches"] == state["batches_an_epoch"] and state["step"] == steps + state["batches"] - 2 * steps
    best = (tmp_path / "run" / "best.pt").read_bytes()
    assert train.main(["--resume", run, "--steps", str(state["step"] + 1), "--epochs", "9"]) == 1
    capfd.readouterr()
    assert train.main(["--resume", run, "--epochs", "1.2", "--best-by", "nll", "--allow-changes"]) == 0
    last = weights_of(tmp_path / "run" / "last.pt")["state"]
    assert last["best"] < 0 and last["stale"] == 0 and (tmp_path / "run" / "best.pt").read_bytes() != best
    assert train.main(["--resume", run, "--epochs", "2", "--seed", "9", "--allow-changes"]) == 1
    assert "--seed has changed, and it splits off validation" in capfd.readouterr().err


def test_a_folder_with_checkpoints_is_no_place_for_a_new_run(corpus, tmp_path, capfd):
    run = tmp_path / "run"
    run.mkdir()
    for name in ("best.pt", "step-00000007.pt", "last.pt"):
        (run / name).write_bytes(b"somebody's")
        assert train.main(["--data", str(corpus), *TINY, "--steps", "1", "--out", str(run)]) == 1
        assert "holds a run already" in capfd.readouterr().err and (run / name).read_bytes() == b"somebody's"
        (run / name).unlink()


def test_a_start_after_a_kill_in_preparing_does_not_wait_for_itself(tmp_path):
    first = prepared(tmp_path, data=clean_pairs(60), val_pairs=5)
    os.rename(first.folder, first.folder.with_suffix(".tmp"))
    said = []
    settings = train.settings_of(dict(data=[str(tmp_path / "pairs.tsv")], val_pairs=5, vocab_size=400))
    thread = threading.Thread(target=lambda: said.append(train.Corpus(settings, tmp_path / "cache", 100)), daemon=True)
    thread.start()
    thread.join(30)
    assert said and said[0].fingerprint == first.fingerprint


def test_each_process_draws_its_own_dropout_and_synchronises_once_an_update(corpus, tmp_path):
    """Same batch, another rank, another draw; and of an update's micro-batches only the last one's backward speaks."""
    given = train.parse_arguments(["--data", str(corpus), *TINY, "--dropout", "0.3", "--out", str(tmp_path / "x")])
    run = train.Run(train.settings_of(given), train.Ranks("cpu"), dry_run=True)
    run.prepare(None)
    run.model.train()
    batches, losses = run.sampler.epoch(0)[:2], []
    for rank in (0, 1, 0):
        run.ranks.rank = rank
        losses.append(run.gradient(batches, 100, step=1)[0])
    assert losses[0] == losses[2] != losses[1]
    run.ranks.size, plain, spoke = 2, run.objective, []

    class Watched(torch.nn.Module):
        def forward(self, *batch):
            spoke.append(True)
            return plain(*batch)

        @contextlib.contextmanager
        def no_sync(self):
            spoke.append("quietly")
            yield

    run.objective = Watched()
    run.gradient([*batches, batches[0]], 100, step=1)
    assert spoke == ["quietly", True, "quietly", True, True]


def test_three_processes_go_on_as_they_would_have(corpus, tmp_path):
    """With more than two, the order of a sum matters: it must be the same after a resume."""
    flags = ["--data", corpus, *TINY, "--dropout", "0.2", "--log-every", "1", "--eval-every", "50", "--save-every", "3"]
    whole = start(*flags, "--steps", "8", "--out", tmp_path / "whole", processes=3)
    assert finish(whole)[0] == [0] * 3
    assert finish(start(*flags, "--steps", "3", "--out", tmp_path / "parts", processes=3))[0] == [0] * 3
    assert finish(start("--resume", tmp_path / "parts", "--steps", "8", processes=3))[0] == [0] * 3
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


def test_tensorboard_gets_the_numbers_if_it_is_there(corpus, tmp_path, monkeypatch, capfd):
    flags = ["--data", str(corpus), *TINY, "--steps", "2", "--log-every", "1", "--tensorboard"]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train.main([*flags, "--out", str(tmp_path / "a")]) == 1
    assert "pip install tensorboard" in capfd.readouterr().err
    written = []

    class Writer(contextlib.ExitStack):
        def __init__(self, folder):
            super().__init__()

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    assert train.main([*flags, "--out", str(tmp_path / "b")]) == 0
    assert {("train/loss", 1), ("train/loss", 2), ("valid/bleu", 2), ("train/grad_norm", 1)} <= set(written)


# --- Data and flags ------------------------------------------------------------------------------------------------


def test_a_resume_finds_its_data_from_another_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus.parent)
    assert train.main(["--data", corpus.name, *TINY, "--steps", "2", "--out", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path)
    assert train.main(["--resume", "run", "--steps", "3"]) == 0
    moved = tmp_path / "moved.tsv"
    moved.write_bytes(corpus.read_bytes())
    assert train.main(["--resume", "run", "--steps", "4", "--data", "moved.tsv"]) == 0
    moved.write_text("other data\tঅন্য তথ্য\n" + corpus.read_text("utf-8"), "utf-8")
    assert train.main(["--resume", "run", "--steps", "5"]) == 1


def prepared(folder, limit=100, tokenizer=None, **given):
    """The corpus that these flags give. A list of pairs as `data` is written to a file first."""
    if "data" in given and not isinstance(given["data"][0], str):
        path = folder / "pairs.tsv"
        path.write_text("".join(f"{src}\t{tgt}\n" for src, tgt in given["data"]), "utf-8")
        given["data"] = [str(path)]
    settings = train.settings_of(dict(vocab_size=400) | given)
    return train.Corpus(settings, given.get("cache", folder / "cache"), limit, tokenizer)


def read(*paths, **given):
    """What is read of these files: two are aligned, one holds pairs."""
    names = [str(path) for path in paths]
    files = dict(data=names) if len(paths) == 1 else dict(src=names[:1], tgt=names[1:])
    return list(train.read_pairs(train.settings_of(files | given)))


def training_text(corpus):
    sides = (corpus.tokenizer.source, corpus.tokenizer), corpus.train
    return list(zip(*([t.decode(rows[i].tolist()) for i in range(len(rows))] for t, rows in zip(*sides))))


def dropped(corpus):
    return {rule: n for rule, n in corpus.dropped.items() if n}


WORDS = "red green blue black white small large young old new cat dog bird fish tree house river road hill town".split()


def sentences(n, seed=0, words=WORDS):
    """n different lines of 4 to 8 words."""
    rng, lines = random.Random(seed), {}
    while len(lines) < n:
        lines[" ".join(rng.choices(words, k=rng.randrange(4, 9)))] = None
    return list(lines)


def clean_pairs(n, seed=0):
    """Pairs no rule finds fault with; the target's words are the source's, spelled in Bengali letters."""
    letters = str.maketrans("abcdefghijklmnopqrstuvwxyz", "অআইঈউঊঋএঐওঔকখগঘঙচছজঝঞটঠডঢণ")
    return [(line, line.translate(letters)) for line in sentences(n, seed)]


def test_only_lf_and_crlf_end_a_line(tmp_path):
    src = ["one", "two\rtoo", "a\u2028b\u2029c\u0085d\x0ce\x0bf\x1cg", "four", "", "six"]
    tgt = [f"t{i}" for i in range(6)]
    a, b = tmp_path / "a.en", tmp_path / "b.bn"
    a.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(src).encode())  # BOM, CRLF, no last newline
    b.write_bytes(("\n".join(tgt) + "\n").encode())
    assert read(a, b) == list(zip(src, tgt))
    tsv = tmp_path / "c.tsv"
    tsv.write_bytes("".join(f"{x}\t{y}\r\n" for x, y in zip(src, tgt)).encode())
    assert read(tsv) == list(zip(src, tgt))
    assert tf.normalize(src[1]) == "two too" and tf.normalize(src[2]) == "a b c d e f g"


def test_a_blank_line_costs_one_pair(tmp_path):
    pairs = clean_pairs(1000)
    pairs[1] = ("", "")
    corpus = prepared(tmp_path, data=pairs, val_pairs=10, vocab_size=500)
    assert corpus.read == 1000 and dropped(corpus) == {"empty side": 1} and len(corpus.train[0]) == 989


def test_unequal_files_are_named_with_their_counts(tmp_path):
    for n in (5, 6):
        (tmp_path / str(n)).write_text("x\n" * n)
    with pytest.raises(ValueError, match="5 has 5 lines and .*6 has 6"):
        read(tmp_path / "5", tmp_path / "6")
    with pytest.raises(ValueError, match="6 has 6 lines and .*5 has 5"):
        read(tmp_path / "6", tmp_path / "5")


@pytest.mark.parametrize(
    "name, text, flags, expected",
    [
        ("a.tsv", "x y\tp q\nz\tr", {}, 2),
        ("a.tsv", "x y\tp q\t0.5\thttp\nz\tr\t\n", {}, 2),  # further columns
        ("a.tsv", 'x "y\tp q"\nz\tr\n', {}, [('x "y', 'p q"'), ("z", "r")]),  # a quote is a character
        ("a.tsv", "bn\ten\np q\tx y\nr\tz\n", dict(src_field="en", tgt_field="bn"), 2),
        ("a.tsv", "x y\tp q\nonly one\nz\tr\n", {}, "a.tsv, line 2: 1 column(s) where 2"),
        ("a.tsv", "x y\tp q\nonly one\nz\tr\n", dict(skip_bad_lines=True), [("x y", "p q"), None, ("z", "r")]),
        ("a.csv", "en,bn\nx y,p q\nz,r\n", {}, 2),
        ("a.csv", "id,score,en,bn\n1,0.5,x y,p q\n2,1,z,r\n", dict(src_field="en", tgt_field="bn"), 2),
        ("a.csv", "x y,p q\nz,r\n", dict(no_header=True), 2),
        ("a.csv", 'en,bn\n"x, ""y""\n z",p\rq\n', {}, [('x, "y"\n z', "p q")]),
        ("a.csv", 'en,bn\nx y,p q\n"z,r\nx,y\n', {}, "a.csv, line 3: a quote opens and never closes"),
        ("a.csv", 'en,bn\nx y,p q\n"z"z,r\nx,y\n', dict(skip_bad_lines=True), [("x y", "p q"), None, ("x", "y")]),
        ("a.csv", "en,bn\nx y,p q\nz\n", {}, "a.csv, line 3: 1 column(s) where 2"),
        ("a.csv", "id,en,xx,bn\n1,a,b,c\n", {}, "say --src-field and --tgt-field; its columns are id, en, xx, bn"),
        ("a.jsonl", '{"en":"x y","bn":"p q"}\n{"en":"z","bn":"r","more":[1]}\n', {}, 2),
        ("a.jsonl", '{"id":7,"translation":{"en":"x y","bn":"p q"}}\n\n{"translation":{"en":"z","bn":"r"}}\n', {}, 2),
        ("a.jsonl", '{"src":null,"tgt":"a"}\n{"idx":2,"src":5,"tgt":"b"}\n', {}, [("", "a"), ("5", "b")]),
        ("a.jsonl", '{"en":"x","bn":"y"}\n{"en":"z",\n', {}, "a.jsonl, line 2: "),
        ("a.jsonl", '{"en":"x","bn":"y"}\n{}\n', {}, "a.jsonl, line 2: it has no field 'en'"),
        ("a.jsonl", '{"en":"x","bn":"y"}\n{"translation":{}}\n', dict(skip_bad_lines=True), [("x", "y"), None]),
        ("a.jsonl", '{"en":"x","bn":"y"}\n{"en":"z"}\n', {}, "a.jsonl, line 2: it has no field 'bn'"),
        ("a.jsonl", '{"en":"x","bn":"\\ud800"}\n', {}, "a.jsonl, line 1: half a character"),
        ("a.jsonl", "5\n" * 1200 + '{"en":"x","bn":"y"}', dict(skip_bad_lines=True), [None] * 1200 + [("x", "y")]),
        ("a.jsonl", "5\n" * 3, dict(skip_bad_lines=True), [None] * 3),
        ("a.csv", '"en"x,bn\nx,y\n', {}, "a.csv, line 1: "),
        ("a.csv", '"en,bn\nx,y\n', {}, "a.csv, line 1: a quote opens and never closes"),
        ("a.csv", "en,bn,bn\nx,y,z\n", dict(src_field="en", tgt_field="bn"), "more than one column 'bn'"),
        ("a.jsonl", '{"en":"x","bn":"y"}\n[1]\n{"en":"z",', dict(skip_bad_lines=True), [("x", "y"), None, None]),
        ("a.jsonl", '{"en":"x","bn":["y"]}\n', dict(src_field="en", tgt_field="bn"), "line 1: a list where text"),
        ("a.jsonl", '{"en":"x","bn":"y"}\n', dict(src_field="en", tgt_field="fr"), "no column 'fr'; it has en, bn"),
    ],
)
def test_files_of_pairs(tmp_path, name, text, flags, expected):
    (tmp_path / name).write_text(text, "utf-8", newline="")
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=re.escape(expected).replace("say", ".*say", 1)):
            read(tmp_path / name, **flags)
    else:
        assert read(tmp_path / name, **flags) == ([("x y", "p q"), ("z", "r")] if expected == 2 else expected)


def test_what_looks_like_a_number_a_date_or_nothing_stays_text(tmp_path):
    src = ["NA", "null", "009", "2020-01-10", "true", "", "1.50"]
    tgt = ["None", "nan", "1e5", "10:30", "N/A", "x", "20"]
    csv_file, jsonl = tmp_path / "a [1]*.csv", tmp_path / "a.jsonl"
    csv_file.write_text("en,bn\n" + "".join(f"{a},{b}\n" for a, b in zip(src, tgt)))
    (tmp_path / "a [1]x.csv").write_text("en,bn\nnot,this\n")  # what the name would match, were it a pattern
    jsonl.write_text("".join(json.dumps(dict(en=a or None, bn=b)) + "\n" for a, b in zip(src, tgt)))
    for path in (csv_file, jsonl):
        assert read(path, src_field="en", tgt_field="bn") == list(zip(src, tgt))


def test_a_source_is_a_plain_file(tmp_path, capfd):
    """Data are read more than once: a pipe would hang, or be empty the second time."""
    os.mkfifo(tmp_path / "pipe.tsv")
    for path in (tmp_path / "pipe.tsv", tmp_path, Path("/dev/null")):
        with pytest.raises(ValueError, match="is not a plain file"):
            train.settings_of(dict(src=[str(path)], tgt=[str(path)]))
    (tmp_path / "a.tsv").write_text("a\tb\n")
    with pytest.raises(ValueError, match="is a file: give it as --data"):
        train.settings_of(dict(dataset=str(tmp_path / "a.tsv")))
    given = train.parse_arguments(["--data", "a.tsv", "--allow", "ratio", "--data", "b.tsv", "--allow", "control"])
    assert given["data"] == ["a.tsv", "b.tsv"] and given["allow"] == ["ratio", "control"]  # none is forgotten
    with pytest.raises(SystemExit):
        train.parse_arguments(["--cache", ""])  # an unset variable: not the folder that we are in


def test_bytes_that_are_no_utf8(tmp_path):
    """By default an error with file and line; by flag the pair is skipped, and all others stay with their partners."""
    a, b = tmp_path / "a.en", tmp_path / "b.bn"
    pairs = clean_pairs(40)
    lines = [src.encode() for src, _ in pairs]
    lines[3] += b"\x92"
    a.write_bytes(b"\n".join(lines) + b"\n")
    b.write_text("\n".join(tgt for _, tgt in pairs) + "\n", "utf-8")
    with pytest.raises(ValueError, match="a.en, line 4: byte 0x92 is not UTF-8"):
        read(a, b)
    files = dict(src=[str(a)], tgt=[str(b)], val_pairs=4)
    corpus = prepared(tmp_path, **files, skip_bad_lines=True)
    assert dropped(corpus) == {"bad line": 1} and corpus.examples["bad line"][0] == 4
    assert set(training_text(corpus)) | set(map(tuple, corpus.val_pairs)) == set(pairs) - {pairs[3]}


def test_packed_files_several_files_and_patterns(tmp_path, monkeypatch):
    pairs = [(f"word {i}", f"শব্দ {i}") for i in range(30)]
    for part in range(3):
        text = ["".join(f"{pair[side]}\n" for pair in pairs[10 * part : 10 * part + 10]).encode() for side in (0, 1)]
        (tmp_path / f"part{part}.en.gz").write_bytes(gzip.compress(text[0]))  # one side packed, the other not
        (tmp_path / f"part{part}.bn").write_bytes(text[1])
    monkeypatch.chdir(tmp_path)
    assert list(train.read_pairs(train.settings_of(dict(src=["part*.en.gz"], tgt=["part*.bn"])))) == pairs
    with pytest.raises(ValueError, match="3 source files and 1 target files"):
        list(train.read_pairs(train.settings_of(dict(src=["part*.en.gz"], tgt=["part0.bn"]))))
    with pytest.raises(ValueError, match="none.* matches no file"):
        train.settings_of(dict(data=["none*.tsv"]))
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress("".join(f"{i}\tx\n" for i in range(999)).encode())[:-9])
    with pytest.raises(ValueError, match="cut.tsv.gz is cut short or damaged"):
        read("cut.tsv.gz")
    (tmp_path / "a.tsv").write_text("a\tb\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"src,tgt\nc,d\n"))
    assert list(train.read_pairs(train.settings_of(dict(data=["a.tsv", "b.csv.gz"])))) == [("a", "b"), ("c", "d")]


def test_parquet_and_hub_sets(tmp_path, monkeypatch):
    """Flat and nested parquet, packed too, and folders laid out as hub sets, with a card; without any network."""
    import datasets

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "library"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a local file needs no network"))
    pairs = [(f"word {i}", f"শব্দ {i}") for i in range(2500)]
    flat = [dict(idx=i, src=a, tgt=b) for i, (a, b) in enumerate(pairs)]
    nested = [dict(translation=dict(bn=b, en=a)) for a, b in pairs]
    for name, rows in (("flat", flat), ("nested", nested)):
        folder = tmp_path / name
        (folder / "data").mkdir(parents=True)
        (folder / "README.md").write_text("---\nlicense: mit\n---\nA set.\n")
        datasets.Dataset.from_list(rows).to_parquet(folder / "data" / "train-00000-of-00001.parquet")
        datasets.Dataset.from_list(rows[:5]).to_parquet(folder / "data" / "validation-00000-of-00001.parquet")
        flags = {} if name == "flat" else dict(src_field="en", tgt_field="bn")
        plain = folder / "data" / "train-00000-of-00001.parquet"
        packed = tmp_path / f"{name}.parquet.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert read(plain, **flags) == read(packed, **flags) == pairs
        settings = train.settings_of(dict(dataset=str(folder), val_split="validation", **flags))
        assert list(train.read_pairs(settings)) == pairs
        assert list(train.read_pairs(settings, split="val_split")) == pairs[:5]
        with pytest.raises(ValueError, match="(?i)unknown split"):
            list(train.read_pairs(train.settings_of(dict(dataset=str(folder), dataset_split="trian", **flags))))
    notes = []
    list(train.read_pairs(train.settings_of(dict(dataset=str(tmp_path / "nested"))), notes.append))
    assert notes == ["columns: source = 'bn', target = 'en', guessed; --src-field and --tgt-field say"]
    nulls = [dict(translation=None), dict(translation=dict(en="a", bn=None)), dict(translation=dict(en="c", bn="d"))]
    datasets.Dataset.from_list(nulls).to_parquet(tmp_path / "nulls.parquet")
    assert read(tmp_path / "nulls.parquet", src_field="en", tgt_field="bn") == [("", ""), ("a", ""), ("c", "d")]
    datasets.Dataset.from_list([dict(en="a", bn=None, url="u"), dict(en="b", bn="c", url="u")]).to_parquet(
        tmp_path / "three.parquet"
    )
    with pytest.raises(ValueError, match="say --src-field"):  # a null in the first row hides no column
        read(tmp_path / "three.parquet")
    whole = bytearray((tmp_path / "flat" / "data" / "train-00000-of-00001.parquet").read_bytes())
    whole[400:2400] = bytes(2000)
    (tmp_path / "hole.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match="hole.parquet cannot be read"):
        read(tmp_path / "hole.parquet")
    datasets.Dataset.from_list([dict(en=["a"], bn="b")]).to_parquet(tmp_path / "list.parquet")
    with pytest.raises(ValueError, match="line 1: a list where text should be"):
        read(tmp_path / "list.parquet", src_field="en", tgt_field="bn")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match="broken.parquet cannot be read: "):
        read(tmp_path / "broken.parquet")
    monkeypatch.setattr(datasets.config, "IN_MEMORY_MAX_SIZE", 1e9)  # no file would tell two sets apart
    corpus = prepared(tmp_path, dataset=str(tmp_path / "flat"), val_split="validation", vocab_size=300)
    flags = dict(src_field="bn", tgt_field="en")
    other = prepared(tmp_path, dataset=str(tmp_path / "nested"), val_split="validation", vocab_size=300, **flags)
    assert other.fingerprint != corpus.fingerprint
    assert len(corpus.train[0]) == 2495 and [tuple(pair) for pair in corpus.val_pairs] == pairs[:5]
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ValueError, match="scripted cannot be read: .*give a copy of the set in parquet"):
        read_hub = train.settings_of(dict(dataset=str(tmp_path / "scripted")))
        list(train.read_pairs(read_hub))


DEFECTS = {  # rule: (name for --allow, the pair)
    "empty side": (None, ("the red house", " \u2003 ")),
    "control characters or U+FFFD": ("control", ("the old\x07 town", "অআ ইঈ উঊ")),
    "HTML entities": ("entities", ("the cat &amp;quot; dog", "অআ ইঈ উঊ")),
    "mark-up": ("markup", ("the <b>old</b> town", "অআ ইঈ উঊ")),
    "identical sides": ("identical", ("the red house", "the red  house")),
    "repeated pair": ("repeated", clean_pairs(1)[0]),
    "unusual script": ("script", ("the red river and the old road", "the river rouge et la vieille route")),
    "unusual length ratio": ("ratio", ("red " * 30, "অআ ইঈ")),
}
MORE_DEFECTS = {
    "control characters or U+FFFD": [("a lost\ufffd letter", "অআ ইঈ উঊ"), ("n\0u\0l", "অআ ইঈ উঊ")],
    "unusual length ratio": [("red", "অআ " * 30), ("red green blue black white small", "অ" * 240)],
    "unusual script": [("красный дом и старая дорога", "অআ ইঈ উঊ এঐ ওঔ কখ")],
    "mark-up": [("see [[here]] now", "অআ ইঈ উঊ"), ("অ", "{{cite web}} অআ ইঈ")],
}


@pytest.mark.parametrize("rule", DEFECTS)
def test_each_rule_drops_its_defect_counts_it_and_can_be_turned_off(tmp_path, rule):
    name, pair = DEFECTS[rule]
    pairs = [*clean_pairs(60), pair, *clean_pairs(20, seed=1)]
    pairs = list(dict.fromkeys(pairs[:60])) + pairs[60:]  # the second lot may repeat the first: not the point here
    clean = prepared(tmp_path, data=pairs[:60] + pairs[61:], val_pairs=5)
    corpus = prepared(tmp_path, data=pairs, val_pairs=5)
    more = MORE_DEFECTS.get(rule, [])
    assert prepared(tmp_path, data=pairs + more, val_pairs=5).dropped[rule] == clean.dropped[rule] + 1 + len(more)
    assert corpus.dropped[rule] == clean.dropped[rule] + 1
    assert corpus.examples[rule] == [61, tf.normalize(pair[0]), tf.normalize(pair[1])]
    if name is not None:
        allowed = prepared(tmp_path, data=pairs, val_pairs=5, allow=[name, "identical"])
        assert allowed.dropped[rule] == 0 and allowed.fingerprint != corpus.fingerprint


def test_scripts_are_found_from_the_corpus(tmp_path):
    """Whatever a side is mostly written in is right for it, Japanese in its three scripts; of two halves, both."""
    japanese = ["猫が好き", "カタカナ", "東京都", "これはペンです", "テレビ 2 台", "?!", "123"] * 10
    latin, cyrillic = sentences(35), [line.translate(str.maketrans("abcdeg", "абцдег")) for line in sentences(35, 1)]
    cleaner = train.Cleaner(dict(max_ratio=100.0, allow=["repeated"]))
    odd = [("only english here", "so not japanese"), ("тут русский", "東京都")]
    facts = cleaner.look([*zip(sentences(70), japanese), *odd])[2]
    cleaner.judge(facts)
    assert cleaner.script_names(0) == "latin" and cleaner.script_names(1) == "cjk"
    assert [train.VERDICTS[v] for v in facts["verdict"]] == ["kept"] * 70 + ["unusual script"] * 2
    halves = train.Cleaner(dict(max_ratio=100.0))
    facts = halves.look(list(zip(sentences(70, 2), ["абв где жзи " + x for x in cyrillic] + ["x" + x for x in latin])))[
        2
    ]
    halves.judge(facts)
    assert halves.script_names(1) == "latin, cyrillic" and not facts["verdict"].any()


def test_length_ratios_are_judged_by_the_median_of_the_corpus():
    """Targets a third as long, without spaces, are usual where all are; short lines may vary more than long ones."""
    cleaner = train.Cleaner(dict(max_ratio=3.0, allow=["identical"]))
    pairs = [(line * 3, line.replace(" ", "")) for line in sentences(50)] + [("Go", "leave us")]
    pairs += [("word " * 40, "it")]
    facts = cleaner.look(pairs)[2]
    cleaner.judge(facts)
    assert [train.VERDICTS[v] for v in facts["verdict"]] == ["kept"] * 51 + ["unusual length ratio"]


def test_entities_are_turned_into_characters_by_flag(tmp_path):
    pairs = [*clean_pairs(40), ("cat &amp;quot;dog&amp;quot; &#2453;", "অআ &lt; ইঈ")]
    corpus = prepared(tmp_path, data=pairs, val_pairs=4, unescape=True, seed=3)
    assert not dropped(corpus)
    assert ('cat "dog" ক', "অআ < ইঈ") in training_text(corpus) + [tuple(pair) for pair in corpus.val_pairs]
    assert train.unescape("http://x/?a=1&copy=2&reg=3 AT&T &notit") == "http://x/?a=1&copy=2&reg=3 AT&T &notit"


def test_the_worst_aligned_pairs_are_listed(tmp_path):
    def score(src, tgt):
        return train.misalignment(src, tgt, 1.0)

    assert score("a b c", "d e f") == 0.0
    assert score("the 12 cats", "১২ টি বিড়াল") < score("the 12 cats", "১৩ টি বিড়াল")
    assert score("who is it?", "هل هو هو؟") < score("who is it?", "هل هو هوا") < score("who is it?!!", "هل هو هوا")
    assert score("in Paris today", "heute in Paris") < score("in Paris today", "heute in Rome ")
    assert score("a short one of words", "very much longer than that, by a factor of many") > 0.5
    pairs = clean_pairs(60)
    pairs[30] = (pairs[30][0] + " 1999 2001?", pairs[30][1])
    corpus = prepared(tmp_path, data=pairs, val_pairs=5)
    assert tuple(corpus.worst[0][1:]) == pairs[30] and len(corpus.worst) == len(corpus.samples) == 3
    assert set(map(tuple, corpus.samples)) < set(training_text(corpus))


def test_validation_is_split_off_by_groups(tmp_path):
    """No sentence on both sides of the split; all translations of a source on the same; the same split each time."""
    pairs = [(f"{a} {k % 40}", f"{b} {k}") for k, (a, b) in enumerate(clean_pairs(120))]
    pairs = [(pairs[k % 40][0], pairs[k // 2][1] if k % 7 == 0 else pairs[k][1]) for k in range(120)]
    corpus, again = (prepared(tmp_path, data=pairs, val_pairs=12, cache=str(tmp_path / x)) for x in "ab")
    val, kept = [tuple(pair) for pair in corpus.val_pairs], training_text(corpus)
    assert 9 < len(val) <= 12 and again.val_pairs == corpus.val_pairs and again.fingerprint == corpus.fingerprint
    for side in (0, 1):
        assert not {pair[side] for pair in kept} & {pair[side] for pair in val}
    asked = {src for src, _ in val}
    assert {pair for pair in pairs if pair[0] in asked} == set(val)
    assert len(kept) + len(val) + sum(corpus.dropped.values()) == 120 and corpus.dropped["in validation or test"]
    assert prepared(tmp_path, data=pairs, val_pairs=12, seed=2).val_pairs != corpus.val_pairs


def test_given_validation_and_test_sentences_leave_training(tmp_path):
    pairs = clean_pairs(50)
    files = dict(val_src=[pairs[0][0], "", "x"], val_tgt=["other", "y", "x"], test_src=["z"], test_tgt=[pairs[1][1]])
    for name, lines in files.items():
        (tmp_path / name).write_text("".join(f" {line}\n" for line in lines), "utf-8")
    corpus = prepared(tmp_path, data=pairs, **{name: [str(tmp_path / name)] for name in files})
    assert dropped(corpus) == {"in validation or test": 2} and len(corpus.train[0]) == 48
    assert corpus.val_pairs == [[" " + pairs[0][0], " other"], [" x", " x"]]  # as they stand in the file
    assert "validation: 1 with empty side, left out" in corpus.notes
    assert "validation: 1 with identical sides, kept" in corpus.notes


def test_no_sentence_of_validation_is_trained_in_either_direction_or_under_another_tag(tmp_path):
    pairs = clean_pairs(40)
    both = [*pairs, *((b, a) for a, b in pairs)]
    corpus = prepared(tmp_path, data=both, val_pairs=8)
    asked = {side for pair in corpus.val_pairs for side in pair}
    assert (
        not asked & {side for pair in training_text(corpus) for side in pair}
        and corpus.dropped["in validation or test"]
    )
    tagged = [(f"{tag} {a}", b + "।" * k) for a, b in pairs for k, tag in enumerate(("<bn>", "<as>"))]
    corpus = prepared(tmp_path, data=tagged, val_pairs=8, tags=["<bn>", "<as>"])
    asked = {a.split(" ", 1)[1] for a, _ in corpus.val_pairs}
    assert len(asked) == 4 and dropped(corpus) == {}  # both of each; and a tag is no mark-up
    assert not asked & {a.split(" ", 1)[1] for a, _ in training_text(corpus)}
    same = [(f"{tag} {a}", b) for a, b in pairs for tag in ("<bn>", "<as>")]
    assert dropped(prepared(tmp_path, data=same, val_pairs=8, tags=["<bn>", "<as>"])) == {}  # two pairs, not one twice


def test_what_is_left_out_of_a_split_off_validation_is_counted(tmp_path):
    pairs = [(a, b) if i % 3 else (a + " long" * 30, b + " অআ" * 30) for i, (a, b) in enumerate(clean_pairs(60))]
    corpus = prepared(tmp_path, 40, data=pairs, val_pairs=12)
    assert (
        len(corpus.val_pairs) < 12 and len(corpus.train[0]) + len(corpus.val_pairs) + sum(corpus.dropped.values()) == 60
    )
    assert max(rows.lengths.max() + 1 for rows in (*corpus.train, *corpus.val)) <= 40
    groups = [(a, f"{b} {k}") for a, b in clean_pairs(9) for k in range(3)]  # none is as small as asked for
    assert len(prepared(tmp_path, data=groups, val_pairs=2, allow=["script", "ratio"]).val_pairs) == 3


def test_when_nothing_is_left_the_rules_are_named(tmp_path):
    pairs = [("a <b>c</b>", "d"), ("same words", "same words"), ("", "x"), ("n\0l", "y")]
    with pytest.raises(
        ValueError, match="4 pairs were read, .*empty side 1, control.* 1, mark-up 1, identical sides 1"
    ):
        prepared(tmp_path, data=pairs)
    for name in ("val_src", "val_tgt"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match="the validation data hold no pairs"):
        prepared(
            tmp_path, data=clean_pairs(9), val_src=[str(tmp_path / "val_src")], val_tgt=[str(tmp_path / "val_tgt")]
        )
    assert not list((tmp_path / "cache").glob("*.tmp"))  # and no text is left behind


def test_max_pairs_takes_a_random_sample(tmp_path):
    pairs = [(f"{src} {i}", tgt) for i, (src, tgt) in enumerate(clean_pairs(300))]
    corpus = prepared(tmp_path, data=pairs, max_pairs=60, val_pairs=5, allow=["ratio"])
    taken = set(training_text(corpus)) | set(map(tuple, corpus.val_pairs))
    assert corpus.read == 300 and corpus.taken == len(taken) == 60 and taken < set(pairs)
    assert len(taken & set(pairs[:60])) < 40  # not the first rows
    pairs = [("<i>" + a, b) if i == 200 else (a, b) for i, (a, b) in enumerate(pairs)]
    number = prepared(tmp_path, data=pairs, max_pairs=299, val_pairs=5, allow=["ratio"], seed=2).examples["mark-up"][0]
    assert number == 201  # in the file, not in the sample
    more = prepared(tmp_path, data=pairs, max_pairs=60, val_pairs=5, allow=["ratio"], seed=5)
    assert taken != set(training_text(more)) | set(map(tuple, more.val_pairs))


def test_pairs_over_the_limit_are_dropped_not_cut(tmp_path, tokenizer):
    pairs = [(f"a cat {i}", f"the mat {i}") for i in range(20)] + [("a" * 39, "b " * 8)]
    corpus = prepared(tmp_path, 40, tokenizer, data=pairs, val_pairs=5, seed=2)
    assert dropped(corpus) == {} and max(corpus.train[0].lengths.max(), corpus.val[0].lengths.max()) + 1 == 40
    corpus = prepared(tmp_path, 39, tokenizer, data=pairs, val_pairs=5, seed=2)
    assert dropped(corpus) == {"over the length limit": 1} and len(corpus.train[0]) == len(corpus.train[1]) == 15
    turned = [(b, a) for a, b in pairs]  # the longer side may be the target
    assert dropped(prepared(tmp_path, 39, tokenizer, data=turned, val_pairs=5, seed=2)) == {"over the length limit": 1}


def test_the_fingerprint_covers_pairs_order_rules_and_validation(tmp_path):
    pairs, own = clean_pairs(40), tmp_path / "own"
    own.mkdir()
    for name, side in (("val_src", 0), ("val_tgt", 1)):
        (own / name).write_text("".join(f"{pair[side]}\n" for pair in clean_pairs(9, seed=8)), "utf-8")
    files = dict(val_src=[str(own / "val_src")], val_tgt=[str(own / "val_tgt")])
    prints = [prepared(tmp_path, data=pairs, **files).fingerprint]
    prints.append(prepared(tmp_path, data=[pairs[1], pairs[0], *pairs[2:]], **files).fingerprint)
    prints.append(prepared(tmp_path, data=[*pairs[:-1], (pairs[-1][0], pairs[-1][1] + "।")], **files).fingerprint)
    prints.append(prepared(tmp_path, data=pairs, **files, max_ratio=4.0).fingerprint)
    prints.append(prepared(tmp_path, 99, data=pairs, **files).fingerprint)
    (own / "val_tgt").write_text((own / "val_tgt").read_text("utf-8").replace("\n", "।\n"), "utf-8")
    prints.append(prepared(tmp_path, data=pairs, **files).fingerprint)
    prints.append(
        prepared(tmp_path, data=[(a + b[:1], b[1:]) for a, b in pairs], **files, allow=["script"]).fingerprint
    )
    prints.append(prepared(tmp_path, data=pairs, **files, allow=["script"]).fingerprint)
    assert len(set(prints)) == 8
    allowed = [
        prepared(tmp_path, data=pairs, **files, allow=x).fingerprint for x in (["ratio", "script"], ["script", "ratio"])
    ]
    assert allowed[0] == allowed[1]
    moved = own / "elsewhere.tsv"
    moved.write_text("".join(f"{a}\t {b}\n" for a, b in pairs), "utf-8")  # another place, other white space
    assert prepared(tmp_path, data=[str(moved)], **files).fingerprint == prints[5]


def test_prepared_data_are_found_again_and_made_again_when_damaged(tmp_path, monkeypatch):
    first = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
    text = training_text(first)
    again = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
    assert set(first.stages) == {"cleaning", "tokenizer", "encoding"} and not again.stages
    assert training_text(again) == text and again.tokenizer.sha256 == first.tokenizer.sha256
    for name in ("fingerprint", "dropped", "examples", "notes", "samples", "worst", "val_pairs", "read", "taken"):
        assert getattr(again, name) == getattr(first, name)
    assert prepared(tmp_path, data=clean_pairs(101), val_pairs=9).stages
    for name in ("tgt.ids", "report.json", "src.offsets", "tokenizer.model", "sums.json"):
        content = bytearray((first.folder / name).read_bytes())
        content[len(content) // 2] ^= 0x40
        for damaged in (content, content[:-5], None):
            (first.folder / name).unlink() if damaged is None else (first.folder / name).write_bytes(damaged)
            made = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
            assert made.fingerprint == first.fingerprint and training_text(made) == text
    killed, mine = tmp_path / "cache" / f"{'a1' * 16}.tmp", tmp_path / "cache" / "my thesis.tmp"
    killed.mkdir()
    mine.mkdir()
    monkeypatch.setattr(train, "chunks", lambda rows, chunks=train.chunks: chunks(rows, 7))  # borders change nothing
    shutil.rmtree(first.folder)
    made = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
    assert made.fingerprint == first.fingerprint and training_text(made) == text
    assert list((tmp_path / "cache").glob("*.tmp")) == [mine]


CHANGES = dict(  # of flags that decide what is prepared
    skip_bad_lines=True, max_pairs=99, val_pairs=7, seed=5, allow=["ratio"], max_ratio=5.0, unescape=True,
    tokenizer_kind="unigram", tokenizer_sample=30, tags=["<2bn>"], separate_vocabularies=True, src_field="a",
    vocab_size=350, no_header=True, tgt_field="b", dataset_config="x", dataset_split="y", val_split="z", overfit=3,
)  # fmt: skip


def test_prepared_data_are_known_by_all_that_they_follow_from(tmp_path):
    """Each flag, the limit, and the content of each file, whatever its name, has a part in the key."""

    def key(settings, limit=100):
        corpus = object.__new__(train.Corpus)
        corpus.settings, corpus.limit = settings, limit
        return corpus.key()

    assert set(CHANGES) == set(train.KEY.split())
    for name in "abc":
        (tmp_path / f"{name}.tsv").write_text("one\ttwo\n" if name < "c" else "two\tone\n")
    settings = dict(data=[str(tmp_path / "a.tsv")], seed=1)
    keys = {key(settings | {flag: value}) for flag, value in CHANGES.items()} | {key(settings), key(settings, 99)}
    assert len(keys) == len(CHANGES) + 2
    assert (
        key(dict(settings, data=[str(tmp_path / "b.tsv")]))
        == key(settings)
        != key(dict(settings, data=[str(tmp_path / "c.tsv")]))
    )
    for name in ("val_src", "test_tgt", "tgt"):
        assert key(settings | {name: [str(tmp_path / "a.tsv")]}) not in keys


def test_a_tokenizer_from_elsewhere_leaves_the_prepared_data_alone(tmp_path, tokenizer):
    first = prepared(tmp_path, data=clean_pairs(60), val_pairs=5)
    other = prepared(tmp_path, 100, tokenizer, data=clean_pairs(60), val_pairs=5)
    again = prepared(tmp_path, data=clean_pairs(60), val_pairs=5)
    assert other.tokenizer.sha256 == tokenizer.sha256 != first.tokenizer.sha256 == again.tokenizer.sha256
    assert not again.stages and not prepared(tmp_path, 100, tokenizer, data=clean_pairs(60), val_pairs=5).stages
    assert not prepared(tmp_path, 100, first.tokenizer, data=clean_pairs(60), val_pairs=5).stages  # a resume finds them


def test_data_that_change_while_they_are_read_are_refused(tmp_path, monkeypatch):
    plain = train.Corpus.build

    def build(corpus, folder):
        plain(corpus, folder)
        with open(tmp_path / "pairs.tsv", "a", encoding="utf-8") as file:
            file.write("one more\tঅ\n")

    monkeypatch.setattr(train.Corpus, "build", build)
    with pytest.raises(ValueError, match="changed while they were read"):
        prepared(tmp_path, data=clean_pairs(60), val_pairs=5)


@pytest.mark.skipif(train.fcntl is None, reason="no locks here")
def test_who_comes_second_waits_and_says_so(tmp_path, monkeypatch):
    first = prepared(tmp_path, data=clean_pairs(60), val_pairs=5)
    shutil.rmtree(first.folder)
    said, settings = [], train.settings_of(dict(data=[str(tmp_path / "pairs.tsv")], val_pairs=5, vocab_size=400))
    with train.locked(first.folder.with_suffix(".lock")):
        thread = threading.Thread(target=lambda: train.Corpus(settings, tmp_path / "cache", 100, say=said.append))
        thread.start()
        time.sleep(0.5)
        assert not first.folder.exists() and "waiting for another process" in said[0]
    thread.join(30)
    assert first.folder.exists()


def test_data_are_prepared_where_nothing_can_be_kept(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(train, "locked", lambda path, wait: refuse(path))
    corpus = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
    assert len(corpus.train[0]) == 91 and tmp_path not in corpus.folder.parents
    monkeypatch.undo()
    kept = prepared(tmp_path, data=clean_pairs(100), val_pairs=9)
    monkeypatch.setattr(train, "locked", lambda path, wait: refuse(path))
    assert prepared(tmp_path, data=clean_pairs(100), val_pairs=9).folder == kept.folder  # but used if they are there


def test_two_processes_prepare_the_same_data_once(corpus, tmp_path):
    command = [sys.executable, HERE / "train.py", "--data", corpus, *TINY, "--dry-run", "--out"]
    both = [subprocess.Popen([*command, tmp_path / x], stderr=subprocess.PIPE, text=True) for x in "ab"]
    logs = [process.communicate()[1] for process in both]
    assert sorted("prepared before" in log for log in logs) == [False, True]
    assert [process.returncode for process in both] == [0, 0]


# --- The tokenizer's flags -----------------------------------------------------------------------------------------


def test_the_tokenizer_sees_training_text_only(tmp_path):
    pairs = [(f"{src} {chr(0x4E00 + i)}", tgt) for i, (src, tgt) in enumerate(clean_pairs(80))]
    corpus = prepared(tmp_path, data=pairs, val_pairs=20)
    pieces = "".join(corpus.tokenizer.pieces.id_to_piece(i) for i in range(corpus.tokenizer.vocab_size))
    assert all(src[-1] in pieces for src, _ in training_text(corpus))
    assert not any(src[-1] in pieces for src, _ in corpus.val_pairs)
    few = prepared(tmp_path, data=pairs, val_pairs=20, tokenizer_sample=10).tokenizer
    pieces = "".join(few.pieces.id_to_piece(i) for i in range(few.vocab_size))
    assert sum(src[-1] in pieces for src, _ in training_text(corpus)) == 10
    where = dict(data=pairs, val_pairs=20, tokenizer_sample=10)
    assert prepared(tmp_path, cache=tmp_path / "b", **where).tokenizer.sha256 == few.sha256
    files = {}
    for name, side in (("val_src", 0), ("val_tgt", 1)):
        (tmp_path / name).write_text("".join(f"{pair[side]}\n" for pair in pairs[:9]), "utf-8")
        files[name] = [str(tmp_path / name)]
    del where["val_pairs"]
    assert len({prepared(tmp_path, **where, **files, seed=seed).tokenizer.sha256 for seed in range(3)}) == 3


def test_ids_have_room_for_large_vocabularies(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(tf.Tokenizer, "vocab_size", property(lambda self: 70000))
    corpus = prepared(tmp_path, 100, tokenizer, data=clean_pairs(30), val_pairs=3)
    assert all(rows.ids.dtype == np.int32 for rows in (*corpus.train, *corpus.val)) and len(training_text(corpus)) == 27


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_any_text_comes_back_from_either_kind_with_tags(kind):
    tokenizer = tf.Tokenizer.train(TEXT, 400, kind, tags=["<2bn>", "<2ta>"])
    assert tokenizer.sha256 == tf.Tokenizer.train(TEXT, 400, kind, tags=["<2bn>", "<2ta>"]).sha256
    assert tokenizer.pieces.encode("<2ta> the cat", out_type=str)[:2] == ["\u2581", "<2ta>"]
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(
            rng.choice(
                [
                    "<2bn>",
                    "</s>",
                    "a",
                    " ",
                    "\u2581",
                    "ক্ষ",
                    "\u200d",
                    "\u200c",
                    "<0x41>",
                    "\n",
                    chr(rng.randrange(0x110000)),
                ]
            )
            for _ in range(rng.randrange(20))
        )
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tf.normalize(text) and min(ids, default=4) > UNK
    for tags in (["</s>"], ["two words"], [""], [" x"], ["<2bn>", "<2bn>"], ["<0x41>"]):
        with pytest.raises(ValueError, match="cannot be a tag"):
            tf.Tokenizer.train(TEXT, 400, tags=tags)


def test_a_tokenizer_of_ones_own(corpus, tmp_path, capfd):
    import sentencepiece

    lines = [text for line in demo_pairs(200) for text in line.split("\t")]
    (tmp_path / "own.model").write_bytes(tf.Tokenizer.train(lines, 380).model_bytes)
    flags = ["--data", str(corpus), *TINY, "--steps", "2"]
    at = flags.index("--vocab-size")
    del flags[at : at + 2]
    assert train.main([*flags, "--tokenizer", str(tmp_path / "own.model"), "--out", str(tmp_path / "a")]) == 0
    assert train.main([*flags, "--tokenizer", str(tmp_path / "a" / "last.pt"), "--out", str(tmp_path / "b")]) == 0
    a, b = (weights_of(tmp_path / x / "last.pt") for x in "ab")
    assert (
        a["tokenizer"] == b["tokenizer"] == (tmp_path / "own.model").read_bytes() and a["config"]["vocab_size"] == 380
    )
    foreign = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=foreign, vocab_size=200, hard_vocab_limit=False, minloglevel=2
    )
    (tmp_path / "foreign.model").write_bytes(foreign.getvalue())
    capfd.readouterr()
    assert train.main([*flags, "--tokenizer", str(tmp_path / "foreign.model"), "--out", str(tmp_path / "c")]) == 1
    assert re.search("foreign.model: .*train it with --pad_id=0 --bos_id=1", capfd.readouterr().err)


def test_separate_vocabularies_from_text_to_text(corpus, tmp_path, capfd):
    """Each language has its own pieces and table; the checkpoint holds both, and all else works as with one."""
    run = tmp_path / "run"
    flags = [
        "--data",
        str(corpus),
        *TINY,
        "--separate-vocabularies",
        "--steps",
        "4",
        "--eval-every",
        "2",
        "--average",
        "2",
    ]
    assert train.main([*flags, "--out", str(run)]) == 0
    model, tokenizer, rest = tf.load_checkpoint(run / "last.pt")
    assert tokenizer.source.sha256 != tokenizer.sha256 == rest["tokenizer_sha256"]
    assert (
        model.config.src_vocab_size == tokenizer.source.vocab_size and model.config.vocab_size == tokenizer.vocab_size
    )
    pieces = [{t.pieces.id_to_piece(i) for i in range(260, t.vocab_size)} for t in (tokenizer.source, tokenizer)]
    assert all(piece.isascii() for piece in {p.strip("\u2581") for p in pieces[0]})
    assert not any(re.search("[a-z]{2}", piece) for piece in pieces[1])
    src, tgt = demo_pairs(1)[0].split("\t")
    assert (
        tokenizer.source.decode(tokenizer.source.encode(src)) == src and tokenizer.decode(tokenizer.encode(tgt)) == tgt
    )
    assert train.main(["--resume", str(run), "--steps", "5"]) == 0
    (tmp_path / "in").write_text(src + "\n", "utf-8")
    (tmp_path / "ref").write_text(tgt + "\n", "utf-8")
    command = ["--checkpoint", str(run / "last.pt"), "--input", str(tmp_path / "in")]
    assert translate.main([*command, "--reference", str(tmp_path / "ref")]) == 0
    assert "over 1 of 1 references" in capfd.readouterr().err
    content = weights_of(run / "last.pt")
    content["source_tokenizer"] = tf.Tokenizer.train(["other text"] * 9, 300).model_bytes
    torch.save(content, tmp_path / "changed.pt")
    with pytest.raises(ValueError, match="hash"):
        tf.load_checkpoint(tmp_path / "changed.pt")


def test_a_resume_finds_the_same_pairs_in_other_files(corpus, tmp_path, capfd):
    run = str(tmp_path / "run")
    data = tmp_path / "pairs.tsv"
    data.write_bytes(corpus.read_bytes())
    assert train.main(["--data", str(data), *TINY, "--steps", "2", "--out", run]) == 0
    data.unlink()
    for name, side in zip(("src", "tgt"), zip(*(line.split("\t") for line in demo_pairs(200)))):
        (tmp_path / name).write_text("\n".join(side) + "\n", "utf-8")
    files = ["--src", str(tmp_path / "src"), "--tgt", str(tmp_path / "tgt")]
    assert train.main(["--resume", run, "--steps", "3", *files]) == 0
    capfd.readouterr()
    for wrong in (files[:2], ["--val-src", files[1]], [*files, "--data", str(corpus)]):
        assert train.main(["--resume", run, "--steps", "4", *wrong]) == 1
        assert re.search("go together|exclude each other", capfd.readouterr().err)
    assert train.main(["--resume", run, "--tokenizer", "nowhere"]) == 1


def test_a_resume_needs_no_prepared_data(corpus, tmp_path):
    flags = ["--data", str(corpus), *TINY, "--steps", "2", "--out", str(tmp_path / "run")]
    assert train.main(flags) == 0
    shutil.rmtree(tmp_path / "cache")
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "3"]) == 0


def test_text_files_are_opened_as_utf8():
    """Whatever the locale: no text file is opened without its encoding, but for what is written nowhere."""
    for name in ("transformer.py", "train.py", "translate.py", "data/make_demo.py"):
        source = (HERE / name).read_text("utf-8")
        for call in re.findall(r"(?<![\w.])open\(.*|\.(?:read|write)_text\(.*", source):
            binary = re.search(
                r"""["'][rwa]\+?b["']|read_text\(path|read_text\(args|read_text\(self|os\.devnull""", call
            )
            assert binary or "encoding=" in call or re.match(r"open\(path\) as packed|open\(path, \"a\"\)", call), (
                name,
                call,
            )


def test_demo_corpus_is_what_its_script_writes(tmp_path):
    subprocess.run([sys.executable, HERE / "data" / "make_demo.py", "--out", tmp_path / "demo.tsv"], check=True)
    text = (HERE / "data" / "demo.tsv").read_bytes()
    assert (tmp_path / "demo.tsv").read_bytes() == text
    pairs = [line.split("\t") for line in text.decode("utf-8").splitlines()]
    assert len(pairs) >= 8000 and len({src for src, _ in pairs}) == len(pairs)
    assert all(tf.normalize(side) == side for pair in pairs for side in pair)
    for side in zip(*pairs):
        assert len({word for line in side for word in line.rstrip(".?।").split()}) >= 250


MISTAKES = {  # command line: what the one line must say
    "train.py --src none --tgt none": "none: No such file",
    "train.py --src five --tgt six": "five has 5 lines and .*six has 6",
    "train.py --src five": "--src and --tgt go together",
    "train.py --data empty.tsv": "no pairs are left to train on: 0 pairs were read",
    "train.py --data narrow.tsv": r"narrow.tsv, line 2: 1 column\(s\)",
    "train.py --data bytes.tsv": "bytes.tsv, line 2",
    "train.py --data five": "must end in",
    "train.py --data pairs.tsv --src-field en --tgt-field xx": "no column",
    "train.py --data pairs.tsv --val-pairs 99": "cannot be split",
    "train.py --data pairs.tsv --val-pairs 2 --vocab-size 50": "vocab_size 50 is too small",
    "train.py --data pairs.tsv --val-pairs 2 --d-model 30 --n-heads 4 --vocab-size 500": "heads",
    "train.py --data pairs.tsv --val-pairs 2 --max-len 2 --vocab-size 500": "longer than 2 tokens",
    "train.py --data pairs.tsv --src five --tgt five": "exclude each other",
    "train.py --steps 5 --epochs 5": "exclude each other",
    "train.py --resume nowhere": "No such file",
    "train.py --resume five": "five is not a checkpoint",
    "train.py --data pairs.tsv --val-pairs 2 --init-from five": "five is not a checkpoint",
    "train.py --dropout 1.5": "--dropout",
    "train.py --epochs 1e308": "--epochs",
    "train.py --seed 18446744073709551616": "--seed",
    "train.py --threads 1000000": "--threads",
    "train.py --average 1": "--average",
    "train.py --data pairs.tsv --src-field en --tgt-field en": "both 'en'",
    "train.py --src five --tgt five --src-field a --tgt-field b": "exclude each other",
    "train.py --data pairs.tsv --overfit 5 --val-src five --val-tgt five": "exclude each other",
    "train.py --data pairs.tsv --dataset-config x": "needs --dataset",
    "train.py --data pairs.tsv --val-split x": "needs --dataset",
    "train.py --dataset . --val-split x --val-pairs 3": "exclude each other",
    "train.py --data pairs.tsv --test-src five": "--test-src and --test-tgt go together",
    "train.py --data none*.tsv": "matches no file",
    "train.py --data pairs.tsv --allow nonsense": "--allow",
    "train.py --data pairs.tsv --max-ratio 0.5": "--max-ratio",
    "train.py --data pairs.tsv --no-header": "--no-header is about .csv",
    "train.py --data pairs.tsv --cache=": "--cache",
    "train.py --data pairs.tsv --val-pairs 2 --tokenizer empty.tsv": "empty.tsv: not a Sent.* empty",
    "train.py --save-every 5x": "--save-every",
    "train.py --data pairs.tsv --val-pairs 2 --tags </s> --vocab-size 500": "cannot be a tag",
    "train.py --data pairs.tsv --val-pairs 2 --tokenizer five": "five: not a SentencePiece model",
    "train.py --data pairs.tsv --tokenizer five --vocab-size 500": "--vocab-size is decided",
    "train.py --data pairs.tsv --tokenizer five --init-from five": "exclude each other",
    "train.py --data broken.jsonl": "broken.jsonl, line 2",
    "train.py --data list.jsonl --src-field a --tgt-field b": "line 1: a list where text",
    "train.py --data empty.csv": "empty.csv",
    "train.py --data pairs.tsv --val-pairs 2 --vocab-size 500 --batch-tokens 2": "--batch-tokens",
    "train.py --steps -1": "--steps",
    "train.py --steps many": "--steps",
    "train.py --norm middle": "--norm",
    "train.py --colour red": "--colour",
    "translate.py hello": "run `python train.py` first",
    "translate.py --checkpoint five hello": "five is not a checkpoint",
    "translate.py --checkpoint nowhere hello": "nowhere: No such file",
    "translate.py --checkpoint . hello": "Is a directory",
    "translate.py --input nowhere": "nowhere: No such file",
    "translate.py --input five --reference six": "five has 5 lines and six has 6",
    "translate.py --input empty.tsv --reference empty.tsv": "empty.tsv is empty",
    "translate.py --reference five": "--reference needs --input",
    "translate.py --beam 0 hello": "--beam",
    "translate.py --alpha 1000 hello": "--alpha",
    "translate.py --input five --output five --checkpoint five": "would overwrite",
    "translate.py --checkpoint five --output five hello": "would overwrite",
    "translate.py --input= hello": "not both",
    "translate.py --alpha -1 hello": "--alpha",
    "translate.py --min-len 5 --max-len 4 hello": "--min-len is more than --max-len",
    "translate.py --output= hello": "--output is empty",
    "translate.py --output a.gz hello": "without .gz",
    "translate.py --attention a.jpg hello": "draws .png, .svg or .pdf, not a.jpg",
    "translate.py --n-best 5 hello": "--n-best 5 needs as many beams",
    "translate.py --score --input five": "--score needs --reference",
    "translate.py --input five --reference five --memory five six": "five has 5 lines and six has 6",
    "translate.py --input five --reference five --compare six": "six has 6 lines and five has 5",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_clear_line(command, tmp_path, monkeypatch, capfd):
    for name, content in {
        "five": b"a\n" * 5,
        "six": b"a\n" * 6,
        "empty.tsv": b"",
        "empty.csv": b"",
        "broken.jsonl": b'{"a": "x", "b": "y"}\n{"a": "x",\n',
        "list.jsonl": b'{"a": "x", "b": ["y"]}\n',
        "narrow.tsv": b"a\tb\nc\n",
        "bytes.tsv": b"a\tb\nc\t\x92\n",
        "pairs.tsv": "".join(f"word {i}\tmot {i}\n" for i in range(20)).encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    program, *flags = command.split()
    try:
        status = {"train.py": train, "translate.py": translate}[program].main(flags)
    except SystemExit as stop:  # argparse
        status = stop.code
    last = capfd.readouterr().err.strip().split("\n")[-1]
    assert status != 0 and re.search(MISTAKES[command], last) and program in last


def test_scores_are_sacrebleus_own():
    out, reference = ["the cat sat on a mat", "hello"], ["the cat sat on the mat", "hello"]
    scores = train.score_text(out, reference)
    assert scores["bleu"] == sacrebleu.corpus_bleu(out, [reference]).score
    assert scores["chrf"] == sacrebleu.corpus_chrf(out, [reference], word_order=2).score
    assert scores["exact"] == 0.5 and train.score_text(reference, reference)["bleu"] == pytest.approx(100)
    with pytest.raises(ValueError):
        train.score_text(out[:1], reference)


def test_perplexity_is_of_the_true_likelihood(memorised):
    model, tokenizer, _ = tf.load_checkpoint(memorised / "run" / "best.pt")
    lines = ["a b", "সে"]
    rows = tf.TokenRows.encode(tokenizer, lines)
    nll, tokens = tf.pairs_nll(model, rows, rows)
    by_hand = 0.0
    for i in range(2):
        src, tgt_in, tgt_out = tf.collate(rows, rows, [i])
        by_hand -= model(src, tgt_in).log_softmax(-1)[0].gather(1, tgt_out[0, :, None]).sum().item()
    assert nll == pytest.approx(by_hand, rel=1e-4) and tokens == len(rows.ids) + 2
