"""Unpacks oneDNN's wheels (a folder of them) into a prefix: include/, lib/, share/.

Usage: unpack_onednn.py WHEELS PREFIX [PATTERN...]

With patterns, of the libraries beside libdnnl only those that match one.
"""
import fnmatch
import pathlib
import shutil
import sys
import zipfile


def wanted(path, patterns):
    folder, _, name = path.rpartition("/")
    if not patterns or (folder == "lib" and name.startswith("libdnnl.")):
        return True
    if path.startswith("include/"):
        return path.startswith(("include/dnnl", "include/oneapi/dnnl/"))
    return folder == "lib" and any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def main():
    wheels, prefix = map(pathlib.Path, sys.argv[1:3])
    shutil.rmtree(prefix, ignore_errors=True)
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                _, found, path = name.partition(".data/data/")
                if not found or name.endswith("/") or not wanted(path, sys.argv[3:]):
                    continue
                target = prefix / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, open(target, "wb") as out:
                    shutil.copyfileobj(source, out)
    # A wheel cannot hold links, so it holds the library three times; one will do.
    [library] = (prefix / "lib").glob("libdnnl.so.3.*")
    for name in ("libdnnl.so", "libdnnl.so.3"):
        (prefix / "lib" / name).unlink()
        (prefix / "lib" / name).symlink_to(library.name)
    # scripts/setup looks for this: a half-unpacked folder does not count as installed.
    (prefix / ".complete").touch()


if __name__ == "__main__":
    main()
