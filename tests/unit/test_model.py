"""The model of times and SMs: against measurements, against arithmetic by hand, and its explanation."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyep import model

# docs/performance.md, "Results": (ranks on one GPU, SMs per rank, row bytes) -> GB/s of dispatch and combine.
MEASURED = {
    (2, 4, 14336): (217, 314),
    (2, 8, 14336): (426, 601),
    (2, 24, 14336): (1100, 1118),
    (4, 4, 14336): (229, 387),
    (4, 8, 14336): (446, 695),
    (8, 4, 14336): (234, 382),
    (8, 8, 14336): (330, 419),
    (2, 8, 4096): (371, 365),
    (4, 8, 4096): (399, 395),
}


@pytest.mark.parametrize("point", MEASURED, ids=str)
def test_predictions_are_within_15_percent_of_an_h200(point):
    ranks, num_sms, row_bytes = point
    traffic = model.Traffic(4096, row_bytes, ranks, ranks_per_device=ranks)
    for predict, measured in zip((model.dispatch_time, model.combine_time), MEASURED[point], strict=True):
        predicted = traffic.logical_bytes / predict(traffic, num_sms).seconds / 1e9
        assert predicted == pytest.approx(measured, rel=0.15)


def test_traffic_of_random_experts():
    """Two ranks and one expert per token: half stay. All experts: a row to every rank."""
    one, many = model.Traffic(100, 1000, 2, num_topk=1), model.Traffic(100, 1000, 4, num_topk=60)
    assert (one.fan, one.logical_bytes, one.wire_bytes) == (1.0, 100_000, 50_000)
    assert many.fan == pytest.approx(4) and many.wire_bytes == pytest.approx(300_000)
    assert model.Traffic(100, 1000, 8, 2, destinations=5.0).wire_bytes == 375_000  # 2 of 8 ranks have no link between
    assert model.Traffic(100, 1000, 4, 4).wire_bytes == 0


def test_terms_by_hand():
    """1,000 tokens, every row to 4 ranks on 4 GPUs: 3/4 of 4 MB cross the link; memory moves a row in and four out."""
    machine = model.Machine(clock_ghz=2.0, memory_gbps=1000.0, link_gbps=100.0)
    terms = model.dispatch_time(model.Traffic(1000, 1000, 4, destinations=4.0), 10, machine).terms
    assert terms["link"] == pytest.approx(3e6 / 84e9)
    assert terms["memory"] == pytest.approx(5e6 / 690e9)
    assert terms["SMs"] == pytest.approx(1000 * (4 * 1000 / 30.3 + 1000 / 250 + 59) / (10 * 2e9))


sizes = st.integers(1, 4096).map(lambda n: 16 * n)


@given(
    row_bytes=sizes, ranks=st.integers(1, 72), share=st.integers(1, 8), verb=st.sampled_from(["dispatch", "combine"])
)
def test_the_chosen_sms_are_the_fewest_that_suffice(row_bytes, ranks, share, verb):
    share = min(ranks, share)
    chosen = model.num_sms(row_bytes, ranks, verb=verb, ranks_per_device=share)
    most = max(1, model.Machine().num_sms // share)
    assert 1 <= chosen <= most
    predict = model.dispatch_time if verb == "dispatch" else model.combine_time
    traffic = model.Traffic(1 << 20, row_bytes, ranks, share)
    assert chosen == most or predict(traffic, chosen).limit != "SMs" or ranks == 1
    assert chosen == 1 or predict(traffic, chosen - 1).limit == "SMs"


def test_more_never_costs_less():
    def time(tokens=4096, row_bytes=14336, ranks=8, num_sms=8):
        return model.dispatch_time(model.Traffic(tokens, row_bytes, ranks), num_sms).seconds

    assert time(8192) > time() and time(row_bytes=28672) > time() and time(num_sms=4) > time()
    assert time(4096) == pytest.approx(4096 * time(1) - 4095 * time(0))  # linear in tokens, plus the handshake


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((14336, 8), "limited by link: 8 SMs fill it"),
        ((14336, 4, "ranks_per_device"), "limited by memory: 12 SMs fill it"),
        ((16, 8), r"limited by SMs: \d+ SMs would fill the link, a rank can have 132"),
    ],
)
def test_it_explains_itself(arguments, expected, capsys):
    row_bytes, ranks, *shared = arguments
    model.num_sms(row_bytes, ranks, ranks_per_device=ranks if shared else 1, explain=True)
    assert re.fullmatch(expected, capsys.readouterr().out.splitlines()[-1])


def test_other_gpus():
    """By capability: the link; by clock: SM rates. What a driver does not tell is an H200's."""
    a100, b200 = model.Machine.of(80, 108, 1.41, 2039), model.Machine.of(103, 148, 0, 0)
    assert (a100.link_gbps, b200.link_gbps, model.Machine.of(75, 40, 1.0, 300.0).link_gbps) == (300, 900, 300)
    assert a100.sm_store_gbps == pytest.approx(30.3 * 1.41) and b200.clock_ghz == model.Machine().clock_ghz
    # Twice the link wants twice the SMs.
    assert model.num_sms(14336, 8, machine=model.Machine(link_gbps=900)) == pytest.approx(16, abs=1)


def test_an_unknown_verb():
    with pytest.raises(ValueError, match="verb: expected dispatch or combine, got 'reduce'"):
        model.num_sms(14336, 8, verb="reduce")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model.num_sms(100, 0), "num_ranks: expected at least 1, got 0"),
        (lambda: model.num_sms(0, 2), "row_bytes: expected at least 1, got 0"),
        (lambda: model.num_sms(1.5, 2), r"row_bytes: expected an int, got 1\.5"),
        (lambda: model.num_sms(100, 2, ranks_per_device=0), r"ranks_per_device: expected 1\.\.2, got 0"),
        (lambda: model.num_sms(100, 2, ranks_per_device=4), r"ranks_per_device: expected 1\.\.2, got 4"),
        (lambda: model.num_sms(100, 2, num_topk=0), "num_topk: expected at least 1, got 0"),
        (lambda: model.Traffic(-1, 100, 2), "num_tokens: expected at least 0, got -1"),
        (lambda: model.Traffic(1, 100, 2, destinations=-1), "destinations: expected at least 0, got -1"),
        (lambda: model.dispatch_time(model.Traffic(1, 100, 2), 0), "num_sms: expected at least 1, got 0"),
        (lambda: model.combine_time(model.Traffic(1, 100, 2), 0), "num_sms: expected at least 1, got 0"),
        (lambda: model.Machine(clock_ghz=0), "clock_ghz: expected more than 0, got 0"),
        (lambda: model.Machine(num_sms=0), "num_sms: expected at least 1, got 0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_the_model_needs_no_array_library():
    code = "import sys, cupyep.model; assert not {'cupy', 'mpi4py'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.environ['CUPYEP_SKIP_IMPORT_COMPILE'] = '1'; {code}"], timeout=60
    )
    assert done.returncode == 0
