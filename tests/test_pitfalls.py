"""What went wrong in public serving stacks and in JAX, and the tests that would notice it here.

The table names at least one test for each; the tests that no other file has follow it. "everywhere" is what must hold
on every path: one of its tests takes `path` or `any_path`, so that it runs interpreted and, with `-m gpu`, compiled.
"card" is what only a GPU shows: one of its tests has the marker `gpu`.
"""

import ast
import functools
import itertools
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_impl import causal_conv1d_update, causal_conv1d_verify, commit_conv_state
from jax_impl.layout import ConvCacheSpec
from tests import adapters
from tests.adapters import DEFINITION, Path
from tests.cases import (
    INT32_MAX,
    INT32_MIN,
    assert_same_bits,
    both_orders,
    poison,
    spec_of,
    unique_bits,
    values,
)

FOLDER = pathlib.Path(__file__).parent

# what goes wrong: (where it must be tested, "file::test" …)
TABLE: dict[str, tuple[str, ...]] = {
    # layout
    "swapped axis, hidden by full acceptance": (
        "everywhere",
        "test_gather_commit::test_axis_orders_hold_the_same_columns",
        "test_gather_commit::test_commit_equals_the_definition",
        "test_gpu::test_scatter",
    ),
    "a tree of drafts in the shared run": (
        "",
        "test_layout::test_links_decide_the_storage",
        "test_layout::test_the_oracle_decides_the_same",
    ),
    "reported bytes are not the allocated ones": (
        "",
        "test_layout::test_bytes_are_those_of_the_allocated_arrays",
        "test_layout::test_the_saving_depends_on_width_and_tokens_only",
        "test_torch_ref::test_reported_bytes_are_allocated_bytes",
    ),
    "a special path for K = 2": (
        "everywhere",
        "test_gather_commit::test_with_width_two_sliding_and_dense_agree",
        "test_verify::test_with_width_two_sliding_and_dense_hold_the_same_bits",
    ),
    "fewer tokens than state columns": ("everywhere", "test_verify::test_fewer_tokens_than_state_columns"),
    "sizes that are no power of two": (
        "everywhere card",
        "test_gather_commit::test_commit_equals_the_definition",
        "test_verify::test_verify_equals_the_definition",
        "test_pitfalls::test_odd_sizes_compiled",
        "test_deviceless::test_every_geometry_compiles",
    ),
    "taps in the wrong order": ("everywhere", "test_verify::test_one_hot_weights_pick_columns"),
    "a pool that keeps K columns": (
        "everywhere",
        "test_gather_commit::test_state_of_k_columns_takes_windows_of_k",
        "test_verify::test_update_equals_the_definition",
        "test_verify::test_verify_equals_the_definition",
    ),
    # verify and commit
    "verify that advances the pool": (
        "everywhere card",
        "test_verify::test_the_pool_keeps_its_bits",
        "test_gpu::test_two_hundred_steps_leave_the_pool_alone",
    ),
    "a shift that reads what it has overwritten": (
        "everywhere",
        "test_pitfalls::test_steps_in_a_donated_loop",
        "test_verify::test_update_equals_the_definition",
    ),
    "sources and destinations that overlap": (
        "everywhere",
        "test_gather_commit::test_permuted_rows_and_slots",
        "test_torch_commit_groups::test_all_reads_come_before_any_write",
    ),
    "a kernel that reads the row it writes": (
        "everywhere card",
        "test_pitfalls::test_in_place_equals_out_of_place",
        "test_decode_equivalence::test_tokens_at_once_equal_tokens_one_by_one",
    ),
    "speculative and plain requests in one batch": (
        "everywhere",
        "test_decode_equivalence::test_speculative_and_plain_requests_in_one_batch",
        "test_decode_equivalence::test_a_step_without_drafts_follows_a_partial_acceptance",
    ),
    "nothing accepted between requests that are": (
        "everywhere",
        "test_gather_commit::test_every_pair_of_counts_in_neighbouring_rows",
        "test_decode_equivalence::test_fifty_steps_of_random_acceptance",
        "test_properties::test_sliding_and_dense_are_one_token_decoding",
    ),
    "groups of different K in one call": (
        "everywhere",
        "test_gather_commit::test_several_conv_groups",
        "test_rollback::test_three_groups_snapshots_and_recurrent_state_in_one_call",
    ),
    "a snapshot that is the accepted window": (
        "everywhere",
        "test_gather_commit::test_track_set_is_its_own_step_of_the_same_row",
    ),
    # indices and padding
    "-1 is the last slot": (
        "everywhere",
        "test_gather_commit::test_slots_outside_the_pool_write_nothing",
        "test_pitfalls::test_slots_outside_a_pool_of_wide_rows",
    ),
    "slot C of one layer is slot 0 of the next": (
        "everywhere",
        "test_gather_commit::test_slots_outside_the_pool_write_nothing",
    ),
    "padding that repeats a live slot or an old batch": (
        "everywhere",
        "test_gather_commit::test_padding_rows_of_three_conventions",
        "test_gather_commit::test_without_a_null_slot_slot_zero_is_like_any_other",
        "test_pitfalls::test_padding_that_carries_the_last_batch",
    ),
    "one slot for two requests": (
        "everywhere",
        "test_gather_commit::test_duplicate_live_slots_leave_all_others_right",
        "test_debug::test_slots_named_twice",
    ),
    "index arrays of other lengths and types": (
        "everywhere",
        "test_gather_commit::test_other_integers_saturate_and_never_wrap",
        "test_gather_commit::test_bools_and_floats_are_no_indices",
        "test_gather_commit::test_no_requests",
        "test_verify::test_no_requests",
        "test_pitfalls::test_index_arrays_of_another_length_are_refused",
    ),
    "a row full of NaN from its last owner": (
        "everywhere",
        "test_verify::test_no_nan_of_a_previous_owner",
        "test_gather_commit::test_columns_outside_the_window_are_not_read",
    ),
    "y of padding is unwritten memory": (
        "everywhere card",
        "test_pitfalls::test_y_in_memory_that_held_nan",
        "test_verify::test_verify_equals_the_definition",
        "test_regressions::test_padding_of_nan_stays_out_of_the_gradients",
    ),
    # numbers
    "rounding that the compiler leaves out": (
        "everywhere",
        "test_decode_equivalence::test_tokens_at_once_equal_tokens_one_by_one",
    ),
    "bit patterns that a copy changes": (
        "everywhere",
        "test_gather_commit::test_all_sixteen_bit_patterns_survive",
        "test_gather_commit::test_float32_patterns_survive",
        "test_properties::test_any_bits_survive",
    ),
    "mixed dtypes of inputs and state": (
        "everywhere",
        "test_verify::test_inputs_are_rounded_to_the_state_once",
        "test_verify::test_products_are_not_rounded_before_the_sum",
        "test_errors::test_message",
    ),
    "the arithmetic of Triton's interpreter": (
        "everywhere",
        "test_verify::test_inputs_are_rounded_to_the_state_once",
        "test_gather_commit::test_all_sixteen_bit_patterns_survive",
    ),
    # JAX and Pallas
    "a donated pool that is copied": (
        "card",
        "test_in_place::test_a_donated_pool_keeps_its_address",
        "test_deviceless::test_the_kernel_is_one_launch_in_place",
        "test_deviceless::test_a_decoding_step_is_in_place",
        "test_gpu::test_a_donated_gibibyte_stays_where_it_is",
        "test_gpu::test_a_whole_step_is_in_place",
    ),
    "interpreter and compiler mask differently": (
        "everywhere card",
        "test_pitfalls::test_guards_around_the_last_of_everything",
        "test_gpu::test_guard_rows_of_nan",
    ),
    "old arrays, and results that nobody uses": (
        "",
        "test_in_place::test_without_donation_the_old_arrays_are_unchanged",
        "test_model_decode::test_a_planted_fault_changes_the_tokens",
    ),
    "a pool that is gathered on every device": (
        "card",
        "test_sharding::test_on_host_devices",
        "test_sharding::test_every_slot_is_of_one_rank",
        "test_sharding::test_on_the_devices_of_this_machine",
        "test_deviceless::test_on_many_gpus_no_operation_communicates",
    ),
    "addresses past 32 bits": (
        "card",
        "test_gpu::test_past_two_to_the_thirty_two",
        "test_gpu::test_triton_past_two_to_the_thirty_two",
        "test_torch_ref::test_offsets_past_two_to_the_31",
    ),
    "grid axes that end at 65,535": (
        "",
        "test_hostile_input::test_more_requests_than_a_grid_axis_has_places",
        "test_torch_ref::test_one_launch_axis_and_more_than_one_block",
    ),
    "deprecations that become errors": ("", "test_pitfalls::test_a_deprecation_is_an_error"),
    "programs that grow with the number of layers": (
        "",
        "test_pitfalls::test_a_loop_over_layers_is_one_layer",
        "test_pitfalls::test_unrolled_layers_share_one_kernel",
        "test_deviceless::test_verify_in_every_layer_is_in_place",
    ),
}
NUMBER_OF_PITFALLS = 35


