"""libkvant.so exports the functions of kvant_c.h, and these are those of abi.txt: a function that goes
or comes is seen here.

Usage: c_abi_test.py SOURCE_DIR BUILD_DIR
"""
import pathlib
import re
import subprocess
import sys

MADE_BY_LINKERS = {"_init", "_fini", "__bss_start", "_edata", "_end"}


def main(source, build):
    folder = pathlib.Path(source) / "integrations" / "c"
    library = pathlib.Path(build) / "libkvant.so"
    if not library.exists():
        print(f"{library} is not built")
        return 77
    header = re.sub(r"//.*", "", (folder / "kvant_c.h").read_text())
    declared = set(re.findall(r"\b(kvant_\w+)\(", header))
    listed = (folder / "abi.txt").read_text().split()
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], check=True,
                             capture_output=True, text=True).stdout
    exported = {line.split()[-1].partition("@")[0] for line in symbols.splitlines()}
    exported -= MADE_BY_LINKERS

    failures = []
    for here, there, names in (
            ("libkvant.so", "kvant_c.h", exported - declared),
            ("kvant_c.h", "libkvant.so", declared - exported),
            ("kvant_c.h", "abi.txt", declared - set(listed)),
            ("abi.txt", "kvant_c.h", set(listed) - declared)):
        failures += [f"{name} is in {here} and not in {there}" for name in sorted(names)]
    if listed != sorted(set(listed)):
        failures.append("abi.txt is not sorted")
    print("\n".join(failures) or f"{len(listed)} functions")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
