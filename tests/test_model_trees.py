"""Draft trees say what greedy decoding says, whichever branch is accepted.

Trees come from looking up two continuations, and from a script that knows the greedy tokens and puts them on branches
of every shape, so that the accepted path is seldom nodes 0, 1, 2 …. `-m thorough` runs all depths with both storages
and the interpreted kernels, `-m gpu` the compiled ones.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import ConvCacheSpec
from jax_impl.model import attention, decode, hybrid, mixers
from jax_impl.model.decode import Engine, Statistics
from jax_impl.model.drafters import Drafts, NoDrafts, PromptLookup, TreeLookup
from jax_impl.model.tiny import tiny_model
from jax_impl.model.weights import FullAttention
from tests import adapters
from tests.cases import assert_same_bits

pytest.importorskip("safetensors", reason="safetensors is not installed")

MAX_LEN, VOCAB, NUM_SCRIPTS = 256, 256, 13
LAYERS = ["linear_attention", "full_attention"]
BUDGETS = [200, 1, 130, 2, 90, 170, 3, 100]


@functools.cache
def model() -> Any:
    """Attention as sharp as a trained one's: a random one hardly notices one key too many or a wrong one."""
    config, parameters = tiny_model("float32", num_hidden_layers=len(LAYERS), layer_types=LAYERS)
    linear, full = parameters.layers
    mixer = full.mixer
    assert isinstance(mixer, FullAttention)
    mixer = mixer._replace(q_norm=mixer.q_norm + 12, out_proj=3 * mixer.out_proj)
    return config, parameters._replace(layers=(linear, full._replace(mixer=mixer)))


@functools.cache
def prompts() -> list[list[int]]:
    """Eight prompts, the first ones shorter than the convolution's state."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, VOCAB, length).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 31)]


@functools.cache
def greedy() -> list[list[int]]:
    """Plain decoding, one token per request and step."""
    made = Engine(*model(), max_requests=8, max_len=MAX_LEN, num_draft_tokens=1, drafter=NoDrafts())
    return made.generate(prompts(), max(BUDGETS))


# ---- a drafter that knows --------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes trees whose nodes are the right token of their depth where the script says so, and wrong ones elsewhere.

    Request and step choose the script. Where `looks_up` is set, `TreeLookup` proposes instead; None is False.

    Attributes:
      targets: int32 `[C, max_len]`, each slot's whole sequence.
      parents, depths: int32 `[scripts, D]`. is_right: bool `[scripts, D]`.
      looks_up: bool scalar or None.
    """

    targets: jax.Array
    parents: jax.Array
    depths: jax.Array
    is_right: jax.Array
    looks_up: jax.Array | None

    def propose(self, history: Any, lengths: Any, slots: Any, step: Any, max_drafts: int) -> Drafts:
        script = (step + slots) % self.parents.shape[0]
        places = jnp.minimum(lengths[:, None] + self.depths[script, 1:] - 1, self.targets.shape[1] - 1)
        right = self.targets[slots[:, None], places]
        wrong = (right + 1 + jnp.arange(max_drafts, dtype=jnp.int32)[None, :]) % VOCAB
        tokens = jnp.where(self.is_right[script, 1:], right, wrong)
        scripted = Drafts(tokens, jnp.full_like(lengths, max_drafts), self.parents[script])
        if self.looks_up is None:
            return scripted
        looked_up = TreeLookup().propose(history, lengths, slots, step, max_drafts)
        one_of = functools.partial(jax.tree.map, functools.partial(jnp.where, self.looks_up))
        return one_of(looked_up, scripted)


