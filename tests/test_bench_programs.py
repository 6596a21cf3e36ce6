"""What bench compiles, compiled for a GPU that is not there: launches, memory and copies of every program."""

from typing import Any

import jax
import pytest

from jax_impl.bench import compiling
from jax_impl.layout import ConvCacheSpec
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
