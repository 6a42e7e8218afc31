"""What tests of torch.compile(backend="kvant") share. Their modules skip themselves where torch is missing."""

import itertools
import types

import pytest
import torch
import torch.nn.functional as F

import kvant
import kvant.torch

BATCH, HEADS, GROUPED, TOKENS, SIZE = 2, 3, 2, 40, 64
GROUP = 32

torch.manual_seed(0)  # for what tests' modules and parameters draw as they are imported


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield


_runs = itertools.count()


def run(function, *arguments, bound=2e-5, **compiling):
    """The one report of a function whose numbers are right."""
    # Reports, and how often torch compiles, are by code, which closures share.
    code = function.__code__
    function = types.FunctionType(code.replace(co_name=f"{code.co_name}_{next(_runs)}"), function.__globals__, None,
                                  function.__defaults__, function.__closure__)
    compiled = torch.compile(function, backend="kvant", fullgraph=True, **compiling)
    want, got = function(*arguments), compiled(*arguments)
    assert got.shape == want.shape and got.dtype == want.dtype and got.stride() == want.stride()
    off = (got.double() - want.double()).norm() / want.double().norm()
    assert off < bound, off
    (report,) = kvant.torch.reports_of(compiled)
    assert kvant.explain(compiled) == str(report)
    return report


def queries(tokens=5):
    return torch.randn(BATCH, HEADS * GROUPED, tokens, SIZE)


def cache():
    return torch.randn(BATCH, HEADS, TOKENS, SIZE)


def eight_bits():
    return torch.randint(-127, 128, (BATCH, HEADS, TOKENS, SIZE), dtype=torch.int8)


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
