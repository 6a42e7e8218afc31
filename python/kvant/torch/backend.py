"""torch.compile(model, backend="kvant"): attention by kvant, the rest by inductor.

In Dynamo's graph scaled_dot_product_attention becomes one op, so that nothing takes it apart. In the
graph of ATen ops, before any other decomposition, that op and what is spelt as two products around a
softmax are looked at, with what dequantizes K and V: what kvant takes becomes kvant::attention, and
what it does not is decomposed as ever. Every attention that was seen has a Report.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .. import errors
from . import encoder, flex, nodes, ops, permutes, rules
from .codes import Codes, codes_of, why_no_codes

_library = torch.library.Library("kvant", "FRAGMENT")
_library.define("sdpa(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? slopes, float? scale, "
                "float? soft_cap, int left_window, int right_window, bool tokens_first, bool gqa) -> Tensor")


@torch.library.impl(_library, "sdpa", "CompositeExplicitAutograd")
def _sdpa(q: Any, k: Any, v: Any, mask: Any, slopes: Any, scale: Any, soft_cap: Any, left: int,
          right: int, tokens_first: bool, gqa: bool) -> Any:
    """What attention is decomposed into that kvant does not take."""
    result = _attend(q, k, v, mask, slopes, scale, soft_cap, left, right, gqa)
    if not tokens_first:
        return result.contiguous()
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _attend(q: Any, k: Any, v: Any, mask: Any, slopes: Any, scale: Any, soft_cap: Any, left: int,
            right: int, gqa: bool) -> Any:
    if soft_cap is None and slopes is None and left < 0 and right <= 0:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale,
                                              is_causal=right == 0, enable_gqa=gqa)
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    distance = (torch.arange(k.shape[2], device=q.device)
                - torch.arange(q.shape[2], device=q.device)[:, None])
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    hidden = distance < -left if left >= 0 else torch.zeros_like(distance, dtype=torch.bool)
    if right >= 0:
        hidden = hidden | (distance > right)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num(0.0) @ v


@torch.library.register_fake("kvant::sdpa", lib=_library)
def _fake_sdpa(q: Any, k: Any, v: Any, *words: Any) -> Any:
    batch, heads, queries, _ = q.shape
    if not words[-2]:
        return q.new_empty(batch, heads, queries, v.shape[-1])
    return q.new_empty(batch, queries, heads, v.shape[-1]).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of one attention."""

    where: str
    """The line that it is on."""
    form: str
    """How it is written: "scaled_dot_product_attention", "softmax of a product", "FlexAttention"."""
    fused: bool
    text: str
    """What runs, or why kvant does not run it."""

    def __str__(self) -> str:
        return f"{self.where}: {self.form}: {self.text}"


# By the module that was compiled, or the code of a function.
_reports: weakref.WeakKeyDictionary[Any, list[list[Report]]] = weakref.WeakKeyDictionary()
_reports_lock = threading.Lock()


