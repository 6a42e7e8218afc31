"""GroupQueryAttention of onnxruntime (com.microsoft), whose caches may be int8 or int4."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ..builder import GraphBuilder
from ..value import Value
from .common import REAL, Op, Options, same_memory
from .reading import Node, type_of

_ATTRIBUTES: dict[str, type] = {
    "num_heads": int, "kv_num_heads": int, "scale": float, "softcap": float, "causal": int, "local_window_size": int,
    "do_rotary": int, "rotary_interleaved": int, "smooth_softmax": int, "k_quant_type": str, "v_quant_type": str,
    "kv_cache_bit_width": int, "qk_output": int, "sliding_window_cache": int, "qk_norm_epsilon": float}
_FLAGS = ("causal", "do_rotary", "rotary_interleaved", "smooth_softmax", "sliding_window_cache")
_INPUTS = ("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
           "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight")
_GRANULARITIES = ("NONE", "PER_TENSOR", "PER_CHANNEL")
# Caches that are quantized: the type of bytes and kvant's of codes. Codes of 4 bits are stored plus 8, the first low.
_CODES = {8: ("INT8", "s8"), 4: ("UINT8", "u4")}


@dataclasses.dataclass
class _Step:
    """What one execution works on; dims are [batch, heads, tokens, head size]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    lengths: np.ndarray  # of each row, with the new tokens
    total: int
    first: bool  # a prompt, with nothing before it

    @property
    def positions(self) -> np.ndarray:
        """Of the first new token of each row."""
        return np.zeros_like(self.lengths) if self.first else self.lengths - self.q.shape[2]


