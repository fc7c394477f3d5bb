"""How long a dispatch or combine takes, and how many SMs it needs: from bytes and rates, no tuning tables.

machine.py holds what a GPU can do, times.py what an operation costs on it, sms.py where more SMs stop helping.
Units: bytes, seconds, GB/s = 1e9 bytes per second. Imports no array library.
"""

from cupyep.model.machine import Machine
from cupyep.model.sms import num_sms
from cupyep.model.times import Estimate, Traffic, combine_time, dispatch_time

__all__ = ["Estimate", "Machine", "Traffic", "combine_time", "dispatch_time", "num_sms"]
