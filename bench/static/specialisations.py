"""Compiles the specialisations of kernels.py with NVRTC, and counts what their steady rounds issue."""
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess

import kernels
import sass
import stores


class Unavailable(Exception):
    """There is no NVRTC, or no disassembler; with a sentence."""


def find_nvdisasm(source):
    """The environment's NVDISASM, scripts/setup's, or the toolkit's."""
    for path in (os.environ.get("NVDISASM"), source / ".deps/cuda/bin/nvdisasm",
                 shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm"):
        if path and os.access(path, os.X_OK):
            return str(path)
    raise Unavailable("no nvdisasm (scripts/setup --dev installs it)")


def _run(*args):
    result = subprocess.run(args, capture_output=True, text=True)
    if "no NVRTC" in result.stderr:
        raise Unavailable(result.stderr.strip())
    if result.returncode:
        raise RuntimeError(f"{' '.join(args)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def bytes_per_element(kernel):
    """Of K and V, with scales and zero points: what memory must deliver for each."""
    make = dict(zip(kernel.make[::2], kernel.make[1::2]))
    of_dtype = {"f32": 32, "f16": 16, "bf16": 16}[make["--dtype"]]
    head_size, kv_len = int(make["--head-size"]), int(make["--kv-len"])

    def bits(text):
        parts = text.split(":")
        scale_bits = 16 if "sf16" in parts else of_dtype
        own = int(parts[0].split("_")[0].strip("bfsu"))
        if parts[0] in ("f32", "f16", "bf16"):
            return own
        size = [int(p[1:]) for p in parts if p[0] == "g" and p[1:].isdigit()]
        group = size[0] if size else head_size
        if "channel" in parts and not size:
            group = kv_len
        if "head" in parts or "tensor" in parts:
            group = head_size * kv_len
        zero_bits = next((n for word, n in (("zp", 8), ("pzp", 4), ("rzp", scale_bits)) if word in parts), 0)
        return own + (scale_bits + zero_bits) / group
    if "--latent" in kernel.make:  # K is all there is
        return bits(make["--k"]) / 8 * head_size / (head_size + int(make["--v-head-size"]))
    return (bits(make["--k"]) + bits(make["--v"])) / 16


def compile_row(kvant, folder, kernel, archs):
    """{arch: what `kvant precompile --cubin` says of it}."""
    graph = folder / f"{kernels.file_name(kernel)}.json"
    store = isinstance(kernel, stores.Store)
    text = kernel.graph() if store else _run(kvant, "make", *kernel.make)
    # Its time stamp does not matter, but a reader beside this must not see half of it.
    graph.write_text(text)
    options = [word for arch in archs for word in ("--arch", arch)]
    _run(kvant, "precompile", str(graph), *options, "--cache", str(folder / "cache"),
         "--cubin", str(folder / "cubins"))
    stem = folder / "cubins" / kernels.file_name(kernel)
    return {arch: json.loads(pathlib.Path(f"{stem}.0.{arch}.json").read_text())
            for arch in archs}


def count_row(nvdisasm, folder, kernel, found, archs):
    """Adds to the facts of `archs` what their steady rounds issue."""
    for arch in archs:
        facts = found[arch]
        cubin = folder / "cubins" / f"{kernels.file_name(kernel)}.0.{arch}.cubin"
        blocks = sass.parse(sass.disassemble(nvdisasm, cubin), facts["entry"])
        loop = sass.steady_loop(blocks)
        if loop is None:
            raise RuntimeError(f"{kernel.name} for {arch}: no loop holds HMMA")
        planned = facts["round"]["loops"]
        steady = sass.count_round(blocks, loop, planned)
        if steady is None:
            raise RuntimeError(f"{kernel.name} for {arch}: {len(loop.children)} loops in a round, "
                               f"but the plan says {len(planned)}: {planned}")
        per_lane = facts["round"]["elements"] / facts["threads"]
        facts["elements_per_lane"] = per_lane
        facts["instructions"] = {pipe: steady.pipes[pipe] for pipe in sass.PIPES}
        facts["issued"] = steady.issued
        facts["stall_cycles"] = steady.stalls
        facts["issued_per_element"] = round(steady.issued / per_lane, 3)
        facts["alu_per_element"] = round(steady.pipes["ALU"] / per_lane, 3)


def count_store(nvdisasm, folder, store, found, archs):
    """Adds to the facts of `archs` how many instructions there are."""
    for arch in archs:
        cubin = folder / "cubins" / f"{kernels.file_name(store)}.0.{arch}.cubin"
        blocks = sass.parse(sass.disassemble(nvdisasm, cubin), found[arch]["entry"])
        found[arch]["all_instructions"] = sum(len(block.instructions) for block in blocks)


def _row(arguments):
    kvant, nvdisasm, folder, kernel, archs, counted = arguments
    try:
        found = compile_row(kvant, folder, kernel, archs)
        if isinstance(kernel, stores.Store):
            count_store(nvdisasm, folder, kernel, found, counted)
            return found
        count_row(nvdisasm, folder, kernel, found, counted)
        return found
    except (RuntimeError, OSError, KeyError) as error:
        return str(error)


def compile_all(kvant, nvdisasm, folder, rows=kernels.KERNELS + stores.STORES,
                archs_of=lambda row: kernels.ARCHS, counted=kernels.ARCHS, jobs=2):
    """[(kernel, {arch: facts} or the text of an error)]. Row i is compiled for archs_of(i), and those
    of `counted` are counted. Kernels that did not change come from folder/cache."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        found = pool.map(_row, [(str(kvant), nvdisasm, folder, kernel, archs_of(i), set(counted) & set(archs_of(i)))
                                for i, kernel in enumerate(rows)])
        return list(zip(rows, found))
