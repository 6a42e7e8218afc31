"""kvant.torch.attention beside torch's scaled_dot_product_attention, over plain K and V, in turns.

Usage: torch_attention.py [THREADS]
Least times of nine rounds, each of as many calls as take some 0.1 s at 20 GFLOP/s.
"""

import sys
import time

import kvant.torch
import torch
import torch.nn.functional as F

# name, [batch, heads, queries, channels], KV heads, tokens, causal
CASES = [
    ("ViT", (1, 12, 197, 64), 12, 197, False), ("BERT", (8, 12, 128, 64), 12, 128, False),
    ("CLIP", (8, 12, 50, 64), 12, 50, False), ("Swin", (64, 4, 49, 32), 4, 49, False),
    ("prompt", (1, 32, 512, 128), 8, 512, True), ("U-Net", (2, 8, 1024, 40), 8, 1024, False),
    ("U-Net, text", (2, 8, 1024, 40), 8, 77, False), ("decoding", (1, 32, 1, 128), 8, 4096, False),
    ("decoding, few tokens", (1, 12, 1, 64), 12, 64, False),
]


def seconds(call, calls):
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def main():
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else torch.get_num_threads())
    print(f"{torch.get_num_threads()} threads; ms of torch, ms of kvant, kvant / torch")
    for dtype in (torch.float32, torch.bfloat16):
        for name, shape, kv_heads, tokens, causal in CASES:
            q = torch.randn(shape).to(dtype)
            k, v = (torch.randn(shape[0], kv_heads, tokens, shape[3]).to(dtype) for _ in range(2))
            calls = [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != shape[1]),
                     lambda: kvant.torch.attention(q, k, v, right_window=0 if causal else -1)]
            flop = 4 * q.numel() * tokens
            many = min(max(int(2e9 / flop), 1), 200)
            torch_ms, kvant_ms = (1e3 * min(times) for times in zip(*([seconds(call, many) for call in calls] for _ in range(9))))
            print(f"{str(dtype)[6:]:9} {name:22} {torch_ms:9.3f} {kvant_ms:9.3f} {kvant_ms / torch_ms:6.2f}", flush=True)


if __name__ == "__main__":
    main()
