"""What is replaced in Mosaic GPU gives what its own functions give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conditions import needs_gpu, needs_newer_jax
from xsake import BlockMask, Options, _first_calls, _jax, masks

needs_patched_jax = pytest.mark.skipif(
    _jax.version() not in _first_calls.FASTER_IN, reason="this version of JAX keeps its functions"
)


def replaced(function):
    """JAX's own function, which XSAKE may have replaced in this process."""
    return getattr(function, "__wrapped__", function)


@needs_newer_jax
def test_equal_variables_of_layouts_are_those_that_jax_finds():
    from jax.experimental.mosaic.gpu import constraints

    a, b, c, d, e, f = map(constraints.Variable, "abcdef")
    pairs = [(a, b), (c, d), (e, e), (d, a), (b, c)]
    system = constraints.ConstraintSystem(
        constraints=[
            *(constraints.Equals(*sides) for sides in pairs),
            constraints.Divides(f, (64,)),
        ]
    )
    theirs = replaced(constraints.compute_transitively_equal_vars)(system)
    ours = _first_calls.equal_variables(system)
    assert {x: set(y) for x, y in ours.items()} == {x: set(y) for x, y in theirs.items()}
    assert set(ours[b]) == {a, c, d}


@needs_newer_jax
def test_constraints_of_layouts_are_reduced_as_jax_reduces_them():
    """A constraint that stays the same is reduced again only if a variable of it is assigned."""
    from jax.experimental.mosaic.gpu import constraints
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    a, b = map(constraints.Variable, "ab")
    layout, other = map(constraints.RegisterLayout, (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT))
    theirs = replaced(constraints.reduce_constraint)
    reduced = []

    def counted(constraint, assignments):
        reduced.append(constraint)
        return theirs(constraint, assignments)

    ours = _first_calls.reduce_once(counted)
    for constraint in [
        constraints.Equals(a, b),
        constraints.Relayout(a, b, 32, strict=True),
        constraints.Equals(constraints.Reduce(a, (1,), False), b),
        constraints.OneOf(b, (layout, other)),
    ]:
        reduced.clear()
        for assigned in ({}, {}, {}, {b: layout}):
            assert ours(constraint, assigned) == theirs(constraint, assigned)
        assert len(reduced) == 2


def test_a_list_with_a_set_and_a_kept_hash_give_what_they_replace():
    hashed = []

    class Key:
        def __init__(self, x):
            self.x = x

        def __eq__(self, other):
            return self.x == other.x

        @_first_calls.hash_once
        def __hash__(self):
            hashed.append(self.x)
            return hash(self.x)

    keys = [Key(x) for x in (3, 1, 2)]
    found = _first_calls.with_set(
        lambda unknowns, fuel: (unknowns, Key(1) in unknowns, Key(4) in unknowns)
    )
    unknowns, *held = found(keys, fuel=1)
    assert unknowns == keys
    assert held == [True, False]
    assert found(unknowns, fuel=1)[0] is unknowns
    assert hash(keys[0]) == hash(Key(3))
    assert hashed.count(3) == 2


@needs_newer_jax
def test_systems_of_constraints_are_joined_as_jax_joins_them():
    from jax.experimental.mosaic.gpu import constraints
    from jax.experimental.mosaic.gpu import fragmented_array as fa

    a, b = map(constraints.Variable, "ab")
    layout, other = map(constraints.RegisterLayout, (fa.WGMMA_LAYOUT, fa.WGMMA_ROW_LAYOUT))

    def system(assignments):
        return constraints.ConstraintSystem(assignments, [constraints.Relayout(a, b, 32)])

    for one, two in [({a: layout}, {b: other}), ({a: layout}, {a: layout}), ({}, {})]:
        assert _first_calls.join(system(one), system(two)) == system(one) & system(two)
    for wrong in (system({a: other}), constraints.Unsatisfiable()):
        assert isinstance(_first_calls.join(system({a: layout}), wrong), constraints.Unsatisfiable)


def test_a_cache_lasts_as_long_as_the_function_that_it_is_for():
    calls = []
    module = types.SimpleNamespace(square=lambda x: calls.append(x) or x * x)
    original = module.square

    def run(fails):
        assert [module.square(x) for x in (2, 3, 2)] == [4, 9, 4]
        if fails:
            raise ValueError("as it is")

    cached = _first_calls.with_cache(run, module, "square")
    cached(False)
    with pytest.raises(ValueError, match="as it is"):
        cached(True)
    assert calls == [2, 3] * 2
    assert module.square is original


