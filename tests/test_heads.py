"""The vocabulary of heads: names that parse and print, lists of heads, and which pairs are compared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headspan.vocabulary.errors import HeadspanError
from headspan.vocabulary.heads import (
    EMBEDDING_POSITION,
    FLOW_PAIRINGS,
    PAIRINGS,
    ROLES,
    SAME_TYPE_PAIRINGS,
    Head,
    Node,
    Pairing,
    Port,
    Role,
    forward_mask,
    mlp_position,
    pair_mask,
    parse_pairings,
    same_type_mask,
)
from headspan.vocabulary.ports import PortTable

layers = st.integers(0, 999_999)
heads = st.builds(Head, layers, st.integers(0, 999_999), st.sampled_from(("H", "KV", "QR"))) | st.builds(
    Head, layers, st.just(0), st.just("KR")
)


@given(heads, st.sampled_from(ROLES))
def test_names_parse_to_what_they_print(head: Head, role: Role) -> None:
    assert Head.parse(str(head)) == head
    assert Head.parse(f" {str(head).lower()} ") == head
    assert Port.parse(str(Port(head, role))) == Port(head, role)


@given(st.text(max_size=12))
def test_any_text_is_a_head_or_a_message(text: str) -> None:
    for parse in (Head.parse, Port.parse, Pairing.parse, parse_pairings):
        try:
            parse(text)
        except HeadspanError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - an answer is right too


@pytest.mark.parametrize(
    "text", ["", "L4", "H7", "L4H", "LH7", "L-1H0", "4.7", "L4H7x", "L4 H7", "L4H7.O", "L9999999H1", "L٤H٧x"]
)
def test_texts_that_are_not_a_head(text: str) -> None:
    with pytest.raises(HeadspanError, match="L4H7"):
        Head.parse(text)


@pytest.mark.parametrize("text", ["L4H11", "L4H11.", "L4H11.X", ".O", "O.L4H11", "L4H11.O.K"])
def test_texts_that_are_not_a_head_with_a_role(text: str) -> None:
    with pytest.raises(HeadspanError):
        Port.parse(text)


def test_pairings() -> None:
    assert len(PAIRINGS) == 16
    assert parse_pairings("all") == PAIRINGS
    assert parse_pairings("flow") == FLOW_PAIRINGS
    assert [str(p) for p in parse_pairings(["ok", "OQ,OK"])] == ["OK", "OQ"]
    assert all(p.same_type for p in SAME_TYPE_PAIRINGS) and len(SAME_TYPE_PAIRINGS) == 4
    with pytest.raises(HeadspanError, match="for example OK"):
        parse_pairings("OX")


def test_partners_are_the_two_circuits() -> None:
    assert {(role.value, role.partner.value) for role in ROLES} == {("Q", "K"), ("K", "Q"), ("V", "O"), ("O", "V")}
    assert all(role.partner.partner is role for role in ROLES)


def test_gpt2_small_has_as_many_pairs_as_published() -> None:
    table = PortTable.regular(range(12), 12, 12)
    assert len(table.query) == len(table.kv) == 144
    assert forward_mask(table.query, table.kv).sum() == 9_504
    assert same_type_mask(table.query).sum() == 10_296


def test_shared_heads_are_listed_once() -> None:
    table = PortTable.regular([0, 3], 6, 2)
    assert list(map(str, table.of(Role.K))) == ["L0KV0", "L0KV1", "L3KV0", "L3KV1"]
    assert len(table.of(Role.O)) == 12
    assert table.find("L3KV1", Role.V) == 3
    for head, role in (("L3KV0", Role.Q), ("L1H0", Role.O), ("L0H6", Role.O), ("L0H6", Role.K)):
        with pytest.raises(HeadspanError, match="no head"):
            table.find(head, role)


def test_keys_of_a_query_head_are_those_of_its_group() -> None:
    table = PortTable.regular([0, 3], 6, 2)
    assert table.find("L3H4", "K") == table.find("l3kv1", "K") == 3
    assert str(table.resolve("L3H2", Role.V)) == "L3KV0"
    note = table.note("L3H2", "V")
    assert note is not None and all(fact in note for fact in ("L3H2.V", "L3KV0.V", "L3H0, L3H1, L3H2"))
    assert table.note("L3KV0", "V") is None and table.note("L3H2", "Q") is None
    assert all(table.kv_of(head) in table.kv and head in table.group_of(table.kv_of(head)) for head in table.query)
    plain = PortTable.regular(range(2), 3, 3)
    assert not plain.shared and plain.kv_of("L1H2") == Head(1, 2) and plain.group_of("L1H2") == (Head(1, 2),)


def test_layers_may_differ_in_their_heads() -> None:
    table = PortTable.of_heads(
        [Head(0, 0), Head(0, 1), *(Head(4, i) for i in range(4))],
        [Head(0, 0, "KV"), Head(4, 0, "KV"), Head(4, 1, "KV")],
    )
    assert table.span(Role.Q, 4) == slice(2, 6) and table.span(Role.K, 4) == slice(1, 3)
    assert table.span(Role.K, 2) == slice(0, 0)
    assert [str(table.kv_of(head)) for head in table.query] == ["L0KV0", "L0KV0", "L4KV0", "L4KV0", "L4KV1", "L4KV1"]


def test_nodes_have_their_place_in_the_stream() -> None:
    early, late = Node.at(EMBEDDING_POSITION, -1, "Paris", "token"), Node.at(mlp_position(1), 1, "L1N7", "neuron")
    heads = PortTable.regular(range(3), 2, 2)
    table = PortTable({**heads.ports, Role.W: (early, late), Role.R: (late,)})
    np.testing.assert_array_equal(forward_mask(table.of("W"), table.of("Q")), [[True] * 6, [False] * 4 + [True] * 2])
    np.testing.assert_array_equal(forward_mask(table.of("O"), table.of("R"))[:, 0], [True] * 4 + [False] * 2)
    assert table.find("paris", "W") == 0 and table.find(late, "R") == 0 and table.nodes == (early, late)
    assert mlp_position(1, parallel=True) == Head(1, 0).position
    with pytest.raises(HeadspanError, match="no node Rome"):
        table.find("Rome", "W")


@given(st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]), st.sampled_from(PAIRINGS))
def test_masks_follow_their_definition(layers: int, counts: tuple[int, int], pairing: Pairing) -> None:
    table = PortTable.regular(range(layers), *counts)
    sources, targets = table.of(pairing.source), table.of(pairing.target)
    forward = np.array([[a.layer < b.layer for b in targets] for a in sources])
    np.testing.assert_array_equal(pair_mask(pairing, sources, targets, "forward"), forward)
    default = pair_mask(pairing, sources, targets, "default")
    upper = np.array([[i < j for j in range(len(targets))] for i in range(len(sources))])
    np.testing.assert_array_equal(default, upper if pairing.same_type else forward)


@pytest.mark.parametrize("parse", [Head.parse, Port.parse, Pairing.parse])
def test_a_name_of_a_page_is_cut_in_the_message(parse) -> None:
    with pytest.raises(HeadspanError) as caught:
        parse("x" * 9000)
    assert len(str(caught.value)) < 300


def test_keys_and_values_that_later_layers_use_are_shared_heads() -> None:
    """Even where a layer has as many of them as query heads: each serves heads of two layers."""
    table = PortTable.of_counts({0: (2, 2), 1: (2, 2), 2: (2, 0)}, {2: 1})
    assert list(map(str, table.of("K"))) == ["L0H0", "L0H1", "L1KV0", "L1KV1"]
    assert list(map(str, table.group_of("L1KV1"))) == ["L1H1", "L2H1"]
    assert [str(table.resolve(name, "V")) for name in ("L0H1", "L1H0", "L2H1")] == ["L0H1", "L1KV0", "L1KV1"]
    assert str(table.kv_of("L0H1")) == "L0H1"
