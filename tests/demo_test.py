"""The demo continues a text, says what ran, and refuses what it cannot do in words.
Usage: demo_test.py SOURCE_DIR BUILD_DIR
"""
import os
import pathlib
import re
import subprocess
import sys

SKIPPED = 77
PROMPT = "In the beginning God created the heaven and the"


def run(source, build, *arguments):
    environment = dict(os.environ, KVANT_LIBRARY=str(build / "libkvant.so"))
    return subprocess.run([sys.executable, source / "tools/kv_report/demo.py", *arguments],
                          env=environment, capture_output=True, text=True)


def check_schemes(source, build):
    for scheme, bits in (("int4_g64", "4.50"), ("kivi2", "16.00")):
        done = run(source, build, "--scheme", scheme, "--prompt", PROMPT, "--tokens", "6",
                   "--temperature", "0")
        assert done.returncode == 0, done.stderr
        # What every scheme remembers of so short a text.
        assert ">>>  earth" in done.stdout, done.stdout
        assert re.search(rf"cache +{scheme}: [0-9,]+ bytes for 15 tokens, {bits} bits", done.stdout), done.stdout
        assert re.search(r"generated +6 tokens, [0-9.]+ tokens/s", done.stdout), done.stdout
        assert "kernel      cpu/" in done.stdout, done.stdout


def check_refusals(source, build):
    for arguments, words in (
        (("--scheme", "int5"), "'int5'"),
        (("--scheme", "u4:g48:rzp"), "groups of 48 do not divide the head size 64"),
        (("--tokens", "0"), "at least 1"),
    ):
        done = run(source, build, "--prompt", PROMPT, *arguments)
        assert done.returncode != 0 and words in done.stderr, done
        assert "Traceback" not in done.stderr, done.stderr


def main():
    source, build = map(pathlib.Path, sys.argv[1:3])
    sys.path.insert(0, str(source / "tools"))
    from kv_report.packages import missing

    absent = missing()
    if not (build / "libkvant.so").exists():
        absent.append("libkvant.so")
    if absent:
        print("missing: " + "; ".join(absent))
        return 1 if os.environ.get("KVANT_REQUIRE_SHARED") == "1" else SKIPPED
    check_schemes(source, build)
    check_refusals(source, build)
    return 0


if __name__ == "__main__":
    sys.exit(main())
