"""The pipeline model: the formulas it must give, laws it must keep, and compare() on pipelines that keep it or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyep import model

times = st.floats(0, 100, allow_nan=False)
counts = st.integers(1, 60)
stages = st.integers(1, 9)


def events(t_load, t_compute, num_tiles, num_stages, t_latency):
    """The same by events: a loader, a path that bytes pass one tile after the other, a worker, a number of slots."""
    now, free, waiting, path, arrived, busy, finished = 0.0, num_stages, num_tiles, [], [], None, 0
    while finished < num_tiles:
        while free and waiting:
            free, waiting = free - 1, waiting - 1
            begin = max(now + t_latency, path[-1] if path else arrived_last(path, arrived, now))
            path.append(begin + t_load - t_latency)
        if busy is None and path and path[0] <= now:
            arrived.append(path.pop(0))
            busy = now + t_compute
            continue
        if busy is not None and busy <= now:
            busy, finished, free = None, finished + 1, free + 1
            continue
        now = min([moment for moment in (busy, path[0] if path and busy is None else None) if moment is not None])
    return now


def arrived_last(path, arrived, now):
    """When the path is free again: after the last tile that passed it."""
    return arrived[-1] if arrived else 0.0


def test_the_example_of_the_issue():
    assert model.serial_time(3, 5, 4) == 32
    assert model.pipeline_time(3, 5, 4) == 23


@given(times, times, counts)
def test_two_stages_are_the_formula(t_load, t_compute, num_tiles):
    formula = t_load + t_compute + (num_tiles - 1) * max(t_load, t_compute)
    assert model.pipeline_time(t_load, t_compute, num_tiles) == pytest.approx(formula, abs=1e-9)


@given(times, times, counts)
def test_one_stage_is_serial(t_load, t_compute, num_tiles):
    serial = model.serial_time(t_load, t_compute, num_tiles)
    assert model.pipeline_time(t_load, t_compute, num_tiles, 1) == pytest.approx(serial, abs=1e-9)


def test_slots_beyond_the_tiles_take_no_memory():
    assert model.pipeline_time(3, 5, 4, 10**12) == 23


@given(times, times, counts, stages, st.floats(0, 1))
def test_as_by_events(t_load, t_compute, num_tiles, num_stages, share):
    arguments = (t_load, t_compute, num_tiles, num_stages)
    expected = events(*arguments, share * t_load)
    assert model.pipeline_time(*arguments, t_latency=share * t_load) == pytest.approx(expected, abs=1e-6)


@given(times, times, stages, st.floats(0, 1))
def test_interval_is_the_slope(t_load, t_compute, num_stages, share):
    options = {"t_latency": share * t_load}
    long, short = (model.pipeline_time(t_load, t_compute, n, num_stages, **options) for n in (5040, 2520))
    slope = (long - short) / 2520  # 2520 is a multiple of every number of stages
    assert slope == pytest.approx(model.interval(t_load, t_compute, num_stages, **options), rel=1e-6, abs=1e-9)


@given(times, times, counts, stages, st.floats(0, 1))
def test_more_stages_never_hurt(t_load, t_compute, num_tiles, num_stages, share):
    more, fewer = (
        model.pipeline_time(t_load, t_compute, num_tiles, n, t_latency=share * t_load)
        for n in (num_stages + 1, num_stages)
    )
    assert more <= fewer + 1e-9


def test_littles_law():
    assert model.bytes_in_flight(48, 1.0) == 48_000
    t_load = model.load_time(16_384, latency_us=1.0, gbps_per_sm=48, num_sms=8, gbps_total=1e9)
    assert t_load == pytest.approx(1.0 + 16_384 / 48_000)
    needed = model.stages_needed(t_load, 0, t_latency=1.0)
    assert (needed - 1) * 16_384 < 48_000 + 16_384 <= needed * 16_384  # what is in flight, and what lands
    assert model.interval(t_load, 0, needed, t_latency=1.0) == pytest.approx(16_384 / 48_000)
    assert model.load_time(16_384, latency_us=0, gbps_per_sm=48, num_sms=132, gbps_total=1_320) == 1.6384
    assert model.stages_needed(3, 5) == 2 and model.stages_needed(0, 0) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 1, 1), {}, "t_load: expected at least 0, got -1"),
        ((1, float("inf"), 1), {}, "t_compute: expected a finite number, got inf"),
        ((1, float("nan"), 1), {}, "t_compute: expected at least 0, got nan"),
        ((1, 1, -1), {}, "num_tiles: expected at least 0, got -1"),
        ((1, 1, 2.5), {}, r"num_tiles: expected an int, got 2\.5"),
        ((1, 1, 1, 0), {}, "stages: expected at least 1, got 0"),
        ((1, 1, 1, 2.5), {}, r"stages: expected an int, got 2\.5"),
        (("1", 1, 1), {}, "t_load: expected a number, got '1'"),
        ((1, 1, 1), {"t_latency": 2}, r"t_latency: expected 0\.\.t_load \(1\), got 2"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        model.pipeline_time(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model.load_time(9, latency_us=1, gbps_per_sm=0), "gbps_per_sm: expected more than 0, got 0"),
        (lambda: model.load_time(9, latency_us=1, gbps_per_sm=1, num_sms=0), "num_sms: expected at least 1, got 0"),
        (lambda: model.load_time(9, latency_us=1, gbps_per_sm=1, gbps_total=-1), "gbps_total: expected more than 0"),
        (lambda: model.load_time(9, latency_us=-1, gbps_per_sm=1), "latency_us: expected at least 0, got -1"),
        (lambda: model.load_time(-9, latency_us=1, gbps_per_sm=1), "tile_bytes: expected at least 0, got -9"),
        (lambda: model.bytes_in_flight(-1, 1), "gbps: expected at least 0, got -1"),
        (lambda: model.compare(lambda stages, work: 1.0, 0, 1), "num_tiles: expected at least 1, got 0"),
        (lambda: model.compare(lambda stages, work: 1.0, 1, 1, [0]), "stages: expected at least 1, got 0"),
        (lambda: model.stages_needed(float("inf"), 1), "t_load: expected a finite number, got inf"),
        (lambda: model.compare(lambda stages, work: 1.0, 1, -1), "work: expected at least 0, got -1"),
        (lambda: model.compare(lambda stages, work: 1.0, 1, 1, 3), "stages: expected a sequence of ints, got 3"),
        (lambda: model.compare(lambda stages, work: 0.0, 1, 1), r"run\(1, 0\): expected more than 0, got 0"),
        (lambda: model.compare(lambda stages, work: None, 1, 1), r"run\(1, 0\): expected a number, got None"),
        (lambda: model.ThreadPipeline()(0, 1), "stages: expected at least 1, got 0"),  # would wait for ever
        (lambda: model.ThreadPipeline()(1, -1), r"work: expected 0\.\.4294967295, got -1"),
        (lambda: model.ThreadPipeline(load_s=1e300), "load_s: expected at most 1,000,000 seconds, got 1e"),
        (lambda: model.ThreadPipeline(-1), "num_tiles: expected at least 1, got -1"),
        (lambda: model.ThreadPipeline(load_s=-1), "load_s: expected at least 0, got -1"),
    ],
)
def test_more_bad_arguments(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("t_compute", [0.2e-6, 1e-6, 5e-6])
def test_compare_finds_the_times_of_a_pipeline_that_keeps_the_model(t_compute):
    num_tiles, t_load, t_latency = 1000, 2e-6, 1.5e-6

    def run(number, work):
        return model.pipeline_time(t_load, t_compute if work else 0, num_tiles, number, t_latency=t_latency)

    found = model.compare(run, num_tiles, 1)
    assert [row.stages for row in found.rows] == list(range(1, 9))
    assert found.t_load == pytest.approx(t_load) and found.t_compute == pytest.approx(t_compute)
    assert found.t_latency == pytest.approx(t_latency, rel=0.02)  # a few tiles fill the ring
    assert found.largest_error < 0.02
    text = str(found).splitlines()
    assert len(text) == 10 and "load 2 us" in text[0] and text[-1].split()[0] == "8"


def test_compare_shows_a_pipeline_that_does_not():
    def run(number, work):  # nothing overlaps, whatever the ring
        return model.serial_time(2e-6, 1e-6 if work else 0, 100)

    assert model.compare(run, 100, 1).largest_error > 0.3


def test_threads():
    run = model.ThreadPipeline(num_tiles=6, load_s=1e-3)
    found = model.compare(run, run.num_tiles, 50, stages=(2, 3))
    assert [row.stages for row in found.rows] == [1, 2, 3]
    assert all(row.measured_s > 0 for row in found.rows) and found.t_compute > 0
