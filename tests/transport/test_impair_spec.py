"""The impairment string: what it means, what it refuses and where."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dblp.errors import ConfigError
from dblp.transport import impair_spec
from dblp.transport.impair_spec import (
    ELEMENTS,
    Bursts,
    Corrupt,
    Delay,
    Duplicate,
    GilbertElliott,
    GilbertElliottTime,
    ImpairSpec,
    Jitter,
    Loss,
    Rate,
    Reorder,
    parse_impair,
)
from dblp.transport.spec import Element

shares = st.floats(0.0, 1.0)
above_zero = st.floats(1e-9, 1e6)
times = st.floats(0.0, 1e6)
sizes = st.integers(1, 1 << 40)


def _ordered(pair):
    return min(pair), max(pair)


elements: list[st.SearchStrategy[Element]] = [
    st.builds(Loss, shares),
    st.builds(GilbertElliott, shares, st.floats(1e-6, 1.0), shares, shares),
    st.builds(GilbertElliottTime, above_zero, above_zero, shares, shares),
    st.builds(
        lambda loss, spans, start: Bursts(loss, min(spans), max(spans), start),
        st.tuples(shares, shares).map(_ordered),
        st.tuples(above_zero, above_zero),
        times,
    ),
    st.builds(Duplicate, shares),
    st.builds(Rate, st.floats(1.0, 1e14), sizes),
    st.builds(Corrupt, shares, st.booleans()),
    st.builds(Delay, times),
    st.builds(Jitter, times, st.sampled_from(["uniform", "normal"])),
    st.builds(Reorder, shares, above_zero),
]
specs = st.builds(
    ImpairSpec,
    st.lists(st.integers(0, len(elements) - 1), unique=True).flatmap(
        lambda picked: st.tuples(*(elements[i] for i in picked))
    ),
    st.integers(0, 2**63 - 1),
)


def test_the_example_of_the_documentation():
    spec = parse_impair("ge(p=0.002,r=0.05,bad=0.8),delay(2ms),seed(7)")
    assert spec == ImpairSpec((GilbertElliott(0.002, 0.05, 0.8, 0.0), Delay(0.002)), 7)


@pytest.mark.parametrize(
    ("text", "element"),
    [
        ("loss(0.1)", Loss(0.1)),
        ("loss(p=5%)", Loss(0.05)),
        ("ge(0.01, 0.2)", GilbertElliott(0.01, 0.2, 1.0, 0.0)),
        ("ge(0.01, 0.2, good=0.1)", GilbertElliott(0.01, 0.2, 1.0, 0.1)),
        ("ge_time(burst=50ms,gap=1s,bad=0.8)", GilbertElliottTime(0.05, 1.0, 0.8, 0.0)),
        ("bursts(loss=0.6..0.9,length=200ms,every=1s)", Bursts((0.6, 0.9), 0.2, 1.0, 0.0)),
        ("bursts(loss=80%,length=200ms,every=1s,start=5s)", Bursts((0.8, 0.8), 0.2, 1.0, 5.0)),
        ("duplicate(0.01)", Duplicate(0.01)),
        ("rate(1gbit)", Rate(1e9, 262_144)),
        ("rate(100mbit, queue=64KB)", Rate(1e8, 65_536)),
        ("corrupt(0.01)", Corrupt(0.01, False)),
        ("corrupt(0.01,deliver=true)", Corrupt(0.01, True)),
        ("delay(2ms)", Delay(0.002)),
        ("jitter(1ms)", Jitter(0.001, "uniform")),
        ("jitter(time=1ms,dist=normal)", Jitter(0.001, "normal")),
        ("reorder(p=0.1,by=2ms)", Reorder(0.1, 0.002)),
    ],
)
def test_every_element(text, element):
    assert parse_impair(text) == ImpairSpec((element,))


def test_an_empty_string_impairs_nothing():
    assert parse_impair("") == parse_impair("  \t") == ImpairSpec()
    assert not parse_impair("")
    assert not parse_impair("seed(3)")


def test_space_between_tokens_is_free_and_order_does_not_matter():
    loose = parse_impair(" delay ( 2ms ) ,\n loss( p = 0.1 ) ")
    assert loose == parse_impair("loss(0.1),delay(2ms)")
    assert [element.name for element in loose.elements] == ["loss", "delay"]


def test_get_finds_an_element_by_type():
    spec = parse_impair("loss(0.1),delay(2ms)")
    assert spec.get(Delay) == Delay(0.002)
    assert spec.get(Rate) is None


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("foo(1)", 1, "'foo' is no impairment; known are loss, ge, ge_time"),
        ("loss(0.1),fo(1)", 11, "known are"),
        ("loss", 5, r"expected '\(' after 'loss'"),
        ("loss(", 6, "a share in 0..1"),
        ("loss()", 6, r"loss lacks p: loss\(p\)"),
        ("loss(2)", 6, "p=2 will not do: a share in 0..1"),
        ("loss(nan)", 6, "a share"),
        ("loss(-0.1)", 6, "a share"),
        ("loss(0.1,0.2)", 10, "too many values"),
        ("loss(p=0.1,p=0.2)", 12, "p is given twice"),
        ("loss(0.1", 9, "found the end"),
        ("loss(0.1)delay(2ms)", 10, "expected ',' or the end"),
        ("loss(0.1),", 11, "name of an impairment"),
        (",loss(0.1)", 1, "found ','"),
        ("loss(0.1),loss(0.2)", 11, "loss stands more than once"),
        ("loss(0.1),seed(1),seed(2)", 19, "seed stands more than once"),
        ("delay(2 ms)", 9, r"expected ',' or '\)'"),
        ("delay(2parsec)", 7, "a time such as 2ms"),
        ("delay(-1ms)", 7, "a time"),
        ("delay(1e999s)", 7, "a time"),
        ("ge(p=0.1,q=0.2)", 10, "ge has no 'q'"),
        ("ge(p=0,r=0)", 1, "no state is ever left"),
        ("ge(p=0.1)", 9, "ge lacks r"),
        ("bursts(loss=0.9..0.6,length=1s,every=2s)", 13, "a range such as 0.6..0.9"),
        ("bursts(loss=0.5,length=2s,every=1s)", 1, "would overlap"),
        ("ge_time(burst=0s,gap=1s)", 15, "a time above 0"),
        ("rate(0bit)", 6, "a rate above 0"),
        ("rate(1gbit,queue=0B)", 18, "a size of at least 1 byte"),
        ("rate(1gbit,queue=1e400B)", 18, "a size"),
        ("corrupt(0.1,deliver=maybe)", 21, "true or false"),
        ("jitter(1ms,dist=cauchy)", 17, "uniform or normal"),
        ("reorder(0.1)", 12, "reorder lacks by"),
        ("seed(x)", 6, "a whole number"),
        ("seed(-1)", 6, "a whole number"),
        ("seed(99999999999999999999)", 6, "a whole number"),
        ("seed(²)", 6, "a whole number"),
        ("seed 7", 6, r"'\(' after 'seed'"),
        ("\tloss(x)", 7, "a share"),
    ],
)
def test_a_fault_is_named_with_its_column(text, column, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_impair(text)
    first, shown, caret = str(caught.value).split("\n")
    assert first.startswith(f"impairments, column {column}: ")
    assert shown == "  " + text.replace("\t", " ")
    assert caret.index("^") == 2 + column - 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loss(1.5),
        lambda: Loss(float("nan")),
        lambda: GilbertElliott(0.0, 0.0),
        lambda: Delay(-1.0),
        lambda: Rate(1e9, 0),
        lambda: Rate(1e9, 1.5),  # type: ignore[arg-type]
        lambda: Bursts((0.9, 0.1), 0.1, 1.0),
        lambda: Bursts((0.1, 0.9), 2.0, 1.0),
        lambda: Jitter(0.1, "cauchy"),
        lambda: ImpairSpec((), -1),
        lambda: ImpairSpec((Loss(0.1), Loss(0.2))),
    ],
)
def test_descriptions_made_by_hand_are_checked_too(make):
    with pytest.raises(ConfigError):
        make()


@given(specs)
def test_a_spec_survives_str_and_repr(spec):
    assert parse_impair(str(spec)) == spec
    assert eval(repr(spec), vars(impair_spec)) == spec


_noise = st.text(st.sampled_from("losgedayrtbu(),=.0123456789 \t%ms-+e²é"), max_size=40)


@given(st.one_of(st.text(max_size=40), _noise))
def test_any_text_parses_or_raises_config_error_with_a_position(text):
    try:
        spec = parse_impair(text)
    except ConfigError as error:
        first, shown, caret = str(error).split("\n")
        column = re.match(r"impairments, column (\d+): ", first)
        assert column is not None
        assert 1 <= int(column[1]) <= len(text) + 1
        assert len(shown) == 2 + len(text)
        assert caret == " " * (int(column[1]) + 1) + "^"
    else:
        assert parse_impair(str(spec)) == spec


@given(specs.filter(bool), st.data())
def test_a_fault_put_into_a_good_string_is_found_at_or_before_its_place(spec, data):
    text = str(spec)
    at = data.draw(st.integers(0, len(text)))
    broken = text[:at] + "?" + text[at:]
    with pytest.raises(ConfigError) as caught:
        parse_impair(broken)
    column = re.match(r"impairments, column (\d+)", str(caught.value))
    assert column is not None
    # The word that holds the fault starts at the column, or the fault itself does.
    start = int(column[1]) - 1
    assert start <= at
    assert not set(broken[start:at]) & set("(),=")


def test_every_element_stands_in_the_table_by_its_name():
    assert {name: cls.name for name, cls in ELEMENTS.items()} == {name: name for name in ELEMENTS}


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("rate(450mbit,queue=100K)", "rate(rate=450mbit,queue=100KB)"),
        ("rate(1234567bit,queue=1500B)", "rate(rate=1234567bit,queue=1500B)"),
        ("rate(1.5gbit,queue=2MB)", "rate(rate=1.5gbit,queue=2MB)"),
        (
            "bursts(loss=0.6..0.9,length=200ms,every=1s)",
            "bursts(loss=0.6..0.9,length=200ms,every=1s,start=0s)",
        ),
        ("delay(0.123456789s)", "delay(time=0.123456789s)"),
        ("jitter(31us)", "jitter(time=31us,dist=uniform)"),
    ],
)
def test_values_are_written_as_people_write_them(text, written):
    assert str(parse_impair(text)) == written
    assert parse_impair(written) == parse_impair(text)