@functools.cache
def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((FOLDER / f"{file}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_for_the_card(file: str, name: str) -> bool:
    source = (FOLDER / f"{file}.py").read_text(encoding="utf-8")
    marks = [ast.unparse(mark) for mark in functions_of(file)[name].decorator_list]
    return "pytestmark = pytest.mark.gpu" in source or any("pytest.mark.gpu" in mark for mark in marks)


def takes_a_path(file: str, name: str) -> bool:
    return bool({one.arg for one in functions_of(file)[name].args.args} & {"path", "any_path"})


@pytest.mark.parametrize("pitfall", TABLE)
def test_every_pitfall_has_its_tests(pitfall: str) -> None:
    where, *tests = TABLE[pitfall]
    named = [tuple(test.split("::")) for test in tests]
    assert named, pitfall
    for file, name in named:
        assert name in functions_of(file), f"{file} has no {name}"
    everywhere = any(takes_a_path(*test) for test in named)
    if "everywhere" in where:
        assert everywhere, "no test takes `path`"
    if "card" in where:
        assert everywhere or any(is_for_the_card(*test) for test in named), "no test runs on a GPU"


def test_no_pitfall_is_forgotten() -> None:
    assert len(TABLE) == NUMBER_OF_PITFALLS
    assert {where for entry in TABLE.values() for where in entry[0].split()} == {"everywhere", "card"}


# --- layout -----------------------------------------------------------------------------------------------------------

# One program takes all of these, so that the compiler is started once for each width.
ODD = tuple(itertools.product((1, 5, 7, 16), (1, 5, 96, 1000)))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 5, 7])
@both_orders
@pytest.mark.parametrize("name", ["jax-xla-gpu", "torch-triton-gpu"])
def test_odd_sizes_compiled(name: str, axis_order: Any, width: int) -> None:
    """Channels that no block divides, on the two paths that take them; the Pallas kernels have multiples of 128."""
    path = adapters.path(name)
    specs = tuple(spec_of(width, tokens, conv_dim=dim, axis_order=axis_order, num_slots=31, max_requests=29)
                  for tokens, dim in ODD)  # fmt: skip
    pools = tuple(unique_bits(spec.state_shape, spec.dtype, 1 + i) for i, spec in enumerate(specs))
    windows = tuple(unique_bits(spec.windows_shape, spec.dtype, 51 + i) for i, spec in enumerate(specs))
    accepted = np.asarray([*range(-1, 18), INT32_MIN, INT32_MAX], np.int32)
    slots = np.random.default_rng(width).permutation(31)[: len(accepted)].astype(np.int32)
    for spec, pool, buffer in zip(specs, pools, windows, strict=True):
        got = path.commit(pool, buffer, slots, accepted, spec=spec)
        what = f"D = {spec.num_draft_tokens}, conv_dim = {spec.conv_dim}"
        assert_same_bits(got, DEFINITION.commit(pool, buffer, slots, accepted, spec=spec), what)
        x = values((len(slots), spec.num_draft_tokens, spec.conv_dim), "float32", 5)
        pool = values(spec.state_shape, spec.dtype, 6)
        weight = values((spec.conv_dim, width), "float32", 7)
        options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1}
        _, mine, after = path.verify(x, pool, buffer, weight, **options)
        assert_same_bits(after, pool, what)
        assert_same_bits(mine, DEFINITION.verify(x, pool, buffer, weight, **options)[1], what)


