"""What bench compiles, compiled for a GPU that is not there: launches, memory and copies of every program."""

import re
from typing import Any

import jax
import pytest

from jax_impl.bench import compiling, drafts, program, subjects
from jax_impl.layout import AxisOrder, ConvCacheSpec
from tests.cases import both_orders
from tests.test_deviceless import h200  # noqa: F401  # a fixture


@pytest.fixture
def on_h200(h200: Any) -> Any:  # noqa: F811
    """Shapes of arrays on it."""
    here = jax.sharding.NamedSharding(h200, jax.sharding.PartitionSpec())
    return lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=here)


@both_orders
def test_programs_of_a_gpu(on_h200: Any, axis_order: Any) -> None:
    """One launch a call, none of them a copy of the pool, next to no memory besides what the layers hand on."""
    spec = ConvCacheSpec(6, 101, 9, 640, 4, 3, axis_order=axis_order)
    of_layer = 2 * 9 * 3 * 640
    for plan in compiling.programs(spec, 9, (1, 6)):
        row = compiling.compiled(plan, "pallas", on_h200)
        assert compiling.in_place(row), plan
        assert row["state_bytes"] == plan.spec.state_bytes
        assert row["temp_bytes"] < 20_000 + of_layer * {"scan": 2, "larger step": 3 * 6}.get(plan.form, 0), plan
        layers = plan.spec.num_layers
        most = {"unrolled": layers + 1, "jit": 1, "scan": 4 * layers + 3}.get(plan.form)  # XLA also steps the loop
        least = {"scan of commits": compiling.STEPS, "larger step": compiling.STEPS * (layers + 1)}.get(plan.form, 1)
        assert least <= row["launches"], plan
        assert most is None or row["launches"] <= most, plan
        if plan.form in ("unrolled", "jit"):
            assert row["launches"] == most, plan


@pytest.mark.parametrize(
    ("of", "design"), [(of, design) for of, designs in drafts.DESIGNS.items() for design in designs]
)
def test_every_turn_of_a_loop_starts_every_kernel(on_h200: Any, of: Any, design: str) -> None:
    """XLA moves none of them out of the loop, though pool and buffer of "kept" are the same in every turn."""
    order: AxisOrder = "time_major" if of == "verify" else "channel_major"
    spec = drafts.design_spec(ConvCacheSpec(3, 101, 1, 640, 4, 5, axis_order=order), design, 9)
    body, steps = drafts.rounds_of(design, spec, "pallas", commits=of == "step")
    arrays = jax.eval_shape(lambda: drafts.inputs(subjects.Case(spec, 9, 1), design))
    arguments = jax.tree.map(lambda array: on_h200(array.shape, array.dtype), arrays)
    jax.clear_caches()  # or the second program is not traced
    compiled, facts = subjects.compiled_with_facts(subjects.repeated(body), (arguments[0], *arguments[1]), (0,), 1)
    text = compiled.as_text()
    commits = of == "step" and not design.endswith("_resumed")
    assert kernels_by_place(text) == {"body": steps * (spec.num_layers + commits)}
    assert not program.large_copies(text, 9 * spec.num_draft_tokens * spec.conv_dim)
    assert facts["alias_bytes"] >= spec.state_bytes + spec.windows_bytes


def kernels_by_place(text: str) -> dict[str, int]:
    """Custom calls of the one loop's body, and of other computations by their names."""
    (body,) = re.findall(r" while\(.*?body=%?([\w.-]+)", text)
    found: dict[str, int] = {}
    for name, instructions in program._computations(text)[0].items():
        kernels = sum(op == "custom-call" for _, op, _ in instructions)
        if kernels:
            found["body" if name == body else name] = kernels
    return found