def path_of(parents: Any, node: int) -> list[int]:
    """Nodes from the root to `node`, by following links."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


@functools.cache
def scripts(num_draft_tokens: int) -> tuple[np.ndarray, list[list[int]]]:
    """Trees `[scripts, D]` and the path in each that is right: a chain, a chain that is wrong, then branches.

    One path leaves the first branch at each depth from 1 to D - 2, the others are random.
    """
    rng = np.random.default_rng(num_draft_tokens)
    trees, paths = [list(range(-1, num_draft_tokens - 1))] * 2, [list(range(num_draft_tokens)), [0]]
    for depth in range(1, num_draft_tokens - 1):
        trees.append([*range(-1, depth), depth - 1, *range(depth + 1, num_draft_tokens - 1)])
        paths.append([*range(depth), *range(depth + 1, num_draft_tokens)])
    while len(paths) < NUM_SCRIPTS:
        links = [-1, *(int(rng.integers(0, node)) for node in range(1, num_draft_tokens))]
        path = path_of(links, int(rng.integers(2, num_draft_tokens)))
        if path != list(range(len(path))):
            trees.append(links)
            paths.append(path)
    return np.array(trees, np.int32), paths


def scripted(num_draft_tokens: int, num_slots: int, looks_up: bool | None) -> Scripted:
    parents, paths = scripts(num_draft_tokens)
    depths = np.array([[len(path_of(links, node)) - 1 for node in range(num_draft_tokens)] for links in parents])
    is_right = np.array([[node in path for node in range(num_draft_tokens)] for path in paths])
    targets = jnp.zeros((num_slots, MAX_LEN), jnp.int32)
    of_scripts = jnp.asarray(parents), jnp.asarray(depths, jnp.int32), jnp.asarray(is_right)
    return Scripted(targets, *of_scripts, None if looks_up is None else jnp.asarray(looks_up))


def tell(made: Engine, request: Any, tokens: list[int]) -> None:
    """Tells the script what a request is going to generate."""
    assert isinstance(made.drafter, Scripted)
    targets, sequence = np.array(made.drafter.targets), [*request.prompt, *tokens]
    targets[request.slot, : len(sequence)] = sequence
    made.drafter = dataclasses.replace(made.drafter, targets=jnp.asarray(targets))


def poison(made: Engine) -> None:
    """Every float of the cache a NaN, as a bad owner may leave it."""
    nan = lambda leaf: jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf  # noqa: E731
    made.state = dataclasses.replace(made.state, cache=jax.tree.map(nan, made.state.cache))


def engine(num_draft_tokens: int, storage: Any, looks_up: bool | None = None, **options: Any) -> Engine:
    """Two rows and three slots full of NaN: requests wait, slots are used again, a row is empty at the end."""
    drafter = scripted(num_draft_tokens, 3, looks_up)
    sizes = {"max_requests": 2, "num_slots": 3, "max_len": MAX_LEN, "num_draft_tokens": num_draft_tokens}
    made = Engine(*model(), drafter=drafter, storage=storage, **sizes, **options)
    poison(made)
    return made


class Followed(NamedTuple):
    """Tokens of each prompt; and per request step the accepted path, and the one that is right in the script."""

    tokens: list[list[int]]
    paths: list[list[int]]
    right: list[list[int]]


def follow(made: Engine, which: Sequence[int] = range(8)) -> Followed:
    """Decodes prompts; each joins, alone, when another has left."""
    waiting, requests, paths, right = list(which), {}, [], []
    while waiting or made.requests:
        while waiting and made.free:
            index = waiting.pop(0)
            (new,) = made.add([prompts()[index]], [BUDGETS[index]])
            requests[index] = new.request
            tell(made, new.request, greedy()[index])
        running, step = list(made.requests.values()), int(made.state.step)
        result = made.launch()
        for row, request in [(request.row, request) for request in running]:
            paths.append([node for node in np.asarray(result.path)[row].tolist() if node >= 0])
            left = request.max_new_tokens - len(request.tokens)  # so many nodes are verified
            of_script = scripts(result.path.shape[1])[1][(step + request.slot) % NUM_SCRIPTS]
            right.append([node for node in of_script if node < left])
        made.collect(result)
    return Followed([requests[index].tokens for index in which], paths, right)


def addresses(made: Engine) -> list[int]:
    """Of the cache's arrays, which equal shapes may trade."""
    return sorted(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(made.state) if leaf.nbytes > 1024)


def expected(which: Sequence[int] = range(8)) -> list[list[int]]:
    return [greedy()[index][: BUDGETS[index]] for index in which]


# ---- the same tokens -------------------------------------------------------------------------------------------------

ALL = list(itertools.product([3, 4, 5, 6], ["inputs", "dense"]))
NORMAL = [(3, "dense"), (6, "inputs")]
thorough = pytest.mark.thorough
on_every_form = pytest.mark.parametrize(
    ("num_draft_tokens", "storage", "implementation"),
    [
        *(pytest.param(*one, "xla", marks=() if one in NORMAL else thorough) for one in ALL),
        *(pytest.param(*one, "pallas_interpret", marks=thorough) for one in [(4, "inputs"), (5, "dense")]),
        *(pytest.param(*one, "pallas", marks=pytest.mark.gpu) for one in ALL),
    ],
)


