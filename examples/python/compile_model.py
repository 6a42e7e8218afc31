"""A small model over an int4 cache, by torch.compile: its attention runs fused, the rest by inductor."""

import sys

try:
    import torch
except ImportError:
    sys.exit("compile_model.py needs torch")

import kvant

TOKENS, HEADS, KV_HEADS, SIZE, GROUP = 512, 8, 2, 64, 32


class Attention(torch.nn.Module):
    """One token over a cache of bytes that hold two codes each, with a scale and a zero point by group."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(HEADS * SIZE, HEADS * SIZE)

    def dequantize(self, codes, scales, zeros):
        pairs = torch.stack([codes & 15, codes >> 4], -1).view(1, KV_HEADS, TOKENS, SIZE // GROUP, GROUP)
        return ((pairs.float() - zeros[..., None]) * scales[..., None]).view(1, KV_HEADS, TOKENS, SIZE)

    def forward(self, x, k, v):
        q = self.project(x).view(1, 1, HEADS, SIZE).transpose(1, 2)
        o = torch.nn.functional.scaled_dot_product_attention(
            q, self.dequantize(*k), self.dequantize(*v), enable_gqa=True)
        return x + o.transpose(1, 2).reshape(1, 1, HEADS * SIZE)


def random_cache():
    groups = (1, KV_HEADS, TOKENS, SIZE // GROUP)
    return (torch.randint(0, 256, (1, KV_HEADS, TOKENS, SIZE // 2), dtype=torch.uint8),
            torch.rand(groups) * 0.1, torch.randint(0, 16, groups).to(torch.uint8))


@torch.no_grad()
def main():
    torch.manual_seed(0)
    model = Attention()
    x, k, v = torch.randn(1, 1, HEADS * SIZE), random_cache(), random_cache()
    compiled = torch.compile(model, backend="kvant")
    difference = (compiled(x, k, v) - model(x, k, v)).abs().max().item()
    print(kvant.explain(compiled))
    print(f"largest difference from the model itself: {difference:.1e}")
    assert difference < 1e-2


main()
