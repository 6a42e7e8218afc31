"""kvant_demo on the first tokens of the captured layers: every format runs fused, exactly, and its
error is of the size that the format has. Usage: demo_test.py SOURCE_DIR BUILD_DIR
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

TOKENS = 64  # of 512: the oracle's work grows with the square
SKIPPED = 77

# Relative error of the output that each format may have, over all layers.
EXPECTED = {
    "f16": (0, 1e-5),
    "int8": (2e-3, 4e-2),
    "int4, groups of 32, real zero points": (2e-2, 0.5),
    "int4, K per channel": (2e-2, 0.3),
    "int2, groups of 32, real zero points": (0.1, 2),
}
BITS = {"f16": 16, "int8": 8.25, "int4, groups of 32, real zero points": 5}


def first_tokens(source):
    """The safetensors file with each tensor cut to its first TOKENS tokens."""
    raw = source.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = b""
    for tensor in header.values():
        heads, tokens, size = tensor["shape"]
        row = tokens * size * 2
        start = 8 + length + tensor["data_offsets"][0]
        part = b"".join(
            raw[start + h * row : start + h * row + TOKENS * size * 2] for h in range(heads)
        )
        tensor["shape"][1] = TOKENS
        tensor["data_offsets"] = [len(data), len(data) + len(part)]
        data += part
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def check(result):
    formats = {f["name"]: f for f in result["formats"]}
    for f in result["formats"]:
        assert [layer["layer"] for layer in f["layers"]] == [0, 10, 20, 29], f
        for layer in f["layers"]:
            assert layer["kernel_error"] < 1e-5, (f["name"], layer)
            assert layer["ms_best"] > 0, (f["name"], layer)
        assert f["kernel"], f
    for name, (low, high) in EXPECTED.items():
        for layer in formats[name]["layers"]:
            assert low <= layer["error"] <= high, (name, layer)
    for name, bits in BITS.items():
        assert formats[name]["bits_per_element"] == bits, formats[name]


def main():
    source, build = map(pathlib.Path, sys.argv[1:3])
    demo = build / "kvant_demo"
    if not demo.exists():
        print("kvant_demo is not built")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "layers.safetensors"
        data.write_bytes(first_tokens(source / "tests/data/smollm2_kjv.safetensors"))
        run = subprocess.run(
            [demo, "--json", "--data", data], check=True, capture_output=True, text=True
        )
        check(json.loads(run.stdout))
        table = subprocess.run([demo, "--data", data], check=True, capture_output=True, text=True)
        assert "Compared: " in table.stdout, table.stdout

        data.write_bytes(b"not a file of tensors")
        bad = subprocess.run([demo, "--data", data], capture_output=True, text=True)
        assert bad.returncode == 1 and "kvant_demo: " in bad.stderr and not bad.stdout, bad
    return 0


if __name__ == "__main__":
    sys.exit(main())
