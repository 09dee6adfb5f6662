"""Lists on the command line: read into types, refused with the option's name."""

import pytest

from dblp.cli.options import parse_choice, parse_choices, parse_ranks, parse_seeds, parse_sizes, parse_time
from dblp.errors import ConfigError
from dblp.transport.config import TransportConfig
from dblp.units import parse_bytes


def test_sizes_are_powers_of_1024_and_whole_floats():
    assert parse_sizes("4K, 1M,25M") == [4096, 1 << 20, 25 << 20]
    assert parse_sizes("10,4") == [8, 4]


def test_seeds_are_a_count_or_the_seeds_themselves():
    assert parse_seeds("1") == [0]
    assert parse_seeds("3") == [0, 1, 2]
    assert parse_seeds("7,2") == [7, 2]
    assert parse_seeds("7,") == [7]


def test_times_have_units_or_are_seconds():
    assert [parse_time("--seconds", text) for text in ("20", "20s", "1.5", "250ms", "1min")] == [
        20,
        20,
        1.5,
        0.25,
        60,
    ]


def test_names_keep_the_users_order():
    assert parse_choices("--arms", "b,a", ["a", "b", "c"]) == ["b", "a"]
    assert parse_choice("--model", "cnn", ["mlp", "cnn"]) == "cnn"


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (parse_ranks, "1", ["--ranks", "'1'", "2 or more"]),
        (parse_ranks, "2,x", ["--ranks", "'x'"]),
        (parse_ranks, "", ["--ranks", "''"]),
        (parse_ranks, "2,2", ["--ranks", "twice"]),
        (parse_sizes, "4Q", ["--sizes", "'4Q'", "25M"]),
        (parse_sizes, "3", ["--sizes", "4 bytes"]),
        (lambda text: parse_time("--seconds", text), "20q", ["--seconds", "'20q'", "ms, us"]),
        (parse_seeds, "99999999999", ["--seeds", "100000 at most"]),
        (parse_seeds, "0", ["--seeds", "'0'"]),
        (parse_seeds, "99999999999999999999,", ["--seeds", "the largest seed is 4294967295"]),
        (parse_seeds, "1,-1", ["--seeds", "'-1'"]),
        (lambda text: parse_choices("--arms", text, ["gloo"]), "glo", ["--arms", "'glo'", "gloo"]),
        (lambda text: parse_choice("--model", text, ["mlp", "cnn"]), "vit", ["--model", "'vit'", "mlp, cnn"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_options_name(parse, text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    for word in words:
        assert word in str(caught.value)


def test_a_part_of_a_byte_is_refused_and_a_rounded_size_is_not():
    assert parse_bytes("1.367KB") == 1400 and parse_bytes("1.5K") == 1536 and parse_bytes("7") == 7
    with pytest.raises(ConfigError, match=r"1\.5 bytes are not a whole number"):
        parse_bytes("1.5")
    with pytest.raises(ConfigError, match="not a whole number"):
        TransportConfig.from_env({"DBLP_DATAGRAM_BYTES": "1464.5B"})
