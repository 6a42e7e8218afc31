"""The steps whose schedules are looked at: decoding, and prompts of several queries."""
LONG = 32768
_INT4 = {"type": "u4", "group": 32, "zero_points": True, "head_size": 128}
_INT8 = {"type": "s8", "group": 32, "zero_points": False, "head_size": 128}


def _both(name, **of):
    return {f"int4, {name}": {**_INT4, **of}, f"int8, {name}": {**_INT8, **of}}


CASES = {
    **_both("32k tokens, 8 KV heads", kv_heads=8, ratio=4, lengths=[LONG]),
    **_both("one of 32k among 31 of 100, 8 KV heads", kv_heads=8, ratio=4, lengths=[LONG] + 31 * [100]),
    **_both("8k tokens, 32 KV heads", kv_heads=32, ratio=1, lengths=[8192]),
    **_both("32k tokens, 1 KV head", kv_heads=1, ratio=8, lengths=[LONG]),
    **_both("4k tokens, 8 KV heads", kv_heads=8, ratio=4, lengths=[4096]),
    **_both("512 queries, 4k tokens, 8 KV heads", kv_heads=8, ratio=4, lengths=[4096], queries=512),
    **_both("512 queries, 4k tokens, 8 KV heads, bf16 math", kv_heads=8, ratio=4, lengths=[4096], queries=512, bf16=True),
}
WORKERS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
DOMAINS = (1, 2, 4, 8)
# How many heads of these steps take turns depends on the number of workers: each is recorded for every number.
BY_TOKENS = _both("32k tokens, 8 KV heads, [N, S, H, D]", kv_heads=8, ratio=4, lengths=[LONG], by_tokens=True)
BY_TOKENS_WORKERS = (8, 16, 32, 64, 128)