# --- verify and commit ------------------------------------------------------------------------------------------------


COMPILED = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-gpu") for name in ("xla", "pallas")]
KERNELS = ["xla", "pallas_interpret", *COMPILED]


@pytest.mark.parametrize("implementation", ["xla", *COMPILED])
@both_orders
def test_steps_in_a_donated_loop(axis_order: Any, implementation: Any) -> None:
    """Shift left and append, five times in one program on a donated pool: every step reads what the last one wrote."""
    spec = spec_of(5, 1, axis_order=axis_order, dtype="float32")
    pool, x = values(spec.state_shape, "float32", 1), values((5, 2, 128), "float32", 2)
    weight, slots = values((128, 5), "float32", 3), np.asarray([7, 3], np.int32)
    options: dict[str, Any] = {"spec": spec, "layer": 1}

    def run(pool: Any, x: Any) -> Any:
        def step(pool: Any, x: Any) -> Any:
            y, pool = causal_conv1d_update(
                x, pool, jnp.array(weight), state_indices=jnp.array(slots), implementation=implementation, **options
            )
            return pool, y

        return lax.scan(step, pool, x)

    after, _ = jax.jit(run, donate_argnums=0)(jnp.array(pool), jnp.array(x))
    for one in x:
        _, pool = DEFINITION.update(one, pool, weight, state_indices=slots, **options)
    assert_same_bits(np.asarray(after), pool)


