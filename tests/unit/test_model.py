"""The model of times and SMs: against measurements, against arithmetic by hand, and its explanation."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyep import model

# Ranks on one H200, as docs/performance.md and a sweep have them: (ranks, tokens, SMs per rank, row bytes) -> us of
# dispatch and combine.
ON_ONE_GPU = {
    (1, 1, 8, 14336): (7.0, 7.2),
    (2, 1, 8, 14336): (8.2, 8.0),
    (4, 1, 8, 14336): (11.6, 11.1),
    (8, 1, 8, 14336): (15.6, 14.4),
    (2, 128, 8, 14336): (15.3, 13.8),
    (4, 128, 8, 14336): (25.6, 21.5),
    (2, 4096, 1, 14336): (2112, 1466),
    (2, 4096, 4, 14336): (536.1, 372.9),
    (2, 4096, 8, 14336): (273.2, 192.2),
    (2, 4096, 16, 14336): (142.9, 105.8),
    (2, 4096, 24, 14336): (103.9, 109.8),
    (2, 4096, 32, 14336): (111.1, 104.5),
    (2, 4096, 8, 2048): (52.0, 57.6),
    (2, 4096, 8, 4096): (87.0, 73.9),
    (2, 4096, 8, 8192): (161.8, 119.4),
    (2, 4096, 8, 32768): (608.9, 434.1),
    (4, 4096, 1, 14336): (3635, 2157),
    (4, 4096, 4, 14336): (925.6, 555.4),
    (4, 4096, 8, 14336): (473.8, 300.1),
    (4, 4096, 12, 14336): (326.2, 285.3),
    (4, 4096, 24, 14336): (341.2, 279.3),
    (4, 4096, 32, 14336): (306.7, 271.5),
    (4, 4096, 8, 2048): (80.0, 81.4),
    (4, 4096, 8, 4096): (149.4, 101.3),
    (4, 4096, 8, 8192): (279.0, 195.4),
    (4, 4096, 8, 32768): (1053, 728.6),
    (8, 4096, 16, 14336): (836.7, 713.9),
}


@pytest.mark.parametrize("point", ON_ONE_GPU, ids=str)
def test_predictions_are_within_15_percent_on_one_gpu(point):
    ranks, num_tokens, num_sms, row_bytes = point
    traffic = model.Traffic(num_tokens, row_bytes, ranks, ranks_per_device=ranks)
    for predict, measured in zip((model.dispatch_time, model.combine_time), ON_ONE_GPU[point], strict=True):
        assert 1e6 * predict(traffic, num_sms).seconds == pytest.approx(measured, rel=0.15)


# One rank per GPU, rows of 14,336 bytes to 8 of 256 experts: (GPUs, tokens, SMs) -> us of dispatch and combine.
BETWEEN_GPUS = {
    (2, 128, 1): (83.3, 58.6),
    (2, 128, 12): (16.1, 17.8),
    (2, 4096, 1): (2297, 1486),
    (2, 4096, 4): (588.3, 385.1),
    (2, 4096, 8): (304.5, 207.4),
    (2, 4096, 32): (194.5, 192.9),
    (2, 16384, 8): (1174, 782.3),
    (2, 16384, 16): (760.2, 710.9),
    (4, 1, 8): (11.6, 11.9),
    (4, 128, 8): (29.2, 29.0),
    (4, 4096, 4): (1059, 622.9),
    (4, 4096, 8): (550.2, 500.7),
    (4, 4096, 16): (508.0, 498.4),
}


@pytest.mark.parametrize("point", BETWEEN_GPUS, ids=str)
def test_predictions_are_within_15_percent_between_gpus(point):
    ranks, num_tokens, num_sms = point
    traffic = model.Traffic(num_tokens, 14336, ranks)
    for predict, measured in zip((model.dispatch_time, model.combine_time), BETWEEN_GPUS[point], strict=True):
        assert 1e6 * predict(traffic, num_sms).seconds == pytest.approx(measured, rel=0.15)


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
    traffic = model.Traffic(1000, 1000, 4, destinations=4.0)
    push, pull = (predict(traffic, 10, machine) for predict in (model.dispatch_time, model.combine_time))
    assert push.terms["link"] == pytest.approx(3e6 / 70e9) and pull.terms["link"] == pytest.approx(3e6 / 72e9)
    assert push.terms["memory"] == pytest.approx(5e6 / 680e9) and pull.terms["memory"] == pytest.approx(5e6 / 790e9)
    clocks = 1000 / 30.3 + 3 * 1000 / 27 + 1000 / 250 + 25  # a row stays, three go to other GPUs
    assert push.terms["SMs"] == pytest.approx(1000 * clocks / (10 * 2e9))
    assert (push.limit, push.seconds) == ("link", pytest.approx(3e6 / 70e9 + (6.3 + 1.25 + 3.5) * 1e-6))
    assert model.Traffic(0, 1, 4, ranks_per_device=4).handshake_us == pytest.approx(6.3 + 4 * 1.25)


def test_rows_to_other_gpus_cost_an_sm_more():
    def clocks(ranks_per_device):
        return model.dispatch_time(model.Traffic(1000, 14336, 4, ranks_per_device), 1).terms["SMs"]

    assert clocks(4) < clocks(2) < clocks(1)
    assert model.Machine().sm_remote_store_gbps < model.Machine().sm_store_gbps


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
        ((14336, 8), "limited by link: 7 SMs fill it"),
        ((14336, 4, "ranks_per_device"), "limited by memory: 12 SMs fill it"),
        ((2, 8), r"limited by SMs: \d+ SMs would fill the link, a rank can have 132"),
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
    assert model.num_sms(14336, 8, machine=model.Machine(link_gbps=900)) == pytest.approx(14, abs=1)


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
        (lambda: model.Traffic(1, 100, 2, destinations=3), r"destinations: expected at most 2 \(num_ranks\), got 3"),
        (lambda: model.num_sms(100, 2, machine="x"), "machine: expected a Machine or None, got 'x'"),
        (lambda: model.dispatch_time(model.Traffic(1, 100, 2), 1, 0), "machine: expected a Machine or None, got 0"),
        (lambda: model.num_sms(100, 2, verb=[]), r"verb: expected dispatch or combine, got \[\]"),
        (lambda: model.Machine(link_gbps=float("inf")), "link_gbps: expected a finite number, got inf"),
        (lambda: model.stages_needed(1, 0, t_latency=1), r"t_latency: expected less than t_load \(1\)"),
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
