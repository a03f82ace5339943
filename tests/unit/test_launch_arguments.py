"""What launches hand over: bundles flattened in order, nothing where None is; most parameters of a function."""

import ast
import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import uniep
from uniep.kernels import arguments
from uniep.launch import driver
from uniep.launch.driver import Block, Bundle, Part

KERNEL_LIMIT, LIMIT, FIELD_LIMIT = 30, 12, 18


class Pair(NamedTuple):
    first: object
    second: object


def functions():
    """(file, name, number of parameters) of what kernels, launchers and backends define."""
    for room in ("kernels", "launch", "backends"):
        for path in sorted((Path(uniep.__file__).parent / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                    yield path.name, node.name, len([n for n in names if n not in ("self", "cls")])


def test_no_wall_of_parameters():
    found = list(functions())
    assert ("mega.py", "backward_kernel", 30) in found
    limit = {True: KERNEL_LIMIT, False: LIMIT}
    assert not [f for f in found if f[2] > limit[f[1].endswith("_kernel")]]
    bundles = [c for _, c in inspect.getmembers(arguments, inspect.isclass) if hasattr(c, "_fields")]
    assert len(bundles) > 10
    assert not [c.__name__ for c in bundles if len(c._fields) > FIELD_LIMIT]


def look(*args):
    values, kinds, blocks = [], [], []
    bits = driver._look(args, values, kinds, blocks)
    return values, kinds, blocks, bits


def test_bundles_are_flattened_where_they_stand():
    a, b, c = (torch.zeros(4, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.float16))
    block = Block(c, (2, 2), (2, 1), (1, 2))
    values, kinds, blocks, bits = look(7, Pair(a, Part(b, b.data_ptr() + 4, b.dtype, (3,))), block, 2**40, None)
    assert values == [7, a.data_ptr(), b.data_ptr() + 4, None, 2, 2, 2, 1, 2**40]
    assert kinds == [False, torch.int32, torch.float32, (torch.float16, (1, 2)), True, None]
    assert blocks == [(3, block)]
    assert bits & 15 == 4
    assert look(torch.nn.Parameter(b))[:2] == ([b.data_ptr()], [torch.float32])


def test_a_bundle_that_is_kept_gives_the_same():
    a, b = torch.zeros(4, dtype=torch.int32), torch.zeros(4)
    for pair in (Pair(a, b), Pair(a, None), Pair(None, b)):
        kept = Bundle(pair)
        assert look(5, kept)[0] == look(5, pair)[0]
        assert kept.device == a.get_device()
        assert kept.fields is pair
    kinds = [Bundle(pair).kind for pair in (Pair(a, b), Pair(b, a), Pair(a, None), Pair(a.clone(), b.clone()))]
    assert len(set(kinds[:3])) == 3
    assert kinds[0] == kinds[3]


def test_triton_gets_bundles_as_they_are():
    whole = torch.arange(6).view(2, 3)
    given = driver._for_triton(Bundle(Pair(driver.unbind(whole)[1], None)))
    assert type(given) is Pair
    assert torch.equal(given.first, whole[1])
    assert given.second is None


@pytest.mark.parametrize(
    ("args", "fits"), [((3, Pair(torch.zeros(1), None)), True), ((3, Pair(torch.zeros(1), 4)), False)], ids=str
)
def test_integers_in_bundles_are_not_handed_over(args, fits):
    """Triton compiles for their values: such code would serve the first call's only."""
    sizes = "i32", "u64", *["i32"] * (not fits), "u64", "u64"
    ptx = ".entry k(" + ",".join(f".param .{kind.replace('i', 'u')} p{i}" for i, kind in enumerate(sizes)) + ")"
    metadata = types.SimpleNamespace(name="k", global_scratch_size=0, profile_scratch_size=0)
    compiled = types.SimpleNamespace(asm={"ptx": ptx}, metadata=metadata)
    parameters = [types.SimpleNamespace(do_not_specialize=True), types.SimpleNamespace(do_not_specialize=False)]
    got = driver.parameter_sizes(types.SimpleNamespace(params=parameters), compiled, args)
    assert got == ([4, 8, 8, 8] if fits else None)


def test_names_on_disk_do_not_depend_on_the_order_of_launches(monkeypatch):
    """Else a process that launches in another order compiles again what lies there."""
    jit = pytest.importorskip("triton.runtime.jit")
    for path in (Path(uniep.__file__).parent / "kernels").glob("*.py"):
        importlib.import_module(f"uniep.kernels.{path.stem}")
    modules = [vars(m) for name, m in sys.modules.items() if name.startswith(("uniep.kernels", "triton.language"))]
    functions = {id(f): f for module in modules for f in module.values() if isinstance(f, jit.JITFunction)}
    kernels = sorted((f for f in functions.values() if f.__name__.endswith("_kernel")), key=lambda f: f.__name__)
    assert len(kernels) > 30

    def keys(order):
        for function in functions.values():
            function.hash, function.used_global_vals = None, {}
        monkeypatch.setattr(driver, "_settled", {})
        for kernel in order:
            driver.settle(kernel)
        return [kernel.cache_key for kernel in kernels]

    assert keys(kernels) == keys(kernels[::-1])