def kvant(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend of torch.compile. It has no options."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if options.get("options") or options.get("mode"):
        raise errors.invalid(f'backend "kvant" has no options, but was given {options}')
    reports: list[Report] = []
    owner = _owner()
    if owner is not None:
        with _reports_lock:
            _reports.setdefault(owner, []).append(reports)
    why = ""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in example_inputs):
        why = "gradients are asked for, so it is left to PyTorch"
    elif not _keep_flex(gm, reports):
        why = "it is beside a FlexAttention that is inductor's, whose graph cannot be divided"
    if why:
        reports.extend(_report(node, False, why) for node in _calls(gm, F.scaled_dot_product_attention, torch.softmax, F.softmax))
        reports.extend(_report(node, False, why) for node in gm.graph.find_nodes(op="call_method", target="softmax"))
        return compile_fx(gm, example_inputs)
    _keep_sdpa(gm, reports)
    for node in _calls(gm, torch._transformer_encoder_layer_fwd):
        if not node.meta["example_value"].is_nested:
            node.target = encoder.layer
    gm.recompile()

    def lower(aten_gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _fuse(aten_gm, reports)
        fakes = [node.meta["val"] for node in aten_gm.graph.nodes if node.op == "placeholder"]
        return compile_fx_inner(_decomposed(aten_gm, fakes), fakes)

    return aot_autograd(fw_compiler=lower, inference_compiler=lower)(gm, example_inputs)


def explain(compiled: Any) -> str:
    """For each attention of a compiled model or function what became of it, and why: a line each."""
    graphs = _graphs_of(compiled)
    if not graphs:
        return ('no graph of it was compiled by the backend "kvant": it was not called yet, or Dynamo left it to Python '
                '(TORCH_LOGS=graph_breaks says why)')
    return "\n".join(map(str, reports_of(compiled))) or f"there is no attention in its graphs, of which there are {len(graphs)}"


def reports_of(compiled: Any) -> list[Report]:
    """The reports of a model or function that torch.compile gave, in the order of its attentions.

    Functions of one code, as closures are that a loop makes, share theirs.
    """
    # A graph that was compiled again, for other shapes, says the same again.
    return list(dict.fromkeys(report for reports in _graphs_of(compiled) for report in reports))


def _graphs_of(compiled: Any) -> list[list[Report]]:
    """The reports of each graph."""
    original = getattr(compiled, "_orig_mod", None) or getattr(
        compiled, "_torchdynamo_orig_callable", compiled)
    # Where a graph breaks, modules within are compiled by themselves.
    modules = list(original.modules()) if isinstance(original, torch.nn.Module) else []
    code = getattr(getattr(original, "__func__", original), "__code__", None)
    with _reports_lock:
        return [reports for owner, several in _reports.items()
                if any(owner is module for module in modules) or _is_part(owner, code)
                for reports in several]


def _owner() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    # self, also where a graph broke; or what Dynamo's own wrapper calls.
    names = [*frame.f_code.co_varnames[:1], "self", "fn"]
    own = [frame.f_locals[name] for name in names if name in frame.f_locals]
    return next((x for x in own if isinstance(x, torch.nn.Module)), frame.f_code)


def _is_part(owner: Any, code: Any) -> bool:
    """Dynamo compiles what is behind a graph break as a function of its own."""
    if code is None or not isinstance(owner, types.CodeType):
        return False
    resumed = f"torch_dynamo_resume_in_{code.co_name}_"
    return owner is code or (
        owner.co_filename == code.co_filename and owner.co_name.startswith(resumed))


def _calls(gm: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


_FRAME = re.compile(r'File "(.*)", line (\d+)')


def _report(node: fx.Node, fused: bool, text: str) -> Report:
    """The line is the caller's, not torch's own."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    form = "scaled_dot_product_attention"
    if any(file.endswith("/flex_attention.py") for file, _ in frames):
        form = "FlexAttention"
    elif node.target is nodes.aten._softmax.default:
        form = "softmax of a product"
    elif node.target in (torch.softmax, F.softmax, "softmax"):
        form = "softmax"
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames or [("?", "?")]
    return Report(f"{own[-1][0].rpartition('/')[2]}:{own[-1][1]}", form, fused, text)


def _keep_sdpa(gm: fx.GraphModule, reports: list[Report]) -> None:
    for node in _calls(gm, F.scaled_dot_product_attention):
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = {**dict(zip(names, node.args)), **node.kwargs}
        q, k, v = (list(getattr(given[name].meta.get("example_value"), "shape", ())) for name in names[:3])
        why = ""
        if given.get("dropout_p"):
            why = "it has dropout"
        elif len(q) < 2 or len(q) != len(k) or k[:-1] != v[:-1] or q[:-3] != k[:-3] or (len(q) > 2 and q[-3] < k[-3]):
            why = f"Q {q}, K {k} and V {v} are not of one batch and its heads"
        if why:
            reports.append(_report(node, False, why))
            continue
        with gm.graph.inserting_before(node):
            _as_autocast(gm, node, given)
            kept = gm.graph.call_function(torch.ops.kvant.sdpa.default if len(q) == 4 else _sdpa_of_any_dims, (
                given["query"], given["key"], given["value"], given.get("attn_mask"), None,
                given.get("scale"), None, -1, 0 if given.get("is_causal") else -1,
                nodes.is_tokens_first(node.meta["example_value"]), bool(given.get("enable_gqa", False))))
        kept.meta = dict(node.meta)
        node.replace_all_uses_with(kept)
        gm.graph.erase_node(node)


def _sdpa_of_any_dims(q: Any, k: Any, v: Any, mask: Any, *words: Any) -> Any:
    """kvant::sdpa of [.., heads, tokens, channels]: what is before heads becomes one batch, and what is missing, 1."""
    batch, dims = q.shape[:-3], q.shape[:-1]
    if mask is not None and mask.dim() > 3:
        own = mask.shape[-3:]
        mask = mask.reshape(own) if mask.numel() == own.numel() else mask.expand(*batch, *own).reshape(-1, *own)
    q, k, v = (x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4) for x in (q, k, v))
    return torch.ops.kvant.sdpa(q, k, v, mask, *words).reshape(*dims, v.shape[-1])


def _as_autocast(gm: fx.GraphModule, node: fx.Node, given: dict[str, Any]) -> None:
    """Casts arguments as autocast does, of which kvant's op knows nothing: to the type of what was traced."""

    def type_of(x: Any) -> torch.dtype | None:
        return getattr(x.meta.get("example_value"), "dtype", None) if isinstance(x, fx.Node) else None

    want, have = type_of(node), {name: type_of(x) for name, x in given.items()}
    if want is None or all(have[name] in (None, want) for name in ("query", "key", "value")):
        return
    for name, dtype in have.items():
        if dtype is not None and dtype.is_floating_point and dtype != want:
            given[name] = gm.graph.call_method("to", (given[name], want))


def _keep_flex(gm: fx.GraphModule, reports: list[Report]) -> bool:
    """Whether all can be kept; if one cannot, none is."""
    nodes = _calls(gm, torch.ops.higher_order.flex_attention)
    whys = [_read_flex(gm, node, replace=False) for node in nodes]
    for node, why in zip(nodes, whys):
        if any(whys):
            reports.append(_report(node, False, why or "it is beside another that kvant does not take"))
        else:
            _read_flex(gm, node, replace=True)
    gm.recompile()
    return not any(whys)


def _read_flex(gm: fx.GraphModule, node: fx.Node, replace: bool) -> str:
    """Why it cannot be kept."""
    q, k, v, score_mod, block_mask, scale, _, score_buffers, mask_buffers = node.args
    outputs = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if not outputs or any(user.users for user in node.users if user not in outputs):
        return "its log-sum-exp is read"
    try:
        windows = flex.windows_of(getattr(gm, block_mask[-1].target))
        # Without a block mask there is one block, of this size.
        if windows == flex.Windows() and not (isinstance(block_mask[-2], int) and block_mask[-2] >= 1 << 30):
            return "its mask is one of blocks alone"
        scores = flex.scores_of(getattr(gm, score_mod.target))
    except flex.Declined as why:
        return str(why)
    if not replace:
        return ""
    slopes = None
    with gm.graph.inserting_before(node):
        if scores.slopes is not None:
            placeholders = [x for x in scores.slopes.graph.nodes if x.op == "placeholder"]
            slopes = score_buffers[placeholders.index(scores.slopes) - 5]
            heads, given = q.meta["example_value"].shape[1], slopes.meta["example_value"].shape[0]
            if isinstance(heads, int) and isinstance(given, int) and given > heads:
                slopes = gm.graph.call_function(operator.getitem, (slopes, slice(None, heads)))
            if scores.sign < 0:
                slopes = gm.graph.call_function(torch.neg, (slopes,))
        kept = gm.graph.call_function(torch.ops.kvant.sdpa.default, (
            q, k, v, None, slopes, scale, scores.soft_cap, windows.left, windows.right,
            nodes.is_tokens_first(outputs[0].meta["example_value"]), True))
    kept.meta = dict(outputs[0].meta)
    for user in list(node.users):
        if user in outputs:
            user.replace_all_uses_with(kept)
        gm.graph.erase_node(user)
    # Of what makes the block mask nothing is erased: parts of it look dead that are not (vmap's levels).
    gm.graph.erase_node(node)
    return ""


def _fuse(gm: fx.GraphModule, reports: list[Report]) -> None:
    if gm.graph.find_nodes(op="call_function", target=nodes.aten._softmax.default):
        permutes.gather(gm.graph)
    for node in list(gm.graph.nodes):
        if nodes.is_call(node, torch.ops.kvant.sdpa.default):
            found: Any = rules.stated_attention(node)
        elif nodes.is_call(node, nodes.aten._scaled_dot_product_flash_attention_for_cpu.default):
            found = rules.native_attention(node)
        elif nodes.is_call(node, nodes.aten._softmax.default):
            found = rules.eager_attention(node)
        else:
            continue
        if isinstance(found, str):
            reports.append(_report(node, False, found))
        elif found is not None:
            reports.append(_report(node, *_lower(found)))
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _lower(found: rules.Attention) -> tuple[bool, str]:
    """Puts kvant::attention in its place, if kvant takes it; what runs, or why not."""
    before, notes = found.output, []
    k, v = rules.unrepeated(found.k), rules.unrepeated(found.v)
    if nodes.shape(k)[1] != nodes.shape(v)[1]:
        k, v = found.k, found.v
    sources: list[Codes | None] = []
    for name, node in (("K", k), ("V", v)):
        try:
            sources.append(codes_of(node, before))
        except nodes.Declined as why:
            notes.append(f"{name} is not read as codes: {why}")
            sources.append(None)
        else:
            if sources[-1] is None and (what := why_no_codes(node)):
                notes.append(f"{name} {what}")
    # What has its codes refused is dequantized before; the other's may still be taken.
    for form in itertools.product(*(((source,) if source is None else (source, None)) for source in sources)):
        arguments = _arguments(found, (k, v), form)
        try:
            described = [_describe(x) if isinstance(x, fx.Node) else x for x in arguments]
            text = ops.explain(*described)
        except errors.Error as why:
            notes.append(str(why))
            continue
        call = nodes.add(before, torch.ops.kvant.attention.default, *arguments)
        if found.flat is not None:
            call = nodes.add(before, nodes.aten.flatten.using_ints, call, *found.flat)
        if found.mixed is not None:
            sizes, order = found.mixed
            call = nodes.add(before, nodes.aten.unflatten.int, call, 1, sizes)
            call = nodes.add(before, nodes.aten.permute.default, call, [0, *(axis + 1 for axis in order), len(order) + 1])
            call = nodes.add(before, nodes.aten.flatten.using_ints, call, 1, len(order))
        if found.turned:
            call = nodes.add(before, nodes.aten.transpose.int, call, -2, -1)
            call = nodes.add(before, nodes.aten.clone.default, call, memory_format=torch.contiguous_format)
        if (wanted := nodes.value(before).dtype) != nodes.value(call).dtype:  # of queries that were converted
            call = nodes.add(before, torch.ops.prims.convert_element_type.default, call, wanted)
        call.meta = {**before.meta, "val": call.meta["val"]}
        before.replace_all_uses_with(call)
        read = [f"{name} is {codes}" for name, codes in zip("KV", form) if codes is not None]
        return True, "; ".join([*read, text, *notes])
    return False, "; ".join(notes)


def _arguments(found: rules.Attention, plain: tuple[fx.Node, fx.Node],
               form: Sequence[Codes | None]) -> tuple[Any, ...]:
    data = [node if codes is None else codes.codes for node, codes in zip(plain, form)]
    parameters = [x for codes in form
                  for x in ((None, None) if codes is None else (codes.scales, codes.zero_points))]
    types = ["" if codes is None else codes.type for codes in form]
    return (found.q, *data, *parameters, found.bias, found.mask, found.slopes, found.sinks, *types, found.scale,
            found.soft_cap, found.mask_fill, found.left_window, found.right_window,
            False, found.tokens_first, found.nan_rows)


class _Described:
    """What ops asks of a tensor, with numbers for what is symbolic."""

    def __init__(self, x: torch.Tensor) -> None:
        number = torch.fx.experimental.symbolic_shapes.optimization_hint
        self.dtype, self.device = x.dtype, x.device
        self.shape = tuple(d if isinstance(d, int) else number(d, 64) for d in x.shape)
        self._stride = tuple(d if isinstance(d, int) else number(d, 64) for d in x.stride())

    def stride(self) -> tuple[int, ...]:
        return self._stride

    def dim(self) -> int:
        return len(self.shape)


def _describe(node: fx.Node) -> _Described:
    return _Described(nodes.value(node))


def _decomposed(gm: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """As inductor wants it. Attention that kvant did not take is decomposed with the rest."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    # What is decomposed may have other strides than it was traced with (cat with an empty tensor, as caches begin
    # with): what cannot be viewed then is copied.
    for node in gm.graph.find_nodes(op="call_function", target=nodes.aten.view.default):
        node.target = nodes.aten.reshape.default
    gm.recompile()
    table = {**select_decomp_table(), torch.ops.kvant.sdpa.default: _sdpa}
    decomposed = make_fx(gm, decomposition_table=table)(*fakes)
    # What inductor does to a graph before compile_fx_inner: it lowers no random numbers without.
    with V.set_fake_mode(detect_fake_mode(list(fakes))):
        return joint_graph_passes(decomposed)