@on_every_form
def test_trees_equal_greedy(num_draft_tokens: int, storage: Any, implementation: Any) -> None:
    """Looked up and scripted, through two rows; of a script's trees the path that is right is accepted, every time.
    Keys are moved in place: every array of the state keeps its buffer."""
    if implementation == "pallas":
        adapters.path("jax-pallas-gpu")  # skips, naming what is missing
    which = range(8)
    if implementation == "pallas_interpret":
        which = [6, 4, 3]  # a few tokens, for its time
    else:
        made = engine(num_draft_tokens, storage, looks_up=True, implementation=implementation)
        assert follow(made).tokens == expected()
        counts = made.statistics
        assert 0 < counts.second_branches < counts.trees < counts.request_steps
        assert counts.mean_accepted_length > 1.2

    made = engine(num_draft_tokens, storage, looks_up=False, implementation=implementation)
    tokens, paths, right = follow(made, which)
    assert tokens == expected(which)
    assert paths == right
    of_second = [path for path in paths if path != list(range(len(path)))]
    assert len(of_second) == made.statistics.second_branches > len(paths) / 3
    if implementation != "pallas_interpret":
        made.add(prompts()[:1], [9])
        before = addresses(made)
        made.step()
        assert addresses(made) == before
    left_at = {min(place for place, node in enumerate(path) if node != place) for path in of_second}
    assert left_at == set(range(1, num_draft_tokens - 1))


FAULTS = ["the path is not committed", "nodes see each other", "keys stay where they are", "states are the last node's"]


