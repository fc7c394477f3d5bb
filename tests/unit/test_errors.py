"""What errors say: who, where, what; and that they survive a pickle, because ranks send them to each other."""

from __future__ import annotations

import pickle

import pytest

from cupyep.errors import PeerError, PeerTimeoutError

ERRORS = {
    "dispatch (epoch 3): rank 1 left; noticed by rank 0": PeerError("dispatch", 3, 0, 1, "left"),
    "close: rank 1 left; noticed by rank 0": PeerError("close", 0, 0, 1, "left"),  # host steps have no epoch
    "combine (epoch 2): rank 1 raised an exception": PeerError("combine", 2, 1, 1, "raised an exception"),
    "barrier (epoch 1): rank 2 did not arrive within 0.5 s; noticed by rank 0": PeerTimeoutError(
        "barrier", 1, 0, 2, 0.5
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_what_a_peer_error_says(text):
    error = ERRORS[text]
    again = pickle.loads(pickle.dumps(error))
    assert str(error) == str(again) == text and type(again) is type(error)
