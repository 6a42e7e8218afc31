"""Every C++ file is as clang-format 14 leaves it. Usage: format_test.py SOURCE_DIR [BUILD_DIR]"""
import pathlib
import shutil
import subprocess
import sys

from layering_test import source_files

SKIPPED = 77


def clang_format():
    """Another version formats differently, so only 14 will do."""
    for name in ("clang-format-14", "clang-format"):
        if path := shutil.which(name):
            version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
            if "version 14." in version:
                return path
    return None


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    tool = clang_format()
    if not tool:
        print("skipped: no clang-format 14 (scripts/setup installs it)")
        return SKIPPED
    files = [str(f) for f in source_files(root) if f.suffix in (".cc", ".h", ".cu", ".cuh")]
    if not files:
        return 0
    # .inc files are tables in columns; they are left as written.
    result = subprocess.run([tool, "--dry-run", "-Werror", "--ferror-limit=3", *files])
    if result.returncode:
        print(f"To fix: cd {root} && {tool} -i FILE...")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