@pytest.mark.parametrize("implementation", KERNELS)
def test_in_place_equals_out_of_place(implementation: Any) -> None:
    """Update, which reads and writes one slot, and commit: with the pool donated and with the pool kept, equal bits."""
    spec = spec_of(4, 3, dtype="float32")
    before, x = values(spec.state_shape, "float32", 1), jnp.array(values((4, 128), "float32", 2))
    slots, accepted = jnp.asarray([7, 3, -1, 0], jnp.int32), jnp.asarray([3, 1, 2, 0], jnp.int32)
    weight, windows = jnp.array(values((128, 4), "float32", 3)), jnp.array(values(spec.windows_shape, "float32", 4))
    options: dict[str, Any] = {"spec": spec, "implementation": implementation}

    def update(pool: Any) -> Any:
        return causal_conv1d_update(x, pool, weight, state_indices=slots, layer=1, **options)

    def commit(pool: Any) -> Any:
        return commit_conv_state(pool, windows, slots, accepted, **options)

    for function in (update, commit):
        donated = jax.jit(function, donate_argnums=0)(jnp.array(before))
        kept = jax.jit(function)(jnp.array(before))
        for mine, theirs in zip(jax.tree.leaves(donated), jax.tree.leaves(kept), strict=True):
            assert_same_bits(np.asarray(mine), np.asarray(theirs))
        assert (np.asarray(jax.tree.leaves(kept)[-1]) != before).any()


# --- indices and padding ----------------------------------------------------------------------------------------------


@both_orders
def test_slots_outside_a_pool_of_wide_rows(path: Path, axis_order: Any) -> None:
    """As `test_slots_outside_the_pool_write_nothing`, for a model's 3 × 8192 elements a slot."""
    spec = ConvCacheSpec(2, 5, 5, 8192, 4, 2, axis_order=axis_order)
    pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    outside = np.asarray([-1, 5, 6, INT32_MIN, INT32_MAX], np.int32)
    assert_same_bits(path.commit(pool, windows, outside, np.full_like(outside, 2), spec=spec), pool)