@pytest.mark.usefixtures("fresh_steps")
@pytest.mark.parametrize("fault", [FAULTS[0], *(pytest.param(fault, marks=thorough) for fault in FAULTS[1:])])
def test_a_planted_fault_changes_the_tokens(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The test above can fail."""
    commit, rule = decode.commit_after_verify, mixers.delta_rule

    def without_path(*arguments: Any, accepted_path: Any, **options: Any) -> Any:
        return commit(*arguments, **options)

    def of_chains(*arguments: Any, parents: Any, **options: Any) -> Any:
        return rule(*arguments, **options)

    def without_ancestors(is_ancestor: Any, past_lengths: Any, max_len: int) -> Any:
        node = jnp.arange(is_ancestor.shape[1], dtype=jnp.int32)[None, :, None]
        at = jnp.arange(max_len, dtype=jnp.int32)[None, None, :]
        return at <= past_lengths[:, None, None] + node

    faults = {
        FAULTS[0]: (decode, "commit_after_verify", without_path),
        FAULTS[1]: (attention, "visible_to_nodes", without_ancestors),
        FAULTS[2]: (hybrid, "keep_path", lambda cache, *arguments: cache),
        FAULTS[3]: (mixers, "delta_rule", of_chains),
    }
    monkeypatch.setattr(*faults[fault])
    which = [0, 2, 4]
    tokens = follow(engine(3, "inputs"), which).tokens
    assert sum(got != wanted for got, wanted in zip(tokens, expected(which), strict=True)) >= 2


def random_links(rng: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """Links `[B, D]` of trees with one root."""
    links = [[-1, *(int(rng.integers(0, node)) for node in range(1, nodes))] for _ in range(batch)]
    return np.array(links, np.int32)


@pytest.mark.parametrize("storage", ["inputs", pytest.param("dense", marks=thorough)])
def test_a_node_is_computed_on_its_ancestors(storage: Any) -> None:
    """Hidden and recurrent states of every node of random trees, against a chain of its path alone; and after a commit
    of the path, keys and values too. The other slots keep all of their bits, those of skipped requests included."""
    config, parameters = model()
    rng = np.random.default_rng(2)
    nodes, num_slots, past = 5, 9, np.array([3, 7, 1, 12, 5], np.int32)
    links, tokens = random_links(rng, 5, nodes), rng.integers(0, VOCAB, (5, nodes)).astype(np.int32)
    links[3] = [-1, 0, 2, 0, 0]  # points at itself
    valid, slots = np.array([5, 4, 5, 5, 0], np.int32), np.array([8, 2, 5, 0, -1], np.int32)
    links[1, 4] = 99  # not looked at
    cache = hybrid.allocate_model_cache(
        config, "float32", num_slots=num_slots, max_requests=5, max_len=21, num_draft_tokens=nodes, storage=storage
    )
    leaves, structure = jax.tree.flatten(cache)
    cache = structure.unflatten([jnp.asarray(rng.standard_normal(leaf.shape) / 3, leaf.dtype) for leaf in leaves])

    @jax.jit
    def verify(links: Any, tokens: Any, valid: Any, path: Any, accepted: Any) -> Any:
        hidden, after, states = hybrid.verify(
            parameters, config, cache, tokens, valid, jnp.asarray(past), jnp.asarray(slots), parents=links
        )
        committed = decode.commit_after_verify(
            after.hybrid, jnp.asarray(slots), accepted, step_states=states, num_valid_tokens=valid, accepted_path=path
        )
        after = hybrid.keep_path(after, jnp.asarray(slots), jnp.asarray(past), path)
        return hidden, states, dataclasses.replace(after, hybrid=committed)

    no_path, chain = np.full((5, nodes), -1, np.int32), np.tile(np.arange(nodes, dtype=np.int32), (5, 1))
    for last in range(nodes):
        path, accepted, of_path = no_path.copy(), np.zeros(5, np.int32), np.zeros_like(tokens)
        for request in range(3):
            found = path_of(links[request], min(last, valid[request] - 1))
            accepted[request] = len(found)
            path[request, : len(found)] = found
            of_path[request, : len(found)] = tokens[request, found]
        hidden, states, after = verify(links, tokens, valid, path, accepted)
        wanted_hidden, wanted_states, wanted = verify(
            chain - 1, of_path, accepted, np.where(path < 0, -1, chain), accepted
        )
        close = functools.partial(np.testing.assert_allclose, rtol=0, atol=3e-5)  # sums in another order, of size 1
        for request, n in enumerate(accepted[:3]):
            place = path[request, :n]
            close(hidden[request, place], wanted_hidden[request, :n])
            close(states[:, request, place], wanted_states[:, request, :n])
            until, slot = past[request] + n, slots[request]
            close(after.keys[:, slot, :until], wanted.keys[:, slot, :until])
            close(after.values[:, slot, :until], wanted.values[:, slot, :until])
            close(after.hybrid.recurrent_state[:, slot], wanted.hybrid.recurrent_state[:, slot])
            assert_same_bits(after.hybrid.conv.conv_state[:, slot], wanted.hybrid.conv.conv_state[:, slot])
        others = np.setdiff1d(np.arange(num_slots), slots[:3])
        for got, old in [(after.keys, cache.keys), (after.values, cache.values)]:
            assert_same_bits(got[:, others], old[:, others])
        assert_same_bits(after.hybrid.recurrent_state[:, others], cache.hybrid.recurrent_state[:, others])
        assert_same_bits(after.hybrid.conv.conv_state[:, others], cache.hybrid.conv.conv_state[:, others])


# ---- parts -----------------------------------------------------------------------------------------------------------


def _ancestors_and_visible(links: Any, past: Any) -> Any:
    found = attention.ancestors(links)
    return found, attention.visible_to_nodes(found, past, 13)


def test_ancestors_and_what_they_see_by_loops() -> None:
    links = random_links(np.random.default_rng(3), 40, 7)
    links[0, 4] = -1  # a second root
    past = np.arange(40, dtype=np.int32) % 9
    found, visible = map(np.asarray, jax.jit(_ancestors_and_visible)(links, past))
    for request, node in np.ndindex(40, 7):
        path = path_of(links[request], node)
        assert np.flatnonzero(found[request, node]).tolist() == path
        places = [*range(past[request]), *(place for place in past[request] + np.array(path) if place < 13)]
        assert np.flatnonzero(visible[request, node]).tolist() == places


def test_keys_of_a_path_are_moved_as_bits() -> None:
    """NaNs with payloads in every third place; a node may stand where another goes; slots outside move nothing."""
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, (3, 6, 11, 2, 3), np.uint32)
    bits[:, :, ::3] = 0x7FC00000 + rng.integers(0, 9, (3, 6, 4, 2, 3), np.uint32)
    slots, past = np.array([4, 0, -1, 6, 2], np.int32), np.array([2, 6, 0, 0, 0], np.int32)
    path = np.array([[0, 2, 3, 4, -1], [0, 1, 4, -1, -1], [0, 3, 4, -1, -1], [0, 2, -1, -1, -1], [-1] * 5], np.int32)
    expected = bits.copy()
    for slot, start, nodes in zip(slots[:2], past, path, strict=False):
        nodes = nodes[nodes >= 0]
        expected[:, slot, start : start + len(nodes)] = bits[:, slot, start + nodes]
    move = jax.jit(attention.move_path, donate_argnums=0)
    moved = move(jnp.asarray(bits.view(np.float32)), slots, past, path)
    np.testing.assert_array_equal(np.asarray(moved).view(np.uint32), expected)
    assert (expected != bits).any()


def test_the_accepted_path_by_a_walk() -> None:
    """Few words, so that children share a token; the first of them is taken. Links of nodes that do not count point
    anywhere, and behind a stop token nothing is accepted, nor a node with NaN logits."""
    rng, batch, nodes = np.random.default_rng(6), 2000, 6
    links, verified = random_links(rng, batch, nodes), rng.integers(0, nodes + 1, batch).astype(np.int32)
    links[np.arange(nodes) >= verified[:, None]] = 4
    block, told = rng.integers(0, 3, (2, batch, nodes)).astype(np.int32)
    is_stop = rng.random((batch, nodes)) < 0.1
    is_number = rng.random((batch, nodes)) < 0.97
    accept = jax.jit(decode._accept_path)
    got = accept(*map(jnp.asarray, (block, told, is_number, verified, is_stop, links)))
    lengths = set()
    for request in range(batch):
        path = [0][: verified[request] * int(is_number[request, 0])]
        while path and not is_stop[request, path[-1]]:
            is_next = (links[request] == path[-1]) & (block[request] == told[request, path[-1]])
            children = np.flatnonzero(is_next[: verified[request]])
            if not len(children) or not is_number[request, children[0]]:
                break
            path.append(int(children[0]))
        assert got[request].tolist() == path + [-1] * (nodes - len(path))
        lengths.add(len(path))
    assert lengths >= {0, 1, 2, 3, 4}


def test_links_that_are_none_end_the_block() -> None:
    """The root's own link is not looked at; a second root, a link forwards or past the block, and all behind it go."""
    spec = ConvCacheSpec(1, 1, 1, 1, width=4, num_draft_tokens=4, storage="inputs")
    links = jnp.asarray([[3, 0, 0, 2], [-1, 0, -1, 2], [-1, 1, 0, 0], [-1, 0, 0, 3], [-1, 0, 2**31 - 1, 0]], jnp.int32)
    for most, counts in [(4, [4, 2, 1, 3, 2]), (2, [2, 2, 1, 2, 2]), (0, [0] * 5)]:
        checked, verified = decode._checked_links(links, jnp.full(5, most, jnp.int32), spec)
        assert checked is not None
        assert (checked[:, 0].tolist(), verified.tolist()) == ([-1] * 5, counts)


# ---- the drafter -----------------------------------------------------------------------------------------------------


def looked_up(history: list[int], max_drafts: int, max_ngram: int = 3) -> tuple[list[int], list[int]]:
    """The drafter's rule as loops: tokens, and the node that each follows."""
    for ngram in range(min(max_ngram, len(history) - 1), 0, -1):
        found = [
            history[start + ngram :][:max_drafts]
            for start in range(len(history) - ngram)
            if history[start : start + ngram] == history[-ngram:]
        ]
        if not found:
            continue
        latest_first = found[::-1]
        by_length = sorted(latest_first, key=len, reverse=True)
        first = by_length[0]
        for second in by_length[1:]:
            pairs = zip(first, second, strict=False)
            shared = next((place for place, (a, b) in enumerate(pairs) if a != b), max_drafts)
            if shared <= max_drafts - 2:
                rest = second[shared:][: (max_drafts - shared) // 2]
                first = first[: max_drafts - len(rest)]
                links = [*range(len(first)), shared, *range(len(first) + 1, len(first) + len(rest))]
                return first + rest, links
        return first, list(range(len(first)))
    return [], []


@pytest.mark.parametrize("max_drafts", [0, 1, 2, 5])
def test_tree_lookup_by_loops(max_drafts: int) -> None:
    """Random histories over few words, one token long too; what is behind a history is never looked at."""
    rng = np.random.default_rng(max_drafts)
    max_len, batch = 23, 400
    lengths = rng.integers(1, max_len + 1, batch).astype(np.int32)
    history = rng.integers(0, 4, (batch, max_len)).astype(np.int32)
    arguments = (jnp.asarray(history), jnp.asarray(lengths), jnp.asarray(lengths), jnp.int32(0), max_drafts)
    drafts, chain = (jax.jit(one.propose, static_argnums=4)(*arguments) for one in (TreeLookup(), PromptLookup()))
    tokens, counts, parents = map(np.asarray, drafts)
    assert parents.shape == (batch, max_drafts + 1)
    shapes = set()
    for request, (row, length, count) in enumerate(zip(history, lengths, counts, strict=True)):
        wanted = looked_up(row[:length].tolist(), max_drafts)
        got = tokens[request, :count].tolist(), parents[request, 1 : count + 1].tolist()
        assert got == wanted
        shapes.add(tuple(got[1]))
    branches = [links for links in shapes if links != tuple(range(len(links)))]
    assert len(branches) >= {0: 0, 1: 0, 2: 1, 5: 5}[max_drafts]
    is_chain = (parents == np.arange(max_drafts + 1) - 1).all(axis=1)
    for request in np.flatnonzero(is_chain):
        count = int(chain.count[request])
        assert counts[request] == count
        assert tokens[request, :count].tolist() == chain.tokens[request, :count].tolist()


# ---- what is refused, and what is counted ----------------------------------------------------------------------------


NO_TREES = re.escape('`storage`: expected "inputs" or "dense", got "sliding". The drafter')


@pytest.mark.parametrize("looks_up", [True, False])
def test_sliding_storage_refuses_trees_before_any_request_joins(looks_up: bool) -> None:
    """With the other wrong arguments, and for trees of one node too; a drafter that is replaced meets the step."""
    with pytest.raises(ValueError, match=NO_TREES):
        Engine(*model(), max_requests=2, max_len=16, num_draft_tokens=1, drafter=TreeLookup())
    with pytest.raises(ValueError, match=NO_TREES):
        engine(3, "sliding", looks_up=looks_up)
    with pytest.raises(ValueError, match=NO_TREES) as raised:
        engine(3, "sliding", looks_up=looks_up, implementation="x")
    assert "`implementation`: expected " in str(raised.value)
    made = Engine(*model(), max_requests=2, max_len=16, num_draft_tokens=3)
    made.drafter = TreeLookup()
    with pytest.raises(ValueError, match=NO_TREES):
        made.warm_up()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnARank:
    """A chain that is proposed on a mesh only."""

    def propose(self, history: Any, lengths: Any, slots: Any, step: Any, max_drafts: int) -> Drafts:
        token = jax.lax.axis_index("data") + jnp.zeros((lengths.shape[0], max_drafts), jnp.int32)
        return Drafts(token, jnp.full_like(lengths, max_drafts))


def test_a_drafter_that_raises_is_left_to_the_step() -> None:
    made = Engine(*model(), max_requests=2, max_len=16, num_draft_tokens=3, drafter=OnARank())
    with pytest.raises(NameError, match="data"):
        made.warm_up()


def test_statistics_of_trees_by_hand() -> None:
    counts = Statistics(4)
    counts.add(
        [3, 2, 1, 0],
        [4, 4, 2, 0],
        [[0, 2, 3, -1], [0, 1, -1, -1], [0, -1, -1, -1], [-1] * 4],
        [True, True, False, False],
    )
    counts.add(
        [2, 1, 0, 0], [3, 4, 0, 0], [[0, 2, -1, -1], [0, -1, -1, -1], [-1] * 4, [-1] * 4], [True, False, False, False]
    )
    assert (counts.tokens, counts.request_steps, counts.trees, counts.second_branches) == (9, 5, 3, 2)
    assert (counts.histogram, counts.proposed, counts.accepted) == ([2, 2, 1, 0], [5, 4, 3], [1, 2, 1])
