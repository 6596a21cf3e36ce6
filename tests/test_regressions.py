"""What once failed in rollback, prefill, the convolution and the debug checks, one small test each."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec

import jax_impl
from jax_impl import ConvCache, ConvCacheSpec, HybridCache, debug
from tests.test_deviceless import COPIES, WHEELS, compiled, instructions

SPEC = ConvCacheSpec(1, 8, 4, 3, 4, 4, "float32")
CHECK_VMA = jax.__version_info__ < (0, 11)  # newer kernels take no refs that vary over mesh axes
README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.fixture
def h200() -> Iterator[Any]:
    """A mesh of one H200 that is not there, as the target of this test only: the others run on the CPU."""
    from jax.experimental import topologies

    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip(f"{WHEELS[0]} is not installed")
    target = Path(__file__).with_name("h200_target.textproto").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", target_config=target, topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(np.asarray(topology.devices).reshape(1), ("x",))
    with jax.set_mesh(mesh):
        yield mesh


def pool_copies(program: Any, elements: int) -> list[tuple[str, int]]:
    return [(op, size) for op, size in instructions(program) if op in COPIES and size >= elements]


def written_slots(slots: Any, accepted: Any = (1, 1), **options: Any) -> list[int]:
    pool, windows = jnp.zeros(SPEC.state_shape), jnp.ones(SPEC.windows_shape)
    done = jax_impl.commit_conv_state(pool, windows, slots, accepted, spec=SPEC, **options)
    return sorted(set(np.nonzero(np.asarray(done))[1].tolist()))


# --- pool-sized copies of the plain form on a GPU ---------------------------------------------------------------------


@pytest.mark.parametrize(("axis_order", "conv_dim"), [("time_major", 640), ("time_major", 5), ("channel_major", 5)])
def test_a_plain_update_copies_no_pool(h200: Any, monkeypatch: Any, axis_order: Any, conv_dim: int) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = ConvCacheSpec(6, 1001, 9, conv_dim, 4, 3, axis_order=axis_order)

    def step(pool: Any, x: Any, weight: Any, slots: Any) -> Any:
        options = {"spec": spec, "state_indices": slots, "layer": 1, "implementation": "xla"}
        return jax_impl.causal_conv1d_update(x, pool, weight, **options)[::-1]

    shapes = (spec.state_shape, "bfloat16"), ((3, conv_dim), "bfloat16"), ((conv_dim, 4), "float32"), ((3,), "int32")
    program = compiled(step, h200, *shapes)
    assert not pool_copies(program, math.prod(spec.state_shape))
    assert program.memory_analysis().temp_size_in_bytes < spec.state_bytes / 10


@pytest.mark.parametrize("axis_order", ["time_major", "channel_major"])
def test_plain_updates_in_all_layers_copy_no_pool(h200: Any, monkeypatch: Any, axis_order: Any) -> None:
    """The next layer's input depends on what the last one read from the pool."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = ConvCacheSpec(6, 1001, 9, 640, 4, 3, axis_order=axis_order)

    def step(pool: Any, x: Any, weight: Any, slots: Any) -> Any:
        for layer in range(6):
            options = {"spec": spec, "state_indices": slots, "layer": layer, "implementation": "xla"}
            x, pool = jax_impl.causal_conv1d_update(x, pool, weight, **options)
        return pool, x

    shapes = (spec.state_shape, "bfloat16"), ((3, 640), "bfloat16"), ((640, 4), "float32"), ((3,), "int32")
    assert not pool_copies(compiled(step, h200, *shapes), math.prod(spec.state_shape))


