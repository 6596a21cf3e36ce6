"""What once went wrong with storage "inputs", draft trees and their rollback."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_impl import (
    ConvCacheSpec,
    causal_conv1d_verify,
    commit_conv_state,
)
from jax_impl.debug import check_commit
from jax_impl.model.decode import Engine
from jax_impl.model.drafters import Drafts, NoDrafts
from jax_impl.model.tiny import tiny_model

TRACKED: dict[str, Any] = {"track_indices": [-1, 6], "track_num_tokens": [0, 1]}


def of_inputs() -> tuple[ConvCacheSpec, jax.Array, jax.Array]:
    spec = ConvCacheSpec(1, 8, 2, 128, width=4, num_draft_tokens=3, dtype="float32", storage="inputs")
    pool = jnp.arange(np.prod(spec.state_shape), dtype=jnp.float32).reshape(spec.state_shape)
    windows = 1e4 + jnp.arange(np.prod(spec.windows_shape), dtype=jnp.float32).reshape(spec.windows_shape)
    return spec, pool, windows


@pytest.mark.parametrize("accepted", [[2, 0], [2, 3]])
def test_a_snapshot_of_a_slot_that_another_request_commits_to(accepted: Any) -> None:
    """The plain form makes it of the slot as it was; a kernel may find either, which the check reports."""
    spec, pool, windows = of_inputs()
    after = commit_conv_state(pool, windows, [1, 1], accepted, spec=spec, implementation="xla", **TRACKED)
    expected = jnp.stack([pool[0, 1, 1], pool[0, 1, 2], windows[0, 1, 0]])
    np.testing.assert_array_equal(after[0, 6], expected)
    words = "makes its snapshot of slot 1, which another request commits to; its content is unspecified."
    assert f"`track_indices`: request 1 {words}" in check_commit([1, 1], accepted, spec=spec, **TRACKED)
    assert not check_commit([1, 2], [2, 0], spec=spec, **TRACKED)


def test_what_arrays_of_different_storage_skip_differently_is_reported() -> None:
    """A snapshot without a slot of one's own, and a path through a node that is not there."""
    spec, _, _ = of_inputs()
    snapshot: dict[str, Any] = {"track_indices": [5, -1], "track_num_tokens": [2, 0]}
    assert (
        "`track_indices`: request 0 makes its snapshot of slot -1, which holds no state; it is skipped."
        in check_commit([-1, 2], [0, 0], spec=spec, **snapshot)
    )
    (sentence,) = check_commit([4, -1], [2, 0], spec=spec, accepted_path=[[-1, 1, -1]] * 2)
    assert sentence.startswith("`accepted_path`: request 0 ")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="that compiler widens every bfloat16 copy of verify")
def test_state_columns_of_a_dense_tree_are_bit_copies() -> None:
    """As `test_verify.test_columns_are_bit_copies`, in the plain form, jitted, with the links of a chain."""
    spec = ConvCacheSpec(1, 4, 2, 4, width=4, num_draft_tokens=3, dtype="bfloat16", storage="dense")
    bits = (0x7F81 + np.arange(np.prod(spec.state_shape)) % 40).astype(np.uint16).reshape(spec.state_shape)
    verify = jax.jit(
        lambda x, pool, windows, parents: causal_conv1d_verify(
            x, pool, windows, jnp.ones((4, 4)), spec=spec, layer=0, state_indices=[1, 3], parents=parents,
            implementation="xla",
        )[1]
    )  # fmt: skip
    x, windows = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.zeros(spec.windows_shape, jnp.bfloat16)
    parents = jnp.array([[-1, 0, 1]] * 2)
    after = np.asarray(verify(x, bits.view(ml_dtypes.bfloat16), windows, parents)).view(np.uint16)
    np.testing.assert_array_equal(after[0, 0, 0, :2], bits[0, 1, 1:])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Always:
    """One wrong token in every place, as a chain or as children of the root."""

    token: int = dataclasses.field(metadata={"static": True})
    as_tree: bool = dataclasses.field(metadata={"static": True})

    def propose(
        self, history: jax.Array, lengths: jax.Array, slots: jax.Array, step: jax.Array, max_drafts: int
    ) -> Drafts:
        shape = lengths.shape[0], max_drafts
        links = jnp.zeros((shape[0], max_drafts + 1), jnp.int32) if self.as_tree else None
        return Drafts(jnp.full(shape, self.token, jnp.int32), jnp.full(shape[:1], max_drafts, jnp.int32), links)


@pytest.mark.parametrize("as_tree", [False, True])
def test_a_rejected_draft_that_is_nan_changes_nothing(as_tree: bool) -> None:
    """`drafters`: what is proposed changes how fast a sequence grows and never what it says."""
    config, parameters = tiny_model()
    sizes: dict[str, Any] = {"max_requests": 1, "max_len": 32, "storage": "inputs", "stop_token_ids": ()}
    plain = Engine(config, parameters, num_draft_tokens=1, drafter=NoDrafts(), **sizes).generate([[5, 6, 7]], 4)
    unused = next(token for token in range(8, config.vocab_size) if token not in plain[0])
    spoilt = parameters._replace(embedding=parameters.embedding.at[unused].set(jnp.nan))
    assert Engine(config, spoilt, num_draft_tokens=1, drafter=NoDrafts(), **sizes).generate([[5, 6, 7]], 4) == plain
    drafter = Always(unused, as_tree)
    assert Engine(config, spoilt, num_draft_tokens=3, drafter=drafter, **sizes).generate([[5, 6, 7]], 4) == plain
