"""Attention of ONNX, opsets 23 to 25."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.defs

from ..builder import GraphBuilder
from ..value import Value
from .common import REAL, Op, Options, same_memory
from .reading import Node, type_of

_ATTRIBUTES: dict[str, type] = {"is_causal": int, "q_num_heads": int, "kv_num_heads": int, "scale": float, "softcap": float,
                                "softmax_precision": int, "qk_matmul_output_mode": int}
_WINDOWS: dict[str, type] = {"left_window_size": int, "right_window_size": int}
# Its versions, by the opset that they are since: how many inputs they have and which attributes.
_VERSIONS = {23: (6, _ATTRIBUTES), 24: (7, _ATTRIBUTES), 25: (7, _ATTRIBUTES | _WINDOWS)}
_PRECISIONS = {1: "FLOAT", 10: "FLOAT16", 11: "DOUBLE", 16: "BFLOAT16"}
_INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")


def _version(node: Node) -> int:
    """The opset that it is since."""
    newest, since = onnx.defs.onnx_opset_version(), 0
    if min(_VERSIONS) <= node.opset <= newest:
        since = onnx.defs.get_schema(node.op, node.opset, "").since_version
    if since not in _VERSIONS:
        raise node.refuse(f"is of opset {node.opset}; taken is what Attention is since opset 23, 24 and 25, which onnx "
                          f"{onnx.__version__} has up to opset {newest}")
    return since


class Attention(Op):
    """scores = cap(Q K^T scale) + mask; Y = softmax(scores) V; K and V after those of the past, which becomes the
    present."""

    def __init__(self, node: Node, options: Options) -> None:
        super().__init__(node, options)
        inputs, taken = _VERSIONS[_version(node)]
        self._read(node.read(taken))
        given = [name != "" for name in node.inputs] + [False] * 7
        if len(node.inputs) > inputs or not all(given[:3]):
            raise node.invalid(f"it has {len(node.inputs)} inputs; Q, K and V must be given, and opset {node.opset} has "
                               f"{inputs}")
        if given[4] != given[5]:
            raise node.invalid("past_key and past_value go together")
        if given[4] and given[6]:
            raise node.invalid("past_key and nonpad_kv_seqlen exclude each other")

    def _read(self, attributes: dict[str, Any]) -> None:
        node, get = self.node, attributes.get
        self._causal = get("is_causal", 0)
        self._heads = (get("q_num_heads"), get("kv_num_heads"))
        self._scale, self._cap = get("scale"), get("softcap", 0.0)
        self._mode = get("qk_matmul_output_mode", 0)
        self._windows = (get("left_window_size", -1), get("right_window_size", -1))
        self._double = False
        if self._causal not in (0, 1):
            raise node.invalid(f"is_causal is {self._causal}, but must be 0 or 1")
        if self._cap < 0:
            raise node.invalid(f"softcap is {self._cap}, but must be 0 or more")
        if self._mode not in range(4):
            raise node.invalid(f"qk_matmul_output_mode is {self._mode}, but must be 0, 1, 2 or 3")
        if min(self._windows) < -1:
            raise node.invalid(f"left_window_size and right_window_size are {self._windows}, but must be -1 or more")
        precision = get("softmax_precision")
        if precision is not None:
            if precision not in _PRECISIONS:
                raise node.invalid(f"softmax_precision is {precision}; types are {_PRECISIONS}")
            # Softmax is f32 in all kernels, as good as any type but this.
            self._double = _PRECISIONS[precision] == "DOUBLE"

    def run(self, inputs: list[np.ndarray | None], out: list[np.ndarray | None]) -> list[np.ndarray | None]:
        q, k, v, mask, past_k, past_v, lengths = [*inputs, *[None] * (7 - len(inputs))]
        out = [*out, *[None] * (4 - len(out))]
        assert q is not None and k is not None and v is not None
        wanted = [name != "" for name in self.node.outputs] + [False] * 3
        for name, x in zip(_INPUTS, (q, k, v)):
            if type_of(x) not in REAL:
                raise self.node.refuse(f"has {name} of {type_of(x)}; {', '.join(REAL)} are taken")
        flat = q.ndim == 3
        q, k, v = self._four_dims(q, k, v)
        offset = 0
        if past_k is not None and past_v is not None:
            if past_k.shape[2:3] != past_v.shape[2:3]:
                raise self.node.invalid(f"past_key {list(past_k.shape)} and past_value {list(past_v.shape)} have not as "
                                        "many tokens")
            offset = past_k.shape[2] if past_k.ndim == 4 else 0
            k = self._after("past_key", past_k, k, out[1])
            v = self._after("past_value", past_v, v, out[2])
        (batch, heads, queries, _), tokens, width = q.shape, k.shape[2], v.shape[3]
        if lengths is not None:
            lengths = self._lengths(lengths, batch, tokens)
        if mask is not None:
            self._check_mask(mask, (batch, heads, queries, tokens), lengths)
        shape = (batch, queries, heads * width) if flat else (batch, heads, queries, width)
        y = self.memory("Y", out[0], shape, q.dtype)
        view = y.reshape(batch, queries, heads, width).transpose(0, 2, 1, 3) if flat else y
        self._attend(q, k, v, mask, lengths, offset, view)
        results: list[np.ndarray | None] = [y, None, None, None]
        if past_k is not None:
            results[1:3] = k, v
        elif wanted[1] or wanted[2]:
            for at, x in ((1, k), (2, v)):
                results[at] = self.memory(self.node.outputs[at], out[at], x.shape, x.dtype)
                results[at][...] = x
        if wanted[3]:
            scores = self.memory("qk_matmul_output", out[3], (batch, heads, queries, tokens), q.dtype)
            self._scores(q, k, mask, lengths, offset, scores)
            results[3] = scores
        return results

    def _four_dims(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[batch, heads, tokens, head size] each."""
        node, arrays = self.node, (q, k, v)
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(_INPUTS, arrays))
        if {x.ndim for x in arrays} not in ({3}, {4}):
            raise node.invalid(f"Q, K and V must have 3 dims or 4, all as many, but are {shapes}")
        if q.ndim == 3:
            if None in self._heads or min(self._heads) < 1:
                raise node.invalid("Q, K and V of 3 dims need q_num_heads and kv_num_heads")
            of = (self._heads[0], self._heads[1], self._heads[1])
            if any(x.shape[2] % heads for x, heads in zip(arrays, of)):
                raise node.invalid(f"{shapes} are not divided by q_num_heads = {of[0]} and kv_num_heads = {of[1]}")
            q, k, v = (x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)
                       for x, heads in zip(arrays, of))
        elif self._heads != (None, None):
            if node.opset >= 25:
                raise node.invalid("q_num_heads and kv_num_heads are of inputs of 3 dims, and Q has 4")
            for want, have in zip(self._heads, (q.shape[1], k.shape[1])):
                if want not in (None, have):
                    raise node.invalid(f"q_num_heads and kv_num_heads are {self._heads}, but inputs are {shapes}")
        fits = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
        if not fits or not k.shape[1] or q.shape[1] % k.shape[1]:
            raise node.invalid(f"{shapes} are no queries, keys and values of one batch, with as many heads, or a multiple")
        return q, k, v

    def _after(self, name: str, past: np.ndarray, new: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """The past, and then what is new, along axis 2; the past is not copied where it is in out already."""
        same = (past.ndim, past.dtype) == (4, new.dtype) and past.shape[:2] + past.shape[3:] == new.shape[:2] + new.shape[3:]
        if not same:
            raise self.node.invalid(f"{name} is {type_of(past)}{list(past.shape)}, but must be {type_of(new)} of "
                                    f"{list(new.shape)}, with any number of tokens")
        tokens = past.shape[2]
        present = self.memory(name.replace("past", "present"), out,
                              (*new.shape[:2], tokens + new.shape[2], new.shape[3]), new.dtype)
        if not same_memory(past, present[:, :, :tokens]):
            present[:, :, :tokens] = past
        present[:, :, tokens:] = new
        return present

    def _lengths(self, lengths: np.ndarray, batch: int, tokens: int) -> np.ndarray:
        what = f"nonpad_kv_seqlen is {type_of(lengths)}{list(lengths.shape)} = {lengths.tolist()}"
        if lengths.shape != (batch,) or type_of(lengths) != "INT64":
            raise self.node.invalid(f"{what}, but must be INT64[{batch}]")
        if batch and not 0 <= lengths.min() <= lengths.max() <= tokens:
            raise self.node.invalid(f"{what}, but K has {tokens} tokens")
        return lengths.astype(np.int32)

    def _check_mask(self, mask: np.ndarray, shape: tuple[int, ...], lengths: np.ndarray | None) -> None:
        if type_of(mask) not in (*REAL, "BOOL"):
            raise self.node.refuse(f"has attn_mask of {type_of(mask)}; {', '.join(REAL)} and BOOL are taken")
        columns = mask.shape[-1] if mask.ndim else -1
        want = [1] * (4 - mask.ndim) + list(mask.shape)
        if len(want) > 4 or columns > shape[3] or columns < min(1, shape[3]) or any(
                have not in (1, all_of) for have, all_of in zip(want[:3], shape)):
            raise self.node.invalid(f"attn_mask {list(mask.shape)} does not broadcast to {list(shape)}, nor is its last "
                                    "dim a shorter one")
        if lengths is not None and lengths.size and lengths.max() > columns:
            raise self.node.invalid(f"attn_mask has {columns} columns, but nonpad_kv_seqlen is {lengths.tolist()}")

    def _attend(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray | None, lengths: np.ndarray | None,
        offset: int, y: np.ndarray,
    ) -> None:
        left, right = self._windows
        right = 0 if self._causal else right
        # A query sees keys [first, end) at most: those before the window of the first, behind that of the last, and
        # behind a mask, are left out.
        first, end = 0, k.shape[2] if mask is None else min(k.shape[2], mask.shape[-1])
        if lengths is None:
            first = max(0, offset - left) if left >= 0 else 0
            end = min(end, q.shape[2] + offset + right) if right >= 0 else end
            # Windows are counted from key `first`.
            left = left - (offset - first) if left >= 0 else -1
            right = right + (offset - first) if right >= 0 else -1
        if end <= first or not q.size:
            y[...] = 0
            return
        inputs = {"Q": q, "K": k[:, :, first:end], "V": v[:, :, first:end], "attn_mask": mask, "lengths": lengths}
        if mask is not None:
            inputs["attn_mask"] = mask[..., first:end]
        by_bits = mask is not None and type_of(mask) == "BOOL"

        def make(g: GraphBuilder, values: dict[str, Value]) -> dict[str, Value]:
            bias = values.get("attn_mask")
            return {"Y": g.scaled_dot_product_attention(
                values["Q"], values["K"], values["V"], scale=self._scale, soft_cap=self._cap or None,
                bias=None if by_bits else bias, select=bias if by_bits else None, kv_lengths=values.get("lengths"),
                bottom_right=lengths is not None, left_window=left, right_window=right)}

        self.execute("Y", inputs, {"Y": y}, make, (left, right), "oracle" if self._double else None)

    def _scores(
        self, q: np.ndarray, k: np.ndarray, mask: np.ndarray | None, lengths: np.ndarray | None, offset: int,
        out: np.ndarray,
    ) -> None:
        """What qk_matmul_output is, op by op."""
        batch, heads, queries, tokens = out.shape
        groups = (batch, k.shape[1], heads // k.shape[1])
        inputs: dict[str, np.ndarray | None] = {
            "Q": q.reshape(*groups, *q.shape[2:]), "K": k.reshape(batch, k.shape[1], 1, *k.shape[2:])}
        if self._mode > 1:
            seen, bias = self._seen(mask, lengths, offset, (batch, queries, tokens))
            for name, x in (("seen", seen), ("bias", bias)):
                if x is not None:
                    x = x.reshape([1] * (4 - x.ndim) + list(x.shape))
                    inputs[name] = x.reshape(x.shape[0], *(groups[1:] if x.shape[1] > 1 else (1, 1)), *x.shape[2:])
        scale = q.shape[3] ** -0.5 if self._scale is None else self._scale

        def make(g: GraphBuilder, values: dict[str, Value]) -> dict[str, Value]:
            scores = g.matmul(values["Q"], values["K"], transpose_b=True, type="f32") * scale
            if self._mode > 0 and self._cap > 0:
                scores = g.tanh(scores / self._cap) * self._cap
            if "bias" in values:
                scores = scores + values["bias"]
            if "seen" in values:
                scores = g.select(values["seen"], scores, float("-inf"))
            return {"scores": g.type_cast(g.softmax(scores) if self._mode == 3 else scores, values["Q"].type)}

        self.execute("qk_matmul_output", inputs, {"scores": out.reshape(*groups, queries, tokens)}, make, (), "oracle")

    def _seen(
        self, mask: np.ndarray | None, lengths: np.ndarray | None, offset: int, shape: tuple[int, int, int],
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Which scores are not hidden, and what is added to them; both broadcast to them."""
        batch, queries, tokens = shape
        left, right = self._windows
        right = 0 if self._causal else right
        key, seen, bias = np.arange(tokens), np.ones((1, 1, 1, tokens), bool), None
        if mask is not None:
            padded = np.zeros((*mask.shape[:-1], tokens), mask.dtype)
            padded[..., :mask.shape[-1]] = mask
            seen = seen & (key < mask.shape[-1])
            if mask.dtype == bool:
                seen = seen & padded
            else:
                bias = padded.astype(np.float32)
                seen, bias = seen & ~np.isneginf(bias), np.where(np.isneginf(bias), 0, bias)
        shift = np.array([offset]) if lengths is None else lengths - queries
        gap = key - (np.arange(queries)[:, None] + shift[:, None, None, None])
        for window, hidden in ((left, gap < -left), (right, gap > right)):
            if window >= 0:
                seen = seen & ~hidden
        if lengths is not None:
            seen = seen & (key < lengths[:, None, None, None])
        return None if seen.all() else seen, bias
