"""Unpacks oneDNN's wheels (a folder of them) into a prefix: include/, lib/, share/."""
import pathlib
import shutil
import sys
import zipfile


def main():
    wheels, prefix = map(pathlib.Path, sys.argv[1:])
    shutil.rmtree(prefix, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                _, found, path = name.partition(".data/data/")
                if not found or name.endswith("/"):
                    continue
                target = prefix / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out)
    # A wheel cannot hold links, so it holds the library three times; one will do.
    for name in ("libdnnl.so", "libdnnl.so.3"):
        (prefix / "lib" / name).unlink()
        (prefix / "lib" / name).symlink_to("libdnnl.so.3.2")
    # scripts/setup looks for this: a half-unpacked folder does not count as installed.
    (prefix / ".complete").touch()


if __name__ == "__main__":
    main()
