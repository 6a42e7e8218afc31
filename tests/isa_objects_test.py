"""Units for one instruction set define nothing that the linker could share with other units: it
keeps one copy of an inline function, and a CPU without those instructions may then run it.

Usage: isa_objects_test.py SOURCE_DIR BUILD_DIR
"""
import os
import pathlib
import shutil
import subprocess
import sys

SKIPPED = 77
NM = os.environ.get("NM", "nm")


def shared_symbols(object_file):
    """Weak and vague symbols of an object, but for those that sanitizers add."""
    listing = subprocess.run([NM, "-C", object_file], capture_output=True, text=True, check=True)
    found = []
    for line in listing.stdout.splitlines():
        kind, name = line[17:18], line[19:]
        if kind in "WVu" and not name.startswith(("asan.", "__asan", "__ubsan", "DW.ref.")):
            found.append(f"{kind} {name}")
    return found


def main():
    build = pathlib.Path(sys.argv[2])
    folder = build / "CMakeFiles/kvant_kernels.dir/kernels/cpu/isa"
    objects = sorted(o for o in folder.glob("*.o") if not o.name.startswith("portable"))
    if not objects or shutil.which(NM) is None:
        print("no such units in this build")
        return SKIPPED
    failed = False
    for path in objects:
        for symbol in shared_symbols(path):
            print(f"{path.name}: {symbol}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
