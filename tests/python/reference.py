"""What results must be, by numpy in f64."""

import numpy as np


def numbers(*shape, seed=0, dtype=np.float32):
    """Normal numbers; all differ, per head, token and channel."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def attention(q, k, v, scale=None, mask=None, bias=None, sinks=None):
    """q [N,Hq,Sq,D], k [N,Hkv,S,D], v [N,Hkv,S,Dv]; mask True where a key is seen."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, ratio, 1) for x in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + np.asarray(bias, np.float64)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    highest = scores.max(-1, keepdims=True)
    logits = None
    if sinks is not None:
        logits = np.asarray(sinks, np.float64).reshape(1, -1, 1, 1)
        highest = np.maximum(highest, logits)
    highest = np.where(np.isfinite(highest), highest, 0)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if logits is not None:
        total = total + np.exp(logits - highest)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v


def pack(codes, bits):
    """Codes along the last axis into bytes, the first in the lowest bits."""
    per = 8 // bits
    codes = (np.asarray(codes).astype(np.int64) & (2**bits - 1)).reshape(*codes.shape[:-1], -1, per)
    return (codes << (np.arange(per) * bits)).sum(-1).astype(np.uint8)


def unpack(data, bits, signed):
    """The other way round."""
    per = 8 // bits
    codes = (data[..., None].astype(np.int64) >> (np.arange(per) * bits)) & (2**bits - 1)
    codes = codes.reshape(*data.shape[:-1], -1)
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes) if signed else codes


def expand(parameters, shape):
    """Scales or zero points of groups, for each element."""
    parameters = np.asarray(parameters, np.float64)
    for axis, (have, want) in enumerate(zip(parameters.shape, shape)):
        parameters = np.repeat(parameters, want // have, axis)
    return parameters


def dequantize(codes, scales, zeros=None, real_zeros=False):
    """f64 values of codes in groups."""
    scales = expand(scales, codes.shape)
    zeros = 0 if zeros is None else expand(zeros, codes.shape)
    return codes * scales - zeros if real_zeros else (codes - zeros) * scales


def distance(a, b):
    """Relative L2 distance."""
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)