@needs_newer_jax
@pytest.mark.parametrize("version", [(0, 10, 2), (0, 11, 1), (0, 11, 3), (0, 12, 1)])
def test_other_versions_of_jax_keep_their_functions(monkeypatch, version):
    from jax.experimental.mosaic.gpu import constraints, core, dialect_lowering, layout_inference

    def functions():
        return [
            constraints.compute_transitively_equal_vars,
            constraints.reduce_constraint,
            constraints.Variable.__hash__,
            core._mosaic_gpu_lowering_rule,
            dialect_lowering.lower_mgpu_dialect,
            getattr(constraints.ConstraintSystem, "__iand__", None),
            layout_inference.find_assignments_for,
            layout_inference.ValueSite.__hash__,
        ]

    before = functions()
    monkeypatch.setattr(_jax, "version", lambda: version)
    _first_calls.speed_up_first_calls()
    assert functions() == before


def printed_by(program, *arguments):
    """What a Python of its own prints, on the CPU; an error of its fails the test."""
    command = [sys.executable, "-c", program, *arguments]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


LOWER = """
import sys
import jax
import jax.numpy as jnp
from xsake import BlockMask, Options, _first_calls, _jax, masks
replaced = sys.argv[1] == "replaced"
if not replaced:
    _first_calls.speed_up_first_calls = lambda: None
from jax.experimental.mosaic.gpu import constraints, core
from xsake.backends import Call, hopper
from xsake.backends.options import BackwardTiling, ForwardTiling

q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (2, 1))
mask = BlockMask.from_rule(masks.causal(), (256, 256))
options = Options(hopper_forward=ForwardTiling(), hopper_backward=BackwardTiling())

def gradients(q, k, v):
    call = lambda *x: hopper.forward(Call(*x, None, mask, 0.1, None, options))
    results, pull_back = jax.vjp(call, q, k, v)
    return pull_back(results)

print(jax.jit(gradients).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text())
for function in (constraints.reduce_constraint, core._mosaic_gpu_lowering_rule):
    assert hasattr(function, "__wrapped__") == replaced
"""


@needs_patched_jax
def test_kernels_are_lowered_to_the_same_modules():
    """The forward and the backward kernels, each in its serialized form within the text."""
    theirs, ours = (printed_by(LOWER, which) for which in ("original", "replaced"))
    assert theirs.count("@mosaic_gpu") >= 2
    assert ours == theirs


@needs_patched_jax
@pytest.mark.parametrize("how", ["alone", "layers", "on devices"])
def test_large_kernels_are_lowered_first_and_once(how, monkeypatch):
    """They take the longest to compile; what follows is lowered beside that."""
    from jax.experimental.mosaic.gpu import core

    from xsake.backends import Call, hopper
    from xsake.backends.hopper import layouts  # it replaces the rule, which `note` then calls

    assert layouts
    names, lower = [], core._mosaic_gpu_lowering_rule

    def note(ctx, *args, module, **kwargs):
        names.append(str(module.operation.attributes["sym_name"]).strip('"'))
        return lower(ctx, *args, module=module, **kwargs)

    monkeypatch.setattr(core, "_mosaic_gpu_lowering_rule", note)
    groups = []
    monkeypatch.setattr(_jax, "platform", lambda: "gpu")
    monkeypatch.setattr(_jax, "multiprocessors", lambda: 132)
    monkeypatch.setattr(
        _first_calls, "start_compiling", lambda kernels: groups.append(len(kernels))
    )
    mask = BlockMask.from_rule(masks.causal(), (256, 256))

    def attend(q, k, v):
        scale = len(how) / 100  # kernels of its own: those that the process knows are not new
        return hopper.forward(Call(q, k, v, None, mask, scale, None, Options()))[0]

    def loss(q, k, v):
        x = attend(q, k, v)
        if how == "layers":  # the same kernels again, and inside a loop
            x = jax.lax.scan(lambda x, _: (attend(x, k, v), None), attend(x, k, v), length=2)[0]
        return x.astype(jnp.float32).sum()

    run = jax.grad(loss, (0, 1, 2))
    if how == "on devices":
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
        spec = jax.sharding.PartitionSpec("data")
        run = jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    q, k = (jax.ShapeDtypeStruct((1, 256, heads, 64), jnp.bfloat16) for heads in (2, 1))
    jax.jit(run).trace(q, k, k).lower(lowering_platforms=("cuda",))
    ours = [re.sub("_mosaic_gpu.*", "", x) for x in names]
    large = [x.startswith(_first_calls.LARGE_KERNELS) for x in ours]
    assert large == sorted(large, reverse=True)
    assert {"xsake_forward", "xsake_prepare"} < set(ours)
    assert len(ours) == len(set(ours))
    # the first ones together; those for tables and lists, if they are new, by themselves
    assert [size for size in groups if size] in ([2], [2, 1, 1])


