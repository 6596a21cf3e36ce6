"""What an engine keeps when requests fail, when streams share it or end early, and what its size is said to be."""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.model.decode import Engine
from jax_impl.model.tiny import tiny_model

pytest.importorskip("safetensors", reason="safetensors is not installed")

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(num_hidden_layers=2, full_attention_interval=2)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    """What the prompts generate."""
    return engine(model).generate(PROMPTS, 8)


def engine(model: Any, **options: Any) -> Engine:
    return Engine(*model, **{"max_requests": 2, "max_len": 32, **options})


# ---- requests that cannot join ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_add_that_raises_loses_nothing(
    model: Any, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The prefill fails when rows and slots are taken, or when its result is read; another request decodes on."""
    made = engine(model, num_slots=3)
    (first,) = (new.request for new in made.add(PROMPTS[:1], 8))
    rows, slots, prefill = list(made._rows), list(made._free_slots), made._prefill

    def failing(*arguments: Any) -> Any:
        if when == "after":
            prefill(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(made, "_prefill", failing)
        with pytest.raises(KeyboardInterrupt) as raised:
            made.add(PROMPTS[1:], 8)
    assert not hasattr(raised.value, "__notes__")
    assert (list(made._rows), list(made._free_slots), list(made.requests.values())) == (rows, slots, [first])
    made.step()
    (second,) = (new.request for new in made.add(PROMPTS[1:], 8))
    while made.requests:
        made.step()
    assert [first.tokens, second.tokens] == expected


def test_an_implementation_that_is_not_here_loses_nothing(model: Any) -> None:
    made = engine(model, implementation="nothing")
    with pytest.raises(ValueError, match="implementation"):
        made.add(PROMPTS, 3)
    assert (made.free, made.requests) == (2, {})


def test_a_state_that_is_gone_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that fails after it was given the state leaves no engine, and says so."""
    made = engine(model)

    def failing(*arguments: Any) -> Any:
        jax.tree.map(lambda leaf: leaf.delete(), made.state)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(made, "_prefill", failing)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        made.add(PROMPTS, 3)
    assert ["make a new engine" in note for note in raised.value.__notes__] == [True]
    assert (made.free, made.requests) == (2, {})


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "budget", "message"),
    [
        ([1, 1.7], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 1.7."),
        (["1"], 3, "`prompt`: expected tokens from 0 to vocab_size - 1 = 255, got 1."),
        ([1], 2.5, "`max_new_tokens`: expected an integer, got 2.5."),
        ([1], [3, 4], "`max_new_tokens`: expected one number, or one of each of 1 prompts, got 2."),
    ],
)
def test_numbers_that_are_no_integers(model: Any, prompt: Any, budget: Any, message: str) -> None:
    made = engine(model)
    for call in (made.add, made.generate):
        with pytest.raises(ValueError, match=re.escape(message)):
            call([prompt], budget)
    assert (made.free, made.requests) == (2, {})


def test_integers_of_any_type(model: Any, expected: list[list[int]]) -> None:
    made = engine(model, stop_token_ids=[np.int32(255)])
    prompts: Any = [np.asarray(PROMPTS[0], np.int16), [jnp.int32(token) for token in PROMPTS[1]]]
    budgets: list[Any] = [np.int64(4), jnp.int32(4), np.asarray([4, 4]), (4, np.uint8(4))]
    for budget in budgets:
        assert made.generate(prompts, budget) == [tokens[:4] for tokens in expected]


# ---- streams ---------------------------------------------------------------------------------------------------------


def in_turn(streams: list[Any]) -> Iterable[tuple[int, Any]]:
    """One progress of each stream after the other until all have ended."""
    running = dict(enumerate(streams))
    while running:
        for index, stream in list(running.items()):
            try:
                yield index, next(stream)[1]
            except StopIteration:
                del running[index]


@pytest.mark.parametrize("rows", [1, 2])
def test_streams_of_one_engine_hand_out_all_tokens(model: Any, expected: list[list[int]], rows: int) -> None:
    """Each steps the other's requests too, or waits for a row; the last progress of a request says why it ended."""
    made, got = engine(model, max_requests=rows), [[], []]
    reasons: list[list[Any]] = [[], []]
    for index, new in in_turn([made.stream([prompt], 8) for prompt in PROMPTS]):
        got[index] += new.tokens
        reasons[index].append(new.request.finish_reason if len(got[index]) == 8 else None)
    assert got == expected
    assert [[reason for reason in seen if reason] for seen in reasons] == [["length"], ["length"]]
    assert (made.free, made.requests) == (rows, {})


def test_a_stream_that_ends_early_frees_its_slots(model: Any, expected: list[list[int]]) -> None:
    """Its own only: a request beside it stays."""
    made = engine(model, max_requests=3)
    (other,) = (new.request for new in made.add(PROMPTS[:1], 8))
    stream: Any = made.stream([*PROMPTS, [7]], 20)
    next(stream)
    assert (made.free, len(made.requests)) == (0, 3)
    stream.close()
    assert (made.free, list(made.requests.values())) == (2, [other])
    for _, new in made.stream(PROMPTS[1:], 8):
        assert new.tokens
        break
    del new
    assert list(made.requests.values()) == [other]
    while made.requests:
        made.step()
    assert other.tokens == expected[0]


def test_a_request_that_is_made_to_leave_its_stream(model: Any, expected: list[list[int]]) -> None:
    made, got = engine(model), [[], []]
    for index, new in made.stream(PROMPTS, 8):
        got[index] += new.tokens
        if index == 0 and new.request.identity in made.requests:
            made.leave(new.request)
    assert got == [expected[0][: len(got[0])], expected[1]]
    assert len(got[0]) == 1