def test_padding_that_carries_the_last_batch(path: Path) -> None:
    """A batch shrinks from four requests to one: the rest keeps old slots, rows and v, now with n = 0."""
    spec = spec_of(4, 3)
    pool, windows = unique_bits(spec.state_shape, spec.dtype, 1), unique_bits(spec.windows_shape, spec.dtype, 2)
    slots, rows = np.asarray([3, 8, 1, 6], np.int32), np.asarray([4, 0, 7, 2], np.int32)
    shared: dict[str, Any] = {"spec": spec, "window_rows": rows, "num_valid_tokens": np.full(4, 3, np.int32)}
    first = path.commit(pool, windows, slots, np.asarray([1, 3, 2, 1], np.int32), **shared)
    windows = unique_bits(spec.windows_shape, spec.dtype, 3)
    second = path.commit(first, windows, slots, np.asarray([0, 2, 0, 0], np.int32), **shared)
    expected = first.copy()
    expected[:, 8] = windows[:, 0, 1:4]
    assert_same_bits(second, expected)


def test_index_arrays_of_another_length_are_refused(path: Path) -> None:
    """One more, or one fewer, than requests: an error that names the array, not a broadcast."""
    spec = spec_of(4, 3)
    pool, windows = values(spec.state_shape, spec.dtype, 1), poison(spec.windows_shape, spec.dtype)
    x, weight = values((2, 3, 128), spec.dtype, 3), values((128, 4), spec.dtype, 4)
    two = np.asarray([1, 2], np.int32)
    for other in (np.asarray([1], np.int32), np.asarray([1, 2, 3], np.int32)):
        with pytest.raises(ValueError, match="`num_accepted_tokens`: expected"):
            path.commit(pool, windows, two, other, spec=spec)
        for name in ("window_rows", "num_valid_tokens"):
            with pytest.raises(ValueError, match=f"`{name}`: expected"):
                path.commit(pool, windows, two, two, spec=spec, **{name: other})
            with pytest.raises(ValueError, match=f"`{name}`: expected"):
                path.verify(x, pool, windows, weight, spec=spec, state_indices=two, layer=0, **{name: other})
        with pytest.raises(ValueError, match=r"`(x|state_indices)`: expected"):
            path.verify(x, pool, windows, weight, spec=spec, state_indices=other, layer=0)


def test_y_in_memory_that_held_nan(path: Path) -> None:
    """Memory of y's size held NaN a moment ago; y of what is skipped is an exact zero, so 0 · y is 0 and not NaN."""
    spec = spec_of(4, 3, dtype="float32")
    pool, windows = values(spec.state_shape, "float32", 1), poison(spec.windows_shape, "float32")
    weight, slots = values((128, 4), "float32", 3), np.asarray([-1, 7, 11, 3], np.int32)
    valid = np.asarray([3, 1, 3, 0], np.int32)
    x = values((4, 3, 128), "float32", 2)
    computed = np.asarray([[False] * 3, [True, False, False], [False] * 3, [False] * 3])
    options: dict[str, Any] = {"spec": spec, "state_indices": slots, "layer": 1}
    spoil(path, x.shape)
    y, _, _ = path.verify(x, pool, windows, weight, num_valid_tokens=valid, **options)
    assert not y[~computed].view(np.uint32).any()
    assert np.isfinite(y).all()
    spoil(path, x[:, 0].shape)
    y, _ = path.update(x[:, 0], pool, weight, **options)
    assert not y[[0, 2]].view(np.uint32).any()
    spoil(path, x.shape)
    y, _ = path.prefill(x, pool, weight, lengths=valid, **options)
    assert not y[~computed].view(np.uint32).any()


def spoil(path: Path, shape: tuple[int, ...]) -> None:
    """Allocates, fills with NaN and frees some arrays of a shape where the path's results will be."""
    if path.name.startswith("jax"):
        arrays = [jnp.full(shape, jnp.nan, jnp.float32) for _ in range(8)]
        jax.block_until_ready(arrays)
        return
    import torch

    for _ in range(2):
        _ = [torch.full(shape, float("nan"), device="cuda" if path.on_gpu else "cpu") for _ in range(8)]