@needs_patched_jax
def test_kernels_of_branches_by_platform_are_not_among_the_first(monkeypatch):
    """Only one of these branches is lowered; of a condition, both are."""
    from xsake.backends import Call, hopper

    monkeypatch.setattr(_jax, "multiprocessors", lambda: 132)
    mask = BlockMask.from_rule(masks.causal(), (256, 256))
    x = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)

    def attend(x):
        return hopper.forward(Call(x, x, x, None, mask, 0.1, None, Options()))[0]

    def first_kernels(run):
        jaxpr = jax.make_jaxpr(run)(x).jaxpr
        return len(list(_first_calls.kernels_of(jaxpr, _first_calls.LARGE_KERNELS, set())))

    def by_platform(x):
        return jax.lax.platform_dependent(x, tpu=lambda x: x, default=attend)

    assert first_kernels(attend) == 1
    assert first_kernels(lambda x: jax.lax.cond(x.sum() > 0, attend, lambda x: x, x)) == 1
    assert first_kernels(by_platform) == 0


class Jitted:
    """A program of a kernel, which takes `seconds` to be lowered, as JAX's own do."""

    def __init__(self, seconds, noted):
        self.seconds, self.noted = seconds, noted

    def lower(self):
        if self.seconds is None:
            raise ValueError("no such kernel")
        time.sleep(self.seconds)
        self.noted.append("lowered")
        return self

    def compile(self):
        self.noted.append("compiled")


@pytest.mark.parametrize("bad", [0, 1])
def test_kernels_of_a_group_are_compiled_when_all_of_them_are_lowered(bad, monkeypatch, early):
    """One that fails keeps the others waiting for a moment only."""
    noted = []
    programs = {b"a": 0.05, b"b": 0.0, **({b"bad": None} if bad else {})}

    def compile_kernel(kernel_hash, lowered, device, together):
        _first_calls.compile_uncached(Jitted(programs[kernel_hash], noted), together)

    monkeypatch.setattr(_first_calls, "compile_kernel", compile_kernel)
    monkeypatch.setattr(_first_calls, "MAX_WAIT_SECONDS", 0.3 if bad else 60)
    with _first_calls.compiled_together():
        for kernel in programs:
            with _first_calls.compiled_together():  # as lowering a kernel for a mesh does
                pass
            _first_calls._lowering.collected[kernel] = b"lowered"
    early()
    assert noted == ["lowered"] * 2 + ["compiled"] * 2
    assert _first_calls._failed.is_set() == bool(bad)


@pytest.fixture
def early(monkeypatch):
    """Compilation in threads, as at the start of a process; early() waits for its end."""
    monkeypatch.setattr(_first_calls, "_started", set())
    monkeypatch.setattr(_first_calls, "_failed", threading.Event())

    def wait():
        _first_calls._compilers().shutdown()
        _first_calls._compilers.cache_clear()

    yield wait
    wait()


