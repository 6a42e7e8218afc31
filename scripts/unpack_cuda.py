"""Unpacks CUDA's wheels (a folder of them) into a prefix: bin/, lib/, share/doc/."""
import os
import pathlib
import re
import sys
import zipfile

# The package's own folder, nvidia/cu13 or nvidia/cuda_nvrtc, aside. Headers and the alternative builds are not
# needed.
WANTED = re.compile(r"nvidia/(?:cu\d+|cuda_nvrtc)/((?:bin|lib)/(?!__init__)[^/]+)$")
LICENCE = re.compile(r"([^/]+)-[^/-]+\.dist-info/(?:licenses/)?License\.txt$")


def main():
    wheels, prefix = map(pathlib.Path, sys.argv[1:])
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            # NVRTC's library comes after the one that it loads: where it is, both are.
            for name in sorted(archive.namelist()):
                if match := WANTED.match(name):
                    target = prefix / match.group(1)
                elif match := LICENCE.match(name):
                    target = prefix / "share/doc" / f"{match.group(1)}.txt"
                else:
                    continue
                if ".alt.so" in name:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                # scripts/setup takes a file that is there for a whole one.
                part = target.with_name(target.name + ".part")
                part.write_bytes(archive.read(name))
                part.chmod(0o755 if target.parent.name == "bin" else 0o644)
                os.replace(part, target)


if __name__ == "__main__":
    main()