@pytest.mark.parametrize(("axis_order", "storage"), [("time_major", "dense"), ("channel_major", "sliding")])
def test_guards_around_the_last_of_everything(path: Path, axis_order: Any, storage: Any) -> None:
    """The first and the last layer, slot and row: all around them is NaN before and after, and y never is."""
    spec = ConvCacheSpec(2, 3, 3, 128, 4, 3, axis_order=axis_order, storage=storage)
    x, weight = values((1, 3, 128), spec.dtype, 1), values((128, 4), spec.dtype, 2)
    for place in (0, -1):
        layer, slot, row = place % 2, place % 3, place % 3
        pool, windows = poison(spec.state_shape, spec.dtype), poison(spec.windows_shape, spec.dtype)
        pool[layer, slot] = values(spec.window_shape, spec.dtype, 3)
        options: dict[str, Any] = {"spec": spec, "window_rows": np.asarray([row], np.int32)}
        slots = np.asarray([slot], np.int32)
        y, buffer, after = path.verify(x, pool, windows, weight, state_indices=slots, layer=layer, **options)
        assert np.isfinite(y.astype(np.float32)).all()
        assert_same_bits(after, pool)
        assert_same_bits(
            buffer, DEFINITION.verify(x, pool, windows, weight, state_indices=slots, layer=layer, **options)[1]
        )
        accepted = np.asarray([2], np.int32)
        committed = path.commit(pool, buffer, slots, accepted, **options)
        assert_same_bits(committed, DEFINITION.commit(pool, buffer, slots, accepted, **options))


# --- JAX and Pallas ---------------------------------------------------------------------------------------------------


def test_a_deprecation_is_an_error() -> None:
    """Of JAX or anybody: what works with a warning today is gone in a version or two."""
    for kind in (DeprecationWarning, FutureWarning, UserWarning):
        with pytest.raises(kind):
            warnings.warn("old", kind, stacklevel=1)


def equations(layers: int, implementation: Any, *, unrolled: bool) -> list[Any]:
    """All equations, inner ones too, of verify in every layer and one commit."""
    spec = ConvCacheSpec(layers, 5, 4, 128, 4, 3)

    def step(pool: Any, windows: Any, x: Any, weight: Any, slots: Any) -> Any:
        def one_layer(layer: Any, windows: Any) -> Any:
            options: dict[str, Any] = {"spec": spec, "state_indices": slots, "implementation": implementation}
            return causal_conv1d_verify(x, pool, windows, weight, layer=layer, **options)[1]

        if unrolled:
            for layer in range(layers):
                windows = one_layer(layer, windows)
        else:
            windows = lax.fori_loop(0, layers, one_layer, windows)
        return commit_conv_state(pool, windows, slots, slots, spec=spec, implementation=implementation), windows

    shapes = (spec.state_shape, spec.windows_shape, (2, 3, 128), (128, 4))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    traced = jax.make_jaxpr(step)(*arrays, jax.ShapeDtypeStruct((2,), jnp.int32))
    return list(_walk(traced.jaxpr))


def _walk(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda one: hasattr(one, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _walk(inner)


@pytest.mark.parametrize("implementation", ["xla", "pallas_interpret"])
def test_a_loop_over_layers_is_one_layer(implementation: Any) -> None:
    """48 layers under a loop are the program of two layers: tracing and compiling take no longer."""
    few, many = (equations(layers, implementation, unrolled=False) for layers in (2, 48))
    assert len(few) == len(many) > 50


def test_unrolled_layers_share_one_kernel() -> None:
    """48 launches of verify and one of commit, and one traced kernel for all the verifies."""
    found = [one for one in equations(48, "pallas_interpret", unrolled=True) if "name" in one.params]
    launches = {name: [one for one in found if one.params["name"] == name] for name in ("_run_conv", "_run_commit")}
    assert {name: len(every) for name, every in launches.items()} == {"_run_conv": 48, "_run_commit": 1}
    assert len({id(one.params["jaxpr"]) for one in launches["_run_conv"]}) == 1