@needs_newer_jax
def test_new_kernels_of_xsake_are_compiled_while_others_are_lowered(monkeypatch, early):
    """Once each, only on a GPU, and also those that two threads lower at the same time."""
    from jax.experimental.mosaic.gpu import core

    known, compiled, meanwhile = {b"old": b"old"}, [], []
    monkeypatch.setattr(core, "KNOWN_KERNELS", known)
    monkeypatch.setattr(_first_calls, "compile_kernel", lambda *args: compiled.append(args[:2]))

    def lower(ctx, *args, module, **kwargs):
        known[ctx] = b"lowered " + ctx
        for kernel in meanwhile:
            meanwhile.clear()
            other = threading.Thread(target=run, args=("gpu", "xsake_forward", kernel))
            other.start()
            other.join()
        return args, kwargs

    def run(platform, name, kernel):
        monkeypatch.setattr(_jax, "platform", lambda: platform)
        operation = types.SimpleNamespace(attributes={"sym_name": name})
        module = types.SimpleNamespace(operation=operation)
        assert rule(kernel, 1, 2, module=module, more=3) == ((1, 2), {"more": 3})

    rule = _first_calls.with_early_compilation(lower)
    run("cpu", "xsake_forward", b"a")
    run("gpu", "another_forward", b"b")
    run("gpu", "xsake_forward", b"a")
    for _ in range(2):
        run("gpu", "xsake_forward", b"c")
    meanwhile.append(b"e")
    run("gpu", "xsake_delta", b"d")
    early()
    assert sorted(compiled) == [(x, b"lowered " + x) for x in (b"c", b"d", b"e")]


def test_a_kernel_that_does_not_compile_in_a_thread_is_reported_once(monkeypatch, early, caplog):
    def compile_kernel(*args):
        raise ValueError("no such kernel")

    monkeypatch.setattr(_first_calls, "compile_kernel", compile_kernel)
    for kernel in (b"a", b"b"):
        _first_calls.start_compiling({kernel: b"lowered"})
        early()
    (record,) = (x for x in caplog.records if x.name == "xsake")
    assert record.levelname == "WARNING"
    assert "it is compiled later as usual" in record.getMessage()
    assert record.getMessage().endswith("ValueError: no such kernel")


ENDING = """
import threading, time
from concurrent.futures import thread as pools
from xsake import _first_calls

begun = threading.Semaphore(0)

def compile_kernel(kernel_hash, *_):
    begun.release()
    while not pools._shutdown:
        time.sleep(0.01)
    print("compiled", flush=True)

def lower():
    while not pools._shutdown:
        time.sleep(0.01)
    _first_calls.start_compiling({b"late": b""})
    print("lowered", flush=True)

_first_calls.compile_kernel = compile_kernel
for i in range(20):
    _first_calls.start_compiling({bytes([i]): b""})
threading.Thread(target=lower).start()
for _ in range(8):
    begun.acquire()
"""


def test_python_ends_without_the_kernels_that_wait():
    """Those that eight threads have begun are finished; another thread may still lower some."""
    printed = printed_by(ENDING)  # lines of several threads, which may run into each other
    assert [printed.count(x) for x in ("compiled", "lowered")] == [8, 1]


CACHED = """
import sys
import threading
import jax
from xsake import _first_calls
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

def kernel():
    return jax.numpy.zeros(3)

def program():
    return jax.numpy.ones(3)

_first_calls._compilers().submit(
    _first_calls.compile_uncached, jax.jit(kernel), threading.Barrier(1)
).result()
jax.jit(program).lower().compile()
"""


def test_kernels_compiled_in_threads_are_not_kept_on_disk(tmp_path):
    printed_by(CACHED, str(tmp_path))
    names = {x.name.split("-")[0] for x in tmp_path.iterdir()}
    assert names == {"jit_program"}


@pytest.mark.gpu
@needs_gpu
@needs_patched_jax
def test_a_kernel_is_compiled_in_a_thread_on_a_gpu(monkeypatch, early):
    """Without an error, which would only be logged."""
    from xsake.backends.hopper import delta

    compiled = []
    compile_kernel = _first_calls.compile_kernel

    def counted(*args):
        compile_kernel(*args)
        compiled.append(args)

    monkeypatch.setattr(_first_calls, "compile_kernel", counted)
    tile = jax.ShapeDtypeStruct((1, 1016, 3, 64), jnp.bfloat16)  # a length of no other test
    value = jax.ShapeDtypeStruct((1, 3, 1016), jnp.float32)
    jax.jit(lambda *x: delta.statistics(*x, rows=1024)).lower(tile, tile, value, value)
    early()
    assert len(compiled) == 1
    assert not _first_calls._failed.is_set()
