"""The package: its tables, stubs and documents, and what happens at a fork."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import kvant
import kvant.attributes
from kvant import _core

PACKAGE = pathlib.Path(kvant.__file__).parent


def test_version(source):
    text = (source / "CMakeLists.txt").read_text()
    (version,) = re.findall(r"project\(kvant VERSION ([\d.]+)", text)
    assert kvant.__version__ == version


def test_attributes_are_those_of_the_table(source):
    types = {
        "bool": "bool",
        "std::string": "string",
        "int64_t": "s64",
        "float": "f32",
        "std::vector<int64_t>": "s64s",
        "std::vector<float>": "f32s",
    }
    text = (source / "graph/attributes.inc").read_text()
    rows = re.findall(r'^KVANT_ATTR\(\w+, "(\w+)", ([^)]+)\)', text, re.M)
    assert {name: types[type] for name, type in rows} == kvant.attributes.TYPES


def ops_of_the_docs(source):
    table = (source / "docs/ops.md").read_text().split("<!-- table: begin -->")[1]
    table = table.split("<!-- table: end -->")[0]
    rows = re.findall(r"^\| (\w+) \| (.*?) \| (.*?) \| (.*?)\|$", table.replace("\\|", "/"), re.M)
    return [row for row in rows if row[0] != "op"]


def test_every_op_is_known(source):
    """An op that is not known is refused as such; all others for want of inputs, if at all."""
    ops = ops_of_the_docs(source)
    assert len(ops) > 40
    for kind, _, _, attributes in ops:
        for name in re.findall(r"`(\w+)`", attributes):
            assert name in kvant.attributes.TYPES
        if kind == "Wildcard":  # takes anything, nothing too
            kvant.GraphBuilder().op(kind)
            continue
        with pytest.raises(kvant.Error) as error:
            kvant.GraphBuilder().op(kind, type=[] if kind == "End" else None)
        assert kind in str(error.value) and "no op" not in str(error.value).lower(), kind
    with pytest.raises(kvant.Error) as error:
        kvant.GraphBuilder().op("SoftMin")
    assert "SoftMin" in str(error.value)


def test_methods_default_as_the_table(source):
    """Modes that methods leave out are the table's first."""
    tables = {kind: attributes for kind, _, _, attributes in ops_of_the_docs(source)}
    assert "`mode` = inf_as_zero" in tables["ScaledDotProductAttention"]
    assert "`mask_alignment` = top_left" in tables["ScaledDotProductAttention"]
    assert "`token_axis` = -2" in tables["Append"] and "`token_group` = 1" in tables["LoadTokens"]


def stub_names(body):
    names = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = node
    return names


def public(module):
    return {name for name in vars(module) if not name.startswith("_")}


def test_stubs_are_the_module():
    stub = stub_names(ast.parse((PACKAGE / "_core.pyi").read_text()).body)
    assert set(stub) == public(_core)
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            methods, made = stub_names(node.body), getattr(_core, name)
            special = {"__init__", "__len__"} & set(vars(made))
            if "__init__" not in methods:  # made by others
                special -= {"__init__"}
            assert set(methods) == public(made) | special, name
            for method, definition in methods.items():
                check_parameters(getattr(made, method), definition, f"{name}.{method}")
        else:
            check_parameters(getattr(_core, name), node, name)


def check_parameters(function, node, what):
    """nanobind writes a signature into the docstring."""
    names = [a.arg for a in node.args.posonlyargs + node.args.args]
    signature = (function.__doc__ or "").splitlines()[0]
    inside = ast.parse(f"def {signature}: ...".replace("/, ", "")).body[0].args
    given = [a.arg for a in inside.posonlyargs + inside.args]
    plain = [re.sub(r"^arg\d*$", "", name) for name in given]
    assert len(given) == len(names), what
    assert all(not a or a == b for a, b in zip(plain, names)), (what, given, names)


def test_py_typed():
    assert (PACKAGE / "py.typed").exists()


def test_everything_public_is_annotated_and_described():
    for name in kvant.__all__:
        thing = getattr(kvant, name)
        assert inspect.getdoc(thing), name
        members = [(name, thing)]
        if inspect.isclass(thing) and not issubclass(thing, (Exception, tuple)):
            members = [(f"{name}.{k}", getattr(thing, k)) for k in dir(thing) if k[0] != "_"]
        for what, member in members:
            function = member.fget if isinstance(member, property) else member
            if inspect.isfunction(function):
                assert inspect.getdoc(function), what
                assert "return" in function.__annotations__, what


def test_the_package_needs_nothing():
    """Neither numpy nor torch is imported until they are used."""
    code = "import sys, kvant; sys.exit(any(m in sys.modules for m in ('numpy', 'torch')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_block_of_the_docs_runs(source):
    text = (source / "docs/python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks[0].strip().splitlines()) == 3
    names = {}
    for block in blocks:
        exec(block, names)


def test_the_readme_runs(source):
    (block,) = re.findall(r"```python\n(.*?)```", (source / "README.md").read_text(), re.S)
    names = {}
    exec(block, names)
    np.testing.assert_allclose(names["o"], 9 * 0.25, rtol=1e-5)


def test_readme_example_of_the_package():
    (example,) = re.findall(r"\n\n((?:    .*\n)+)\n", kvant.__doc__ + "\n")
    arrays = {f"{n}_array": np.ones((1, 8, 64, 128), np.float32) for n in "qkv"}
    names = {"kvant": kvant, **arrays}
    exec(textwrap.dedent(example), names)
    np.testing.assert_allclose(names["o"], 1, rtol=1e-5)


FORK = """
import os, sys
import numpy as np
import kvant

def attention():
    g = kvant.GraphBuilder()
    q, k, v = (g.input(n, "f32", [1, 1, 4, 8]) for n in "qkv")
    g.output("o", g.scaled_dot_product_attention(q, k, v))
    return kvant.compile(g.build(), threads=2)

x = np.ones([1, 1, 4, 8], np.float32)
if USED:
    compiled = attention()
    compiled(q=x, k=x, v=x)
    cache = kvant.KvCache("f32", head_size=8, capacity=8, threads=2)
    cache.append(0, x, x)
    attend = cache.attention(1)
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
if not USED:
    attention()(q=x, k=x, v=x)
    sys.exit(0)
for call in (lambda: compiled(q=x, k=x, v=x), lambda: compiled.execute([x] * 3, [x]), attention,
             lambda: cache.append(0, x, x), lambda: cache.attend(0, x), lambda: attend(0, x),
             cache.fork, cache.reset, lambda: cache.crop(0), lambda: cache.part(0, False, "codes"),
             cache.length, lambda: cache.bytes, lambda: cache.columns,
             lambda: kvant.KvCache("f32", head_size=8, capacity=8)):
    try:
        call()
    except kvant.Error as error:
        assert "fork" in str(error), error
    else:
        sys.exit(5)
# What is left is not freed by threads that are not there.
del compiled, cache, attend
sys.exit(0)
"""


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_fork(used):
    code = f"USED = {used}\n" + FORK
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