class GroupQueryAttention(Op):
    """New K and V are written into the cache, quantized where it is; queries attend over what the cache holds then."""

    def __init__(self, node: Node, options: Options) -> None:
        super().__init__(node, options)
        if node.opset != 1:
            raise node.refuse(f"is of opset {node.opset} of com.microsoft; that of 1 is taken")
        self._attributes = {"scale": None, "softcap": 0.0, "causal": 1, "local_window_size": -1, "do_rotary": 0,
                            "rotary_interleaved": 0, "smooth_softmax": 0, "k_quant_type": "NONE", "v_quant_type": "NONE",
                            "kv_cache_bit_width": None, "qk_output": 0, "sliding_window_cache": 0, **node.read(_ATTRIBUTES)}
        self._check_attributes(self._attributes)
        given = {name: at < len(node.inputs) and node.inputs[at] != "" for at, name in enumerate(_INPUTS)}
        for name in ("query", "seqlens_k", "total_sequence_length"):
            if not given[name]:
                raise node.invalid(f"its input {name} is missing")
        for a, b in (("key", "value"), ("past_key", "past_value"), ("cos_cache", "sin_cache")):
            if given[a] != given[b]:
                raise node.invalid(f"{a} and {b} go together")
        for name in ("q_norm_weight", "k_norm_weight"):
            if given[name]:
                raise node.refuse(f"has the input {name}, which is not taken: normalize queries and keys before it")
        if self._attributes["do_rotary"] and not given["cos_cache"]:
            raise node.invalid("do_rotary is 1, but it has no cos_cache")
        if len(node.outputs) > 3 and node.outputs[3]:
            raise node.refuse("has the output output_qk, which is not taken")
        if self._bits and not (given["k_scale"] and given["v_scale"] and given["past_key"]):
            raise node.invalid("its cache is quantized, which takes past_key, past_value, k_scale and v_scale")

    def _check_attributes(self, a: dict[str, Any]) -> None:
        node = self.node
        for name in _FLAGS:
            if a[name] not in (0, 1):
                raise node.invalid(f"{name} is {a[name]}, but must be 0 or 1")
        for name in ("num_heads", "kv_num_heads"):
            if a.get(name, 0) < 1:
                raise node.invalid(f"{name} is {a.get(name, 'not given')}, but must be 1 or more")
        if a["num_heads"] % a["kv_num_heads"]:
            raise node.invalid(f"num_heads = {a['num_heads']} is no multiple of kv_num_heads = {a['kv_num_heads']}")
        if a["sliding_window_cache"]:
            raise node.refuse("has sliding_window_cache = 1, which is not taken: kvant's caches keep all tokens here")
        if a["qk_output"]:
            raise node.refuse(f"has qk_output = {a['qk_output']}, which is not taken")
        if a["softcap"] < 0:
            raise node.invalid(f"softcap is {a['softcap']}, but must be 0 or more")
        window = a["local_window_size"]
        if window != -1 and (window < 1 or not a["causal"]):
            raise node.invalid(f"local_window_size is {window} and causal {a['causal']}; it must be 1 or more, with causal "
                               "= 1, or -1")
        kinds = [a[f"{name}_quant_type"] for name in "kv"]
        for name, kind in zip("kv", kinds):
            if kind not in _GRANULARITIES:
                raise node.invalid(f"{name}_quant_type is {kind!r}; it may be {', '.join(_GRANULARITIES)}")
        if (kinds[0] == "NONE") != (kinds[1] == "NONE"):
            raise node.invalid(f"k_quant_type is {kinds[0]}, but v_quant_type {kinds[1]}")
        self._bits = 0 if kinds[0] == "NONE" else 8 if a["kv_cache_bit_width"] is None else a["kv_cache_bit_width"]
        if self._bits not in (0, *_CODES):
            raise node.invalid(f"kv_cache_bit_width is {self._bits}, but must be 8 or 4")

    def run(self, inputs: list[np.ndarray | None], out: list[np.ndarray | None]) -> list[np.ndarray | None]:
        given = dict(zip(_INPUTS, [*inputs, *[None] * (len(_INPUTS) - len(inputs))]))
        step = self._step(given)
        if self._attributes["do_rotary"]:
            self._rotate(step, given)
        out = [*out, *[None] * (3 - len(out))]
        self._check_past(step, given["past_key"], given["past_value"])
        present = [self._present(name, given["past_" + name], out[at], step) for at, name in ((1, "key"), (2, "value"))]
        batch, heads, queries, size = step.q.shape
        result = self.memory("output", out[0], (batch, queries, heads * size), step.q.dtype)
        view = result.reshape(batch, queries, heads, size).transpose(0, 2, 1, 3)
        if result.size:
            self._attend(step, given, present, view)
        return [result, *present]

    def _step(self, given: dict[str, np.ndarray | None]) -> _Step:
        node, query, key, value = self.node, given["query"], given["key"], given["value"]
        lengths, total = given["seqlens_k"], given["total_sequence_length"]
        heads, kv_heads = self._attributes["num_heads"], self._attributes["kv_num_heads"]
        assert query is not None and lengths is not None and total is not None
        for name in ("query", "key", "value"):
            x = given[name]
            if x is not None and (type_of(x) not in REAL or x.ndim != 3 or x.dtype != query.dtype or
                                  x.shape[:2] != query.shape[:2]):
                raise node.invalid(f"{name} is {type_of(x)}{list(x.shape)}, but must be [batch, tokens, hidden size] of "
                                   f"{', '.join(REAL)}, as query is: {type_of(query)}{list(query.shape)}")
        parts = heads if key is not None else heads + 2 * kv_heads
        if query.shape[2] % parts:
            raise node.invalid(f"query is {list(query.shape)}, which {parts} heads do not divide")
        size = query.shape[2] // parts

        def split(name: str, x: np.ndarray, heads: int) -> np.ndarray:
            if x.shape[2] != heads * size:
                raise node.invalid(f"{name} is {list(x.shape)}, but {heads} heads of {size} are {heads * size}")
            return x.reshape(*x.shape[:2], heads, size).transpose(0, 2, 1, 3)

        if key is None or value is None:
            packed = split("query", query, parts)
            q, k, v = packed[:, :heads], packed[:, heads:heads + kv_heads], packed[:, heads + kv_heads:]
        else:
            q, k, v = split("query", query, heads), split("key", key, kv_heads), split("value", value, kv_heads)
        batch, tokens = query.shape[:2]
        for name, x, shapes in (("seqlens_k", lengths, ((batch,), (batch, 1))), ("total_sequence_length", total, ((), (1,)))):
            if type_of(x) != "INT32" or x.shape not in shapes:
                raise node.invalid(f"{name} is {type_of(x)}{list(x.shape)}, but must be INT32{list(shapes[0])}")
        most = int(total.reshape(()))
        if most < tokens:
            raise node.invalid(f"total_sequence_length is {most}, fewer than the {tokens} new tokens")
        step = _Step(q, k, v, lengths.reshape(batch) + np.int32(1), most, tokens == most)
        lowest, highest = (1 if step.first else tokens), most
        if batch and not lowest <= step.lengths.min() <= step.lengths.max() <= highest:
            raise node.invalid(f"seqlens_k is {lengths.reshape(batch).tolist()}: with {tokens} new tokens and "
                               f"total_sequence_length {most} it must be from {lowest - 1} to {highest - 1}")
        return step

    def _check_past(self, step: _Step, *past: np.ndarray | None) -> None:
        """That both have the tokens that come before the new ones."""
        shown = " and ".join(f"past_{name} {'none' if x is None else list(x.shape)}" for name, x in zip(("key", "value"), past))
        tokens = [x.shape[2] if x is not None and x.ndim == 4 else 0 for x in past]
        if tokens[0] != tokens[1]:
            raise self.node.invalid(f"{shown} have not as many tokens")
        needed = int(step.positions.max(initial=0))
        if needed > tokens[0]:
            raise self.node.invalid(f"seqlens_k is {(step.lengths - 1).tolist()}: with {step.q.shape[2]} new tokens that "
                                    f"needs {needed} before them, but there are {shown}")

    def _rotate(self, step: _Step, given: dict[str, np.ndarray | None]) -> None:
        """Rotary embedding of the new queries and keys."""
        tables, ids = [given["cos_cache"], given["sin_cache"]], given["position_ids"]
        batch, tokens, size = step.q.shape[0], step.q.shape[2], step.q.shape[3]
        shown = ", ".join(f"{list(x.shape)}" for x in tables if x is not None)
        if any(x is None or x.ndim != 2 or x.shape != tables[0].shape or type_of(x) not in REAL for x in tables) or (
                tables[0].shape[1] * 2 > size):
            raise self.node.invalid(f"cos_cache and sin_cache are {shown}, but must be [positions, {size // 2} or less]")
        at = step.positions[:, None] + np.arange(tokens)
        if ids is not None:
            if type_of(ids) != "INT64" or ids.shape != (batch, tokens):
                raise self.node.invalid(f"position_ids is {type_of(ids)}{list(ids.shape)}, but must be INT64{[batch, tokens]}")
            # Of a first prompt onnxruntime reads the first alone.
            at = np.broadcast_to(ids[:1, :1] + np.arange(tokens), ids.shape) if step.first and ids.size else ids
        if at.size and not 0 <= at.min() <= at.max() < tables[0].shape[0]:
            raise self.node.invalid(f"positions are {at.min()} to {at.max()}, but cos_cache has {tables[0].shape[0]}")
        cos, sin = (x.astype(np.float32)[at][:, None] for x in tables)
        half = cos.shape[-1]
        a, b = (slice(0, half), slice(half, 2 * half))
        if self._attributes["rotary_interleaved"]:
            a, b = slice(0, 2 * half, 2), slice(1, 2 * half, 2)

        def rotated(x: np.ndarray) -> np.ndarray:
            result = np.array(x)
            first, second = x[..., a].astype(np.float32), x[..., b].astype(np.float32)
            result[..., a], result[..., b] = first * cos - second * sin, second * cos + first * sin
            return result

        step.q, step.k = rotated(step.q), rotated(step.k)

    def _present(self, name: str, past: np.ndarray | None, out: np.ndarray | None, step: _Step) -> np.ndarray:
        """Memory of the cache with the past in it."""
        batch, heads, _, size = step.k.shape
        kind, dtype = type_of(step.k), step.k.dtype
        if self._bits:
            kind, dtype = _CODES[self._bits][0], np.dtype("int8" if self._bits == 8 else "uint8")
        if self._bits == 4:
            if size % 2:
                raise self.node.invalid(f"heads of {size} elements of 4 bits are not whole bytes")
            size //= 2
        capacity = step.total
        if past is not None:
            have = [*past.shape[:2], *past.shape[3:]]
            if past.ndim != 4 or have != [batch, heads, size] or past.dtype != dtype:
                raise self.node.invalid(f"past_{name} is {type_of(past)}{list(past.shape)}, but must be "
                                        f"{kind}[{batch}, {heads}, capacity, {size}]")
            capacity = max(capacity, past.shape[2])
        present = self.memory(f"present_{name}", out, (batch, heads, capacity, size), dtype)
        if past is None or not same_memory(past, present):
            tokens = 0 if past is None or step.first else past.shape[2]
            if past is not None:
                present[:, :, :tokens] = past[:, :, :tokens]
            present[:, :, tokens:] = 0
        return present

    def _attend(
        self, step: _Step, given: dict[str, np.ndarray | None], present: list[np.ndarray], result: np.ndarray,
    ) -> None:
        a, (batch, heads, queries, size) = self._attributes, step.q.shape
        capacity, kv_heads = present[0].shape[2], step.k.shape[1]
        inputs: dict[str, np.ndarray | None] = {"query": step.q, "key": step.k, "value": step.v, "lengths": step.lengths,
                                                "positions": step.positions, "bias": None, "sinks": None}
        groups = {}
        if self._bits:
            for name in ("key", "value"):
                scales = self._scales(name, given[f"{name[0]}_scale"], kv_heads, size)
                inputs[name + "_scale"], groups[name] = scales, scales.ndim == 4
                if self._bits == 4:
                    inputs[name + "_zero"] = np.full(scales.shape, 8, np.int32)
        bias = given["attention_bias"]
        if bias is not None:
            want = (batch, heads, queries, step.total)
            if bias.ndim != 4 or type_of(bias) not in REAL or any(
                    x not in (1, y) for x, y in zip(bias.shape[:2], want)) or bias.shape[2:] != want[2:]:
                raise self.node.invalid(f"attention_bias is {type_of(bias)}{list(bias.shape)}, but must be {list(want)}, "
                                        "the first two of which may be 1")
            inputs["bias"] = np.pad(bias, [(0, 0)] * 3 + [(0, capacity - step.total)])
        sinks = given["head_sink"]
        if sinks is not None or a["smooth_softmax"]:
            sinks = np.zeros(heads, np.float32) if sinks is None else sinks
            if sinks.shape != (heads,) or type_of(sinks) not in REAL:
                raise self.node.invalid(f"head_sink is {type_of(sinks)}{list(sinks.shape)}, but must be [{heads}]")
            inputs["sinks"] = sinks

        def make(g: GraphBuilder, values: dict[str, Value]) -> dict[str, Value]:
            outputs, loaded = {}, []
            for name in ("key", "value"):
                scales, zeros = values.get(name + "_scale"), values.get(name + "_zero")
                group = [batch, 1, capacity, 1] if groups.get(name) else None
                kind = _CODES[self._bits][1] if self._bits else values[name].type
                cache = g.append(values[name], values["positions"], capacity, kind, scales=scales, zero_points=zeros,
                                 group_shape=group).codes
                outputs["present_" + name] = cache
                loaded.append(cache if scales is None
                              else g.dynamic_dequantize(cache, scales, zeros, group_shape=group))
            window = a["local_window_size"]
            outputs["output"] = g.scaled_dot_product_attention(
                values["query"], *loaded, kv_lengths=values["lengths"], bias=values.get("bias"), sinks=values.get("sinks"),
                scale=a["scale"] or None, soft_cap=a["softcap"] or None, bottom_right=not step.first,
                left_window=window - 1 if window > 0 else -1, right_window=0 if a["causal"] else -1)
            return outputs

        self.execute("output", inputs, {"present_key": present[0], "present_value": present[1], "output": result}, make,
                     (step.first, *groups.values()))

    def _scales(self, name: str, scales: np.ndarray | None, heads: int, size: int) -> np.ndarray:
        """[1], or [1, heads, 1, size] of channels."""
        kind = self._attributes[f"{name[0]}_quant_type"]
        want = (1,) if kind == "PER_TENSOR" else (1, heads, 1, size)
        assert scales is not None
        if type_of(scales) != "FLOAT" or scales.size != np.prod(want) or scales.ndim > 4:
            raise self.node.invalid(f"{name[0]}_scale is {type_of(scales)}{list(scales.shape)}, but must be FLOAT{list(want)}, "
                                    f"as {name[0]}_quant_type is {kind}")
        return scales.reshape(want)
