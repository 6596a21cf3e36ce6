"""What a verify, and a whole step, cost by what the buffer holds and by how the state is kept up to date.

    sliding          D+S-1 columns a row
    inputs           D columns a row, x given
    kept             D columns a row, which are the caller's own x: verify writes y alone
    kept_tree        kept, with the links of a tree; they are those of a chain, so that the same work is done
    sliding_resumed  no commit: the history comes from the row of the step before
    kept_resumed     no commit: the history comes from slot and inputs of the step before, and the slot is moved on

A verify is one layer's, every layer in turn. A step is a verify in every layer and, where there is one, a commit; y of
every layer is kept. Resumed designs take two steps a round, because those that keep x need two arrays in turn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import checks
from jax_impl.bench import subjects
from jax_impl.bench.subjects import Case, Subject
from jax_impl.commit import commit_conv_state
from jax_impl.conv import Activation, ConvWeight, causal_conv1d_verify
from jax_impl.layout import ConvCacheSpec

Of = Literal["verify", "step"]
DESIGNS: dict[Of, tuple[str, ...]] = {
    "verify": ("sliding", "inputs", "kept", "kept_tree", "sliding_resumed", "kept_resumed"),
    "step": ("sliding", "inputs", "kept", "sliding_resumed", "kept_resumed"),
}
BATCHES = (1, 64, 256)
ROUND_STEPS = 2


def design_spec(spec: ConvCacheSpec, design: str, batch: int) -> ConvCacheSpec:
    """The geometry of a design, with a row for each request: row b is that of request b."""
    storage = "sliding" if design.startswith("sliding") else "inputs"
    return dataclasses.replace(spec, storage=storage, max_requests=batch)


def columns_moved(spec: ConvCacheSpec, design: str) -> tuple[int, int]:
    """Columns that one layer's verify and commit of a request read and write.

    Example:
      >>> spec = ConvCacheSpec(30, 746, 256, 8192, width=4, num_draft_tokens=4)
      >>> [sum(columns_moved(spec, design)) for design in DESIGNS["step"]]
      [23, 21, 17, 17, 14]
    """
    tokens, state = spec.num_draft_tokens, spec.state_columns
    read = spec.width - 1 + tokens
    row = {
        "sliding": tokens + state - 1,
        "sliding_resumed": tokens + state - 1,
        "inputs": tokens,
        "kept_resumed": state,
    }
    return read + tokens + row.get(design, 0), 0 if design.endswith("_resumed") else 2 * state


def columns_of(spec: ConvCacheSpec, design: str, of: Of) -> int:
    """Columns of a request that one layer moves in a call."""
    verify, commit = columns_moved(spec, design)
    return verify if of == "verify" else verify + commit


def moved_bytes(spec: ConvCacheSpec, design: str, of: Of, batch: int) -> int:
    """Bytes of one call: of one layer's verify, or of a whole step."""
    layers = 1 if of == "verify" else spec.num_layers
    return layers * batch * columns_of(spec, design, of) * spec.conv_dim * spec.item_bytes


def step_of(
    design: str,
    spec: ConvCacheSpec,
    implementation: checks.Implementation,
    *,
    commits: bool,
    activation: Activation | None = "silu",
) -> Callable[..., Any]:
    """One step on (pool, buffer, buffer of the step before); returns those and y of every layer.

    Without `commits` it is the verifies alone.
    """
    kept, resumed, tree = design.startswith("kept"), design.endswith("_resumed"), design.endswith("_tree")

    def step(
        carried: Any, x: Any, weight: ConvWeight, slots: jax.Array, counts: jax.Array, links: jax.Array
    ) -> tuple[Any, list[jax.Array]]:
        pool, windows, before = carried
        outputs = []
        for layer in range(spec.num_layers):
            y, windows, *moved = causal_conv1d_verify(
                None if kept else x[layer],
                pool,
                windows,
                weight,
                spec=spec,
                state_indices=slots,
                layer=layer,
                parents=links if tree else None,
                resume_tokens=counts if resumed else None,
                resume_windows=before if kept and resumed else None,
                activation=activation,
                implementation=implementation,
            )
            pool = moved[0] if moved else pool
            outputs.append(y)
        if commits and not resumed:
            pool = commit_conv_state(pool, windows, slots, counts, spec=spec, implementation=implementation)
        return (pool, windows, before), outputs

    return step


def rounds_of(
    design: str, spec: ConvCacheSpec, implementation: checks.Implementation, *, commits: bool
) -> tuple[Callable[..., Any], int]:
    """A round as `looped` takes it, of ((pool, buffer, buffer before), y), and its steps."""
    step = step_of(design, spec, implementation, commits=commits)
    turns = ROUND_STEPS if design == "kept_resumed" else 1

    def body(carried: Any, *arguments: Any) -> Any:
        arrays, outputs = carried
        for _ in range(turns):
            (pool, windows, before), outputs = step(arrays, *arguments)
            arrays = (pool, before, windows) if turns > 1 else (pool, windows, before)
        return arrays, outputs

    return body, turns


def inputs(case: Case, design: str) -> tuple[Any, tuple[Any, ...]]:
    """What the rounds carry, and their other arguments; random values, every request in a slot of its own."""
    spec, tokens = case.spec, case.spec.num_draft_tokens
    cache = subjects.random_cache(spec)
    before = subjects.random_cache(spec, seed=1).conv_windows if design == "kept_resumed" else None
    (slots,), _, (accepted,) = subjects.index_sets(case, 1)
    x, weights = subjects.verify_inputs(case, spec.num_layers)
    links = np.broadcast_to(np.arange(-1, tokens - 1, dtype=np.int32), (case.batch, tokens))
    taps = ConvWeight(jnp.stack([one.taps for one in weights]))
    carried = (cache.conv_state, cache.conv_windows, before), [jnp.zeros_like(one) for one in x]
    given = None if design.startswith("kept") else x
    return carried, (given, taps, jnp.asarray(slots), jnp.asarray(accepted), jnp.asarray(links))


def jax_rounds(design: str, of: Of, case: Case, implementation: checks.Implementation) -> Subject:
    """Rounds of a design, everything that is written donated; `case` has the design's geometry."""
    body, turns = rounds_of(design, case.spec, implementation, commits=of == "step")
    carried, arguments = inputs(case, design)
    return subjects.looped(body, carried, arguments, turns * (case.spec.num_layers if of == "verify" else 1))


def copies(case: Case, design: str, of: Of, *, kernel: bool) -> Subject:
    """Copies of a design's bytes in one CUDA graph: one for each verify, and one for the commit if there is one.

    Timed on the device only, as the designs are.
    """
    layers = case.spec.num_layers
    verify = moved_bytes(case.spec, design, "verify", case.batch)
    commit = moved_bytes(case.spec, design, "step", case.batch) - layers * verify
    sizes = [verify] * layers
    if of == "verify":
        return subjects.torch_copies(sizes, kernel=kernel)
    sizes += [commit] * bool(commit)
    return dataclasses.replace(subjects.torch_copies(sizes, kernel=kernel, steps=1), alone=None)