def test_a_plain_recurrent_commit_of_states_made_from_the_pool_copies_no_pool(h200: Any, monkeypatch: Any) -> None:
    """A larger step: the mixer reads the pool, makes the step states, and the commit writes the pool."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    shape = (2, 1001, 4, 128)

    def step(pool: Any, change: Any, slots: Any, accepted: Any) -> Any:
        steps = pool[:, slots][:, :, None] + change
        return jax_impl.commit_recurrent_state(pool, steps, slots, accepted, implementation="xla")

    shapes = (shape, "float32"), ((2, 3, 4, 4, 128), "float32"), ((3,), "int32"), ((3,), "int32")
    assert not pool_copies(compiled(step, h200, *shapes), math.prod(shape))


def test_a_plain_prefill_of_inputs_made_from_the_pool_copies_no_pool(h200: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    spec = ConvCacheSpec(6, 1001, 9, 5, 4, 3)

    def step(pool: Any, weight: Any, slots: Any) -> Any:
        x = jnp.broadcast_to(pool[0, slots].sum((1, 2))[:, None, None], (3, 1, 5))
        options = {"spec": spec, "state_indices": slots, "layer": 1, "implementation": "xla"}
        return jax_impl.causal_conv1d_prefill(x, pool, weight, **options)[::-1]

    program = compiled(step, h200, (spec.state_shape, "bfloat16"), ((5, 4), "float32"), ((3,), "int32"))
    assert not pool_copies(program, math.prod(spec.state_shape))


# --- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["verify", "update", "prefill"])
def test_the_convolution_kernels_run_inside_shard_map(operation: str) -> None:
    """With default options on JAX 0.10; newer ones take refs only where `check_vma` is off."""
    spec = ConvCacheSpec(1, 4, 2, 128, 4, 2, "float32")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"spec": spec, "state_indices": jnp.array([1, 2]), "layer": 0, "implementation": "pallas_interpret"}

    def step(x: Any, pool: Any, windows: Any, weight: Any) -> Any:
        if operation == "verify":
            return jax_impl.causal_conv1d_verify(x, pool, windows, weight, **options)
        if operation == "update":
            return jax_impl.causal_conv1d_update(x[:, 0], pool, weight, **options)
        return jax_impl.causal_conv1d_prefill(x, pool, weight, **options)

    last = PartitionSpec(None, None, None, "x")
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(PartitionSpec(None, None, "x"), last, last, PartitionSpec("x")),
        out_specs=(PartitionSpec(None, "x") if operation == "update" else PartitionSpec(None, None, "x"), last),
        check_vma=CHECK_VMA,
    )
    arrays = jnp.ones((2, 2, 128)), jnp.zeros(spec.state_shape), jnp.zeros(spec.windows_shape), jnp.ones((128, 4))
    jax.jit(sharded)(*arrays)


@pytest.mark.parametrize("operation", ["verify", "prefill"])
def test_the_compiled_kernels_run_inside_shard_map(h200: Any, operation: str) -> None:
    spec = ConvCacheSpec(1, 4, 2, 128, 4, 2)

    def step(windows: Any, pool: Any, x: Any, weight: Any, slots: Any) -> Any:
        options = {"spec": spec, "state_indices": slots, "layer": 0, "implementation": "pallas"}
        if operation == "verify":
            return jax_impl.causal_conv1d_verify(x, pool, windows, weight, **options)
        return jax_impl.causal_conv1d_prefill(x, pool, weight, **options)

    last, inputs = PartitionSpec(None, None, None, "x"), PartitionSpec(None, None, "x")
    sharded = jax.shard_map(
        step,
        mesh=h200,
        in_specs=(last, last, inputs, PartitionSpec("x"), PartitionSpec()),
        out_specs=(inputs, last),
        check_vma=CHECK_VMA,
    )
    shapes = (spec.windows_shape, "bfloat16"), (spec.state_shape, "bfloat16"), ((2, 2, 128), "bfloat16")
    here = jax.sharding.NamedSharding
    specs = (last, last, inputs, PartitionSpec("x"), PartitionSpec())
    every = (*shapes, ((128, 4), "float32"), ((2,), "int32"))
    given = [
        jax.ShapeDtypeStruct(shape, kind, sharding=here(h200, one))
        for (shape, kind), one in zip(every, specs, strict=True)
    ]
    jax.jit(sharded, donate_argnums=0 if operation == "verify" else 1).lower(*given).compile()


@pytest.mark.parametrize("operation", ["verify", "prefill"])
def test_padding_of_nan_stays_out_of_the_gradients(operation: str) -> None:
    """y of invalid tokens is an exact zero, so what x holds there must not reach the gradient of weight or x."""
    x = jnp.ones((1, 4, 3)).at[:, 2:].set(jnp.nan)
    pool, windows = jnp.zeros(SPEC.state_shape), jnp.zeros(SPEC.windows_shape)
    options: dict[str, Any] = {"spec": SPEC, "state_indices": [1], "layer": 0, "implementation": "xla"}

    def loss(x: Any, weight: Any) -> Any:
        if operation == "verify":
            options_of: dict[str, Any] = options | {"num_valid_tokens": [2]}
            return jax_impl.causal_conv1d_verify(x, pool, windows, weight, **options_of)[0].sum()
        return jax_impl.causal_conv1d_prefill(x, pool, weight, **options, lengths=[2])[0].sum()

    gradients = jax.grad(loss, argnums=(0, 1))(x, jnp.ones((3, 4)))
    assert not any(bool(jnp.isnan(one).any()) for one in gradients)


# --- index arrays -----------------------------------------------------------------------------------------------------


def test_a_wide_integer_beside_a_jax_scalar_wraps_into_no_slot() -> None:
    assert written_slots([jnp.int32(1), np.int64(2**32 + 3)]) == [1]


def test_a_wide_count_beside_a_jax_scalar_wraps_into_no_count() -> None:
    assert written_slots([1, 2], [jnp.int32(1), np.int64(2**32 + 2)]) == [1]


def test_a_large_python_integer_beside_a_jax_scalar_saturates() -> None:
    assert written_slots([jnp.int32(1), 2**40]) == [1]


@pytest.mark.parametrize("first", [2, jnp.int32(2)], ids=["python", "jax"])
def test_a_bool_in_a_list_is_no_slot(first: Any) -> None:
    """An array of bools is refused, and torch_ref refuses the list."""
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="state_indices"):
        written_slots([first, True])


@pytest.mark.parametrize(
    ("row", "expected"), [([0, np.iinfo(np.int64).min], 1), ([0, -(2**32)], 1), ([0, 2**31, 5, -1], 3)], ids=str
)
def test_accepted_from_index_reads_all_of_a_wide_integer(row: list[int], expected: int) -> None:
    index = np.array([row], np.int64)
    pytest.importorskip("torch")
    import torch_ref

    assert torch_ref.accepted_from_index(index).tolist() == [expected]
    assert jax_impl.accepted_from_index(index).tolist() == [expected]


def test_accepted_from_index_refuses_unsigned_integers_as_torch_ref_does() -> None:
    """-1 as uint32 is 4294967295, which counts as accepted: every row would be D."""
    index = np.array([[0, 2**32 - 1]], np.uint32)
    pytest.importorskip("torch")
    import torch_ref

    with pytest.raises(ValueError, match="accept_index"):
        torch_ref.accepted_from_index(index)
    with pytest.raises(ValueError, match="accept_index"):
        jax_impl.accepted_from_index(index)


def test_both_packages_track_a_length_past_int32_alike() -> None:
    pytest.importorskip("torch")
    import torch_ref

    lengths, accepted = np.array([2**31 + 62]), np.array([4])
    expected = torch_ref.track_tokens_at_boundary(lengths, accepted, 64).tolist()
    assert jax_impl.track_tokens_at_boundary(lengths, accepted, 64).tolist() == expected == [2]


def test_accepted_from_index_refuses_a_ragged_list_by_name() -> None:
    with pytest.raises(ValueError, match=r"^`accept_index`: expected"):
        jax_impl.accepted_from_index([[0, -1], [1]])


def test_prefill_refuses_a_ragged_list_by_name() -> None:
    ragged: Any = [[1], [1, 2]]
    arrays, options = (jnp.zeros(SPEC.state_shape), jnp.ones((3, 4))), {"state_indices": [0, 1], "layer": 0}
    with pytest.raises(ValueError, match=r"^`x`: expected"):
        jax_impl.causal_conv1d_prefill(ragged, *arrays, spec=SPEC, **options)


# --- whole caches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"num_draft_tokens": 3}, {"num_slots": 4}], ids=str)
@pytest.mark.parametrize("package", ["jax_impl", "torch_ref"])
def test_groups_that_would_skip_differently_are_refused(package: str, change: dict[str, int]) -> None:
    """Slot 6, n = 4: one group commits and the other skips, so the request is rolled back to two different tokens."""
    pytest.importorskip("torch")
    import torch_ref

    if package == "jax_impl":
        allocate, commit, spec = jax_impl.allocate_conv_cache, jax_impl.commit_after_verify, SPEC
    else:
        allocate, commit = torch_ref.allocate_conv_cache, torch_ref.commit_after_verify
        spec: Any = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
    cache = {"q": allocate(spec), "k": allocate(dataclasses.replace(spec, **change))}
    with pytest.raises(ValueError, match="cache"):
        commit(cache, [6], [4])


@pytest.mark.parametrize("package", ["jax_impl", "torch_ref"])
def test_one_cache_per_layer_goes_with_a_stack_of_recurrent_states(package: str) -> None:
    """`HybridCache`: conv "one cache per layer", recurrent_state "`[L, C, …]`"."""
    torch = pytest.importorskip("torch")
    import torch_ref

    if package == "jax_impl":
        caches = [jax_impl.allocate_conv_cache(SPEC) for _ in range(3)]
        hybrid: Any = HybridCache(caches, jnp.zeros((3, 8, 5)))
        jax_impl.commit_after_verify(hybrid, [1], [1], step_states=jnp.zeros((3, 4, 4, 5)))
    else:
        spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
        hybrid = torch_ref.HybridCache([torch_ref.allocate_conv_cache(spec) for _ in range(3)], torch.zeros(3, 8, 5))
        torch_ref.commit_after_verify(hybrid, [1], [1], step_states=torch.zeros(3, 4, 4, 5))


def test_a_pool_without_slots_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValueError, match=r"`state`|`step_states`"):
        jax_impl.commit_recurrent_state(jnp.zeros((1, 0, 4)), jnp.zeros((1, 2, 3, 4)), [0], [1])


def test_messages_of_commit_after_verify_name_its_arguments() -> None:
    cache = {"q": ConvCache(jnp.zeros(3), jnp.zeros(SPEC.windows_shape), SPEC)}
    with pytest.raises(ValueError, match=r"^`cache"):
        jax_impl.commit_after_verify(cache, [1], [1])


# --- debug.check_commit -----------------------------------------------------------------------------------------------


def test_check_commit_reports_what_a_wide_integer_skips() -> None:
    """The commit saturates 2^64 - 1 to a slot outside the pool and skips it; the check sees -1, skipped on purpose."""
    slots = np.array([2**64 - 1], np.uint64)
    assert len(debug.check_commit(slots, [1], spec=SPEC)) == 1


def test_check_commit_takes_python_integers_of_any_size() -> None:
    assert written_slots([2**63, 1]) == [1]
    assert len(debug.check_commit([2**63, 1], [1, 1], spec=SPEC)) == 1


@pytest.mark.parametrize(
    "slots", [[1.7, 1.2], np.array([True, True]), None, ["a"]], ids=["float", "bool", "none", "str"]
)
def test_check_commit_refuses_what_the_commit_refuses(slots: Any) -> None:
    with pytest.raises(ValueError, match="`state_indices`"):
        written_slots(slots)
    with pytest.raises(ValueError, match="`state_indices`"):
        debug.check_commit(slots, [1, 1], spec=SPEC)


@pytest.mark.parametrize("null_slot", [True, 1.5])
def test_check_commit_refuses_the_null_slots_that_the_commit_refuses(null_slot: Any) -> None:
    with pytest.raises(ValueError, match="`null_slot`"):
        debug.check_commit([1, 2], [1, 1], spec=SPEC, null_slot=null_slot)


def test_check_commit_takes_any_null_slot_inside_jit() -> None:
    """As the commit does, and as the check does outside jit."""
    assert written_slots([1, 2], null_slot=2**40) == [1, 2]
    checked = checkify.checkify(jax.jit(lambda s, n: debug.check_commit(s, n, spec=SPEC, null_slot=2**40)))
    error, _ = checked(jnp.array([1, 2]), jnp.array([1, 1]))
    assert error.get() is None


@pytest.mark.parametrize(
    ("slots", "accepted", "options"),
    [
        ([8], [1], {"null_slot": 8}),  # a padding slot behind the pool
        ([-1], [1], {"window_rows": [-1]}),
        ([-1], [5], {}),
        ([0], [1], {"null_slot": 0, "num_valid_tokens": [0]}),
    ],
    ids=["null slot behind the pool", "row", "count", "valid"],
)
def test_check_commit_is_silent_about_what_is_skipped_on_purpose(slots: Any, accepted: Any, options: Any) -> None:
    """Its docstring: "a negative slot and the null slot are the ways to skip on purpose and are not reported"."""
    assert debug.check_commit(slots, accepted, spec=SPEC, **options) == []


# --- envelopes and prefill --------------------------------------------------------------------------------------------


def test_a_layer_outside_the_envelope_gives_minus_one_or_is_refused() -> None:
    spec = ConvCacheSpec(3, 10, 4, 128, 4, 4)
    assert jax_impl.envelope_slots([0, 2], jnp.int32(3), spec=spec, envelope_elements=5 * 384).tolist() == [-1, -1]
    with pytest.raises(ValueError, match="`layer`: expected 0 to num_layers - 1 = 2, got 3"):
        jax_impl.envelope_slots([0, 2], 3, spec=spec, envelope_elements=5 * 384)


def test_an_envelope_takes_numpy_integers() -> None:
    """5 * 384 is a multiple of one state, whatever the message says."""
    spec = ConvCacheSpec(3, 10, 4, 128, 4, 4)
    assert jax_impl.envelope_spec(spec, np.int64(5 * 384)).num_slots == 50  # type: ignore[arg-type]


def test_prefill_left_to_choose_takes_prompts_too_long_for_the_kernel(monkeypatch: Any) -> None:
    """The error says "None to fall back to it", to a caller that gave None."""
    monkeypatch.setattr("jax_impl.prefill.choose_implementation", lambda *_: "pallas")  # as on a GPU
    spec = ConvCacheSpec(1, 2, 1, 128, 4, 4)
    tokens = 65_535 * 16 + 1
    shapes = [(1, tokens, 128), spec.state_shape, (128, 4)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    options = {"spec": spec, "state_indices": [1], "layer": 0}
    jax.eval_shape(lambda x, pool, weight: jax_impl.causal_conv1d_prefill(x, pool, weight, **options), *arrays)


def test_prefill_names_the_limit_that_was_passed() -> None:
    """K = 10 with 17 tokens is refused as "a width of at most 9", while K = 10 with 1000 tokens is taken."""
    spec = ConvCacheSpec(1, 2, 1, 128, 10, 4, "float32")
    options = {"spec": spec, "state_indices": [1], "layer": 0, "implementation": "pallas_interpret"}

    def prefill(tokens: int) -> Any:
        shapes = [(1, tokens, 128), spec.state_shape, (128, 10)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return jax.eval_shape(lambda *a: jax_impl.causal_conv1d_prefill(*a, **options), *arrays)

    prefill(1000)
    with pytest.raises(ValueError, match="17 tokens") as refused:
        prefill(17)
    assert "width of at most 9" not in str(refused.value)


# --- torch_ref --------------------------------------------------------------------------------------------------------


def test_triton_takes_the_null_slots_that_eager_takes() -> None:
    torch = pytest.importorskip("torch")
    import torch_ref

    spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
    for implementation in ("eager", "triton"):
        pool, windows = torch.zeros(spec.state_shape), torch.ones(spec.windows_shape)
        options: Any = {"spec": spec, "null_slot": np.int64(1), "implementation": implementation}
        torch_ref.commit_conv_state(pool, windows, [1, 2], [1, 1], **options)
        assert pool.sum(dim=(0, 2, 3)).nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("flags", [[True, [False]], "ab", object()], ids=["ragged", "string", "object"])
def test_torch_prefill_refuses_flags_by_name(flags: Any) -> None:
    torch = pytest.importorskip("torch")
    import torch_ref

    spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
    options: Any = {"spec": spec, "state_indices": [0, 1], "layer": 0, "has_initial_state": flags}
    with pytest.raises(ValueError, match="has_initial_state"):
        torch_ref.causal_conv1d_prefill(torch.ones(2, 4, 3), torch.zeros(spec.state_shape), torch.ones(3, 4), **options)


def test_torch_prefill_refuses_prompts_without_tokens_as_jax_does() -> None:
    torch = pytest.importorskip("torch")
    import torch_ref

    spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
    options: Any = {"spec": spec, "state_indices": [0, 1], "layer": 0}
    with pytest.raises(ValueError, match="`x`"):
        torch_ref.causal_conv1d_prefill(torch.ones(2, 0, 3), torch.zeros(spec.state_shape), torch.ones(3, 4), **options)


@pytest.mark.filterwarnings("ignore")
def test_torch_refuses_a_complex_layer() -> None:
    torch = pytest.importorskip("torch")
    import torch_ref

    spec = torch_ref.ConvCacheSpec(**dataclasses.asdict(SPEC))
    options: Any = {"spec": spec, "state_indices": [0], "layer": torch.tensor(0, dtype=torch.complex128)}
    arrays = torch.ones(1, 3), torch.zeros(spec.state_shape), torch.ones(3, 4)
    with pytest.raises(ValueError, match="layer"):
        torch_ref.causal_conv1d_update(*arrays, **options)


# --- README -----------------------------------------------------------------------------------------------------------


def test_the_readme_knows_the_prefill_kernel() -> None:
    assert "Prefill has only the plain form" not in README


def test_the_readme_points_at_functions_that_exist() -> None:
    missing = []
    for row in README.splitlines():
        for name, module in re.findall(r"`(_?[a-z_]+)` in `(jax_impl/\w+\.py)`", row):
            source = (Path(__file__).parent.parent / module).read_text()
            missing += [] if f"def {name}(" in source else [f"{module}: {name}"]
    assert not missing


def test_the_readme_says_how_many_requests_a_commit_with_two_sets_takes() -> None:
    """ "Up to 65,535 requests a call in the kernels", but both index sets count together."""
    from jax_impl.pallas_backend import choose

    spec = ConvCacheSpec(1, 4, 4, 128, 4, 4)
    with pytest.raises(ValueError, match="both index sets"):
        choose("pallas_interpret", [spec], 2 * 40_000)
    (line,) = [one for one in README.splitlines() if "65,535 requests" in one]
    assert "set" in line
