"""The ranks' results put together; the table, the picture and the JSON made of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dblp.cli.host import document, write_json
from dblp.cli.launch import WorkerError
from dblp.cli.main import run as dblp
from dblp.cli.train.figures import _by_arm, draw
from dblp.cli.train.outcome import Collector, combine
from dblp.cli.train.policies import ARMS, check_arm, is_bounded, method_of, parse_compressions, policy_of
from dblp.cli.train.table import perplexities, sizes, summary_table, verdict
from dblp.collectives.compression.registry import parse_compression
from dblp.collectives.presets import presets
from dblp.errors import ConfigError, LocalError
from dblp.transport.policy import Stop

TRAFFIC = {
    "datagrams_offered": 1000, "datagrams_lost": 150, "chunks_sent": 800, "chunks_resent": 80,
    "chunks_missing": 6, "chunks_expected": 300,
}  # fmt: skip
RECORD_KEYS = [
    "arm", "seed", "test_accuracy", "test_perplexity", "wall_s", "allreduce_p50_s", "allreduce_p99_s", "network_loss",
    "missing_share", "retransmitted_share", "compression_ratio",
]  # fmt: skip


def result(
    arm="dblp-bounded", seed=0, rank=0, accuracy=0.98, fingerprint="a", traffic=TRAFFIC, perplexity=None
):
    rng = np.random.default_rng(seed + rank)
    return {
        "kind": "result", "arm": arm, "seed": seed, "test_accuracy": accuracy, "test_perplexity": perplexity,
        "wall_s": 10.0 + rank,
        "losses": [2.0 + rank, 1.0, 0.5], "accuracies": [0.5, 0.9, accuracy], "fingerprint": fingerprint,
        "allreduce_s": list(rng.lognormal(-5, 1, 40)), "traffic": traffic,
    }  # fmt: skip


def outcomes(seeds=(0, 1)):
    return [
        combine(
            [
                result(arm, seed, rank, 0.98 + 0.01 * seed, traffic=None if arm == "gloo" else TRAFFIC)
                for rank in (0, 1)
            ]
        )
        for seed in seeds
        for arm in ARMS
    ]


def text_of(table, width=80):
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_ranks_are_summed_and_shares_are_of_the_sums():
    halved = {name: count // 2 for name, count in TRAFFIC.items()}
    outcome = combine([result(rank=0), result(rank=1, traffic=halved)])
    assert outcome.wall_s == 11.0
    assert outcome.losses.tolist() == [2.5, 1.0, 0.5]
    assert (len(outcome.allreduce_s), outcome.rounds) == (80, 40)
    assert outcome.network_loss == pytest.approx(0.15)
    assert outcome.missing_share == pytest.approx(0.02)
    assert outcome.retransmitted_share == pytest.approx(0.1)


def test_what_a_transport_does_not_tell_is_none():
    outcome = combine([result("gloo", traffic=None)])
    assert (outcome.network_loss, outcome.missing_share, outcome.retransmitted_share) == (None, None, None)


def test_nothing_to_lose_is_none_and_no_division_by_zero():
    outcome = combine([result(traffic=dict.fromkeys(TRAFFIC, 0))])
    assert outcome.missing_share is None


def test_differing_replicas_are_an_error_that_names_the_rank():
    results = [result(rank=rank, fingerprint="b" if rank == 2 else "a") for rank in range(4)]
    with pytest.raises(WorkerError, match=r"dblp-bounded, seed 0.*rank 2 holds"):
        combine(results)


def test_an_outcome_is_complete_with_its_last_rank():
    collector = Collector(2)
    assert collector.add(1, result(rank=1)) is None
    assert collector.add(0, result(seed=1)) is None
    outcome = collector.add(0, result(rank=0))
    assert outcome is not None
    assert collector.outcomes == [outcome]


def test_the_table_has_a_row_an_arm_and_fits_80_columns():
    text = text_of(summary_table(outcomes()))
    assert "…" not in text
    for arm in ARMS:
        row = next(line for line in text.splitlines() if line.strip().startswith(arm + " "))
        assert "98.50 %" in row
        assert ("15.00 %" in row) == (arm != "gloo")
    assert "mean of seeds 0, 1" in text


def presets_outcomes(seeds=(0,)):
    arms = ["gloo", "dblp-exact", *(name for name in presets() if name != "exact")]
    return [combine([result(arm, seed)]) for seed in seeds for arm in arms]


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_all_presets_fits(width):
    table = summary_table(presets_outcomes())
    lines = text_of(table, width).splitlines()
    assert "…" not in "".join(lines)
    names = [line.split()[0] for line in lines if line.strip()]
    assert names[-7:] == ["gloo", "dblp-exact", "mlt", "dblp", "ltp", "optireduce", "default"]
    assert len(str(verdict(presets_outcomes())).splitlines()) == 5


def test_no_two_curves_of_all_presets_look_the_same():
    looks = {(style["color"], style["linestyle"]) for style, _ in _by_arm(presets_outcomes())}
    assert len(looks) == 7


def test_the_verdict_compares_bounded_with_exact():
    exact = combine([result("dblp-exact", accuracy=0.985)])
    bounded = combine([result("dblp-bounded", accuracy=0.98)])
    assert "-0.50 points" in str(verdict([exact, bounded]))
    assert verdict([exact]) is None
    assert verdict([bounded]) is None


def test_the_verdict_has_a_line_for_each_policy():
    accuracies = {"gloo": 0.99, "dblp-exact": 0.985, "mlt": 0.98, "default": 0.986}
    lines = str(
        verdict([combine([result(arm, accuracy=value)]) for arm, value in accuracies.items()])
    ).splitlines()
    assert [line.split(":")[0] for line in lines] == ["mlt - dblp-exact", "default - dblp-exact"]
    assert "+0.10 points" in lines[1]


def test_perplexities_are_told_where_there_are_some():
    text = [
        combine([result(arm, seed, perplexity=value + seed)])
        for arm, value in (("gloo", 4.0), ("mlt", 5.0))
        for seed in (0, 1)
    ]
    assert text[0].record()["test_perplexity"] == 4.0
    assert perplexities(text) == "test perplexity: gloo 4.500, mlt 5.500"
    assert perplexities(outcomes()) is None


def test_records_hold_the_documented_keys_and_are_json(tmp_path):
    path = tmp_path / "new" / "train.json"
    write_json(path, document("train", [outcome.record() for outcome in outcomes()]))
    content = json.loads(path.read_text())
    assert {"command", "version", "host", "records"} <= set(content)
    assert {"cores", "kernel", "machine", "python", "torch", "tcp_congestion_control"} <= set(content["host"])
    assert len(content["records"]) == 6
    for record in content["records"]:
        assert set(RECORD_KEYS) <= set(record)
        assert all(not isinstance(value, (dict, list)) for value in record.values())


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@pytest.mark.parametrize("more", [(), ("mlt", "default")])
def test_the_picture_is_drawn(tmp_path, seeds, more):
    path = tmp_path / "runs" / "train.png"
    named = [combine([result(arm, seed)]) for arm in more for seed in seeds]
    draw(outcomes(seeds) + named, path, subtitle="a test")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["train.nonsense", "file/train.png"])
def test_a_picture_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="--picture"):
        draw(outcomes((0,)), tmp_path / name, subtitle="")


def test_json_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="--json"):
        write_json(tmp_path / "file" / "x.json", {})


def test_compression_runs_over_a_policy_by_name():
    (arm,) = parse_compressions("topk(ratio=0.01)   over  bounded")
    assert arm == "topk(ratio=0.01) over bounded" and method_of(arm) == method_of("topk(ratio=0.01)")
    made = policy_of(arm, 0.2, "eager")
    assert made is not None and made.policy.budget == 0.2 and made.policy.stop is Stop.EAGER
    assert is_bounded(arm) and is_bounded("dblp-bounded") and not is_bounded("topk(ratio=0.01)")
    for text, words in [
        ("topk(0.1) over there", "no policy 'there'"),
        ("topk over nothing", "no policy 'nothing'"),
        ("zip over bounded", "'zip' is no"),
        ("gloo:topk(0.1) over bounded", "gloo loses nothing"),
        ("gloo:accordion", "follows phases, which dblp decides"),
        ("topk(0.1); topk(0.1)", "'topk\\(0.1\\)' stands twice"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse_compressions(text)


@pytest.mark.parametrize(
    ("arm", "optimizer", "words"),
    [
        ("topk(0.01) over mlt", "sgd", "'topk\\(0.01\\) over mlt'.*consistency='relaxed'"),
        ("dgc(0.01) over optireduce", "sgd", "hadamard"),
        ("dgc(0.01)", "adamw", "DGC is defined for SGD alone, not for --optimizer adamw"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_trains(arm, optimizer, words, capsys):
    with pytest.raises(ConfigError, match=words):
        check_arm(arm, 0.1, "stall", 4, optimizer)
    options = ["--arms", "gloo", "--compression", arm, "--optimizer", optimizer]
    assert dblp(["train", *options]) == 2
    said = capsys.readouterr()
    assert "--compression" in said.err and not said.out


@pytest.mark.parametrize(
    "arm", ["gloo", "dblp", "topk(0.01) over bounded", "gloo:dgc(0.01)", "dgc(momentum=0)"]
)
def test_what_goes_together_is_not_refused(arm):
    check_arm(arm, 0.1, "stall", 4, "adamw" if "momentum" in arm else "sgd")


def test_compression_is_an_arm_and_tells_its_sizes():
    arms = parse_compressions(" topk(ratio=0.01) ;dgc(0.01,indices=delta)")
    assert arms == ["topk(ratio=0.01)", "dgc(0.01,indices=delta)"] and parse_compressions(" ") == []
    method, policy = method_of(arms[0]), policy_of(arms[0], 0.1, "stall")
    assert method is not None and method.name == "topk" and policy is not None and policy.name == "exact"
    over_gloo = parse_compressions("gloo:topk(0.01)")[0]
    assert (
        method_of(over_gloo) == parse_compression("topk(0.01)") and policy_of(over_gloo, 0.1, "stall") is None
    )
    assert method_of("gloo") is method_of("dblp-exact") is method_of("mlt") is None
    sizes_of = {"gradient_bytes": 4000, "payload_bytes": 100}
    compressed = combine([result(arms[0], rank=rank, traffic=TRAFFIC | sizes_of) for rank in (0, 1)])
    assert compressed.compression_ratio == compressed.record()["compression_ratio"] == 40.0
    assert sizes([compressed, *outcomes()]) == "gradients smaller by a factor of: topk(ratio=0.01) 40.0"
    assert sizes(outcomes()) is None
    table = text_of(summary_table([compressed, *outcomes()]))
    assert "topk(ratio=0" in table and "\u2026" not in table, "no cell is cut off"
    long = replace(compressed, arm="dgc(ratio=0.001,nesterov=true,masking=false,warmup=4,scope=bucket)")
    narrow, wide = (text_of(summary_table([long, *outcomes()]), width) for width in (80, 160))
    assert long.arm in wide and "\u2026" not in narrow and max(map(len, narrow.splitlines())) <= 80
    first = "".join(line.split("  ")[0].strip() for line in narrow.splitlines())
    assert long.arm in first, "it is folded, not cut"
