"""Chains: JSON there and back, defaults, and bad data refused in one line that names block and field."""

import json
import math
import pickle

import pytest
from hypothesis import given

from fxremat.chains.chain import Block, Chain, Join, Option
from fxremat.errors import InvalidChain
from tests.solvers.chains import chains

GOOD = {"forward_time": 1.0, "backward_time": 2.0, "output_bytes": 4, "saved_bytes": 9}


@given(chains(4))
def test_json_there_and_back(chain):
    assert Chain.from_json(chain.to_json()) == chain
    assert Chain.from_json(json.loads(chain.to_json())) == chain
    assert pickle.loads(pickle.dumps(chain)) == chain
    for join in (Join(branches=(chain, chain)), Join(branches=(chain,), trunk=chain)):
        assert Join.from_json(join.to_json()) == join


def test_defaults():
    chain = Chain.from_json({"input_bytes": 3, "blocks": [GOOD | {"forward_scratch": 5}]})
    block = chain.blocks[0]
    assert (chain.input_grad_bytes, block.grad_bytes, block.save_scratch) == (3, 4, 5)
    assert block.choices == (Option(saved_bytes=9, backward_time=2.0, save_scratch=5),)


def test_option_0_may_be_listed_or_not():
    zero, one = {"saved_bytes": 9, "backward_time": 2.0}, {"saved_bytes": 5, "backward_time": 3.0}
    listed = Chain.from_json({"input_bytes": 3, "blocks": [GOOD | {"options": [zero, one]}]})
    assert listed == Chain.from_json({"input_bytes": 3, "blocks": [GOOD | {"options": [one]}]})
    assert [option.saved_bytes for option in listed.blocks[0].choices] == [9, 5]


def test_phases_hold_gradients_and_what_crosses():
    blocks = [
        GOOD | {"grad_bytes": g, "weight_grad_bytes": w, "held_bytes": h}
        for g, w, h in [(1, 10, 2), (5, 7, 3)]
    ]
    chain = Chain.from_json({"input_bytes": 3, "blocks": blocks})
    assert chain.phase_sizes == (3 + 17, 1 + 2 + 7, 5 + 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_time", math.nan),
        ("forward_time", math.inf),
        ("backward_time", -1.0),
        ("backward_time", "2"),
        ("backward_time", True),
        ("output_bytes", -4),
        ("output_bytes", 4.0),
        ("output_bytes", math.nan),
        ("saved_bytes", None),
        ("saved_bytes", 3),
        ("saved_bytes", 2**60),
        ("forward_scratch", True),
        ("grad_bytes", "4"),
        ("weight_grad_bytes", [1]),
        ("options", 3),
        ("options", [3]),
        ("options", [{"saved_bytes": 3, "backward_time": 1.0}]),
        ("options", [{"saved_bytes": 9, "backward_time": -1.0}]),
        ("options", [{"saved_bytes": 9}]),
        ("saved_byte", 9),
        ("name", 3),
    ],
)
def test_bad_blocks(field, value):
    data = {"input_bytes": 4, "blocks": [GOOD, GOOD | {field: value}]}
    with pytest.raises(InvalidChain) as error:
        Chain.from_json(data)
    message = str(error.value)
    assert message.startswith("block 2: ")
    assert "\n" not in message
    assert field in message or field == "options"


@pytest.mark.parametrize(
    "source",
    ["", "[]", "{", "3", "null", [], None, {}, {"blocks": [GOOD]}, {"blocks": [], "input_bytes": 4},
     {"blocks": "ab", "input_bytes": 4}, {"blocks": [3], "input_bytes": 4},
     {"blocks": [GOOD], "input_bytes": -1},
     {"blocks": [GOOD], "input_bytes": 4, "size": 3}, "[" * 100_000],
)  # fmt: skip
def test_bad_chains(source):
    with pytest.raises(InvalidChain) as error:
        Chain.from_json(source)
    assert "\n" not in str(error.value)


def test_a_block_names_itself():
    with pytest.raises(InvalidChain, match="block 'layer1': saved_bytes is -9"):
        Block(name="layer1", forward_time=1, backward_time=2, output_bytes=4, saved_bytes=-9)


@pytest.mark.parametrize("source", ["{}", {"branches": []}, {"branches": [3]}, {"branches": "x"}])
def test_bad_joins(source):
    with pytest.raises(InvalidChain):
        Join.from_json(source)
