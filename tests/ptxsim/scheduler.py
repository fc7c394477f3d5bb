"""The adversary: runs the ranks' grids in a seeded random order, and lets memory and copies lag as far as they may.

A rank is a stream of host steps; a step may launch one kernel, and the next one runs when that is through. Everything
random comes from the seed, also how hasty or slow this run's memory, copies and CTAs are.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxsim.accesses import compile_program
from ptxsim.async_copies import BulkLoad, BulkStore
from ptxsim.memory import Fault, Space
from ptxsim.parser import Program
from ptxsim.state import FREE, WARP, Cta, Grid

MAX_IDLE = 2000  # rounds in which nothing but the clock moves
MAX_STEPS = 300_000  # instructions of warps: a hundred times what a tiny job needs


class SimulationError(Exception):
    """A fault, a deadlock or lost progress: where, and what."""


class Scheduler:
    """Streams of ranks over one Space."""

    def __init__(self, space: Space, seed: int, tick_ns: int = 0, trace: Callable[[str], None] | None = None,
                 stalled: tuple[int, str] | None = None) -> None:
        self.space, self.rng, self.trace = space, random.Random(seed), trace
        self.tick_ns = tick_ns  # by which the clock moves when nothing else can
        self.stalled, rng = stalled, self.rng  # (rank, kernel): stops in it until a deadline is near or long past
        self.stall_after, self.stall_idle = rng.randrange(60), rng.choice([20 + seed % 20, 24 + seed % 8, MAX_IDLE])
        # This run's character: chances per step.
        self.land, self.drain, self.refresh = (rng.choice([0.0, 0.05, 0.5]) for _ in range(3))
        self.switch = rng.choice([0.02, 0.2, 0.6])
        self.split = rng.choice([0.0, 0.02, 0.2])
        self.gang = rng.choice([0.0, 0.3, 0.9])
        self.first = rng.choice([None, BulkLoad, BulkStore])  # copies that go before the others
        self.linger = rng.choice([0.0, 0.0, 0.95])  # when all wait: that they only look again
        self.slow_warp = rng.choice([0.0, 0.1])
        self.steps, self.idle = 0, 0
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.running: dict[int, Grid | None] = {}
        self.after: dict[int, Callable[[], None]] = {}
        self.ctas: list[Cta] = []
        self.retired: list[Cta] = []  # have left; the end of their grid publishes what they stored
        self.weights: list[float] = []

    # --- what the host does -------------------------------------------------------------------------------------------

    def launch(self, rank: int, program: Program, num_ctas: int, num_threads: int, smem_bytes: int, params: bytes,
               after: Callable[[], None] = lambda: None) -> None:
        """Starts a grid of `rank`, whose stream goes on when it is through; `after` is called then."""
        if not hasattr(program, "compiled"):
            program.compiled = compile_program(program)  # type: ignore[attr-defined]
        block = np.zeros(-(-len(params) // 8) * 8, np.uint8)
        block[: len(params)] = np.frombuffer(params, np.uint8)
        if len(params) != program.param_bytes:
            raise ValueError(f"{program.kernel}: expected {program.param_bytes} parameter bytes, got {len(params)}")
        grid = Grid(rank, program, program.compiled, num_ctas, num_threads, smem_bytes, block)
        self.running[rank], self.after[rank] = grid, after
        for index in range(num_ctas):
            self.ctas.append(Cta(grid, index, self.space))
            self.weights.append(self.rng.choice([1.0, 1.0, 0.03]))

    def run(self, streams: dict[int, list[Callable[[], None]]]) -> None:
        """Until every stream is through. Raises SimulationError."""
        self.streams = {rank: list(steps) for rank, steps in streams.items()}
        self.running = dict.fromkeys(streams)
        with np.errstate(all="ignore"):
            while self.ctas or any(self.streams.values()):
                self.step()

    def host_step(self) -> bool:
        ranks = [rank for rank, steps in self.streams.items() if steps and self.running[rank] is None]
        if ranks:
            self.streams[self.rng.choice(ranks)].pop(0)()
        return bool(ranks)

    def host_moves(self) -> bool:
        """A host step, unless it waits and has queued itself again."""
        left = sum(map(len, self.streams.values()))
        return self.host_step() and sum(map(len, self.streams.values())) < left

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        if rng.random() < self.land:
            self.land_one()
        if rng.random() < self.drain:
            self.drain_one(only_strong=False)
        if self.ctas and rng.random() < 0.1 * self.refresh:
            rng.choice(self.ctas).view.refresh("sys")
        if (not self.ctas or rng.random() < 0.05) and self.host_step():
            return
        for i in sorted(range(len(self.ctas)), key=lambda i: rng.random() ** (1 / self.weights[i]), reverse=True):
            ready = (cta := self.ctas[i]).ready()
            if ready.any() and not self.stalls(cta):
                self.burst(cta, self.pick(cta, ready))
                return
        self.nothing_ready()

    def stalls(self, cta: Cta) -> bool:
        if (cta.grid.rank, cta.grid.program.kernel) != self.stalled:
            return False
        self.stall_after -= self.stall_after > 0
        return self.stall_after == 0

    def pick(self, cta: Cta, ready: np.ndarray) -> np.ndarray:
        """Lanes that go on together: of one warp or of several, at one place of the program."""
        rng = self.rng
        if cta.num_warps > 1 and rng.random() > self.gang:
            warps = cta.warps(ready)
            warp = rng.choice(warps)
            if warp == self.slowest(cta) and len(warps) > 1 and rng.random() > self.slow_warp:
                warp = rng.choice([other for other in warps if other != warp])
            ready = ready & (cta.warp_of == warp)
        pcs = cta.pc[ready]
        pc = pcs.min() if rng.random() < 0.75 else pcs[rng.randrange(len(pcs))]
        mask = ready & (cta.pc == pc)
        if self.split and rng.random() < self.split:
            part = mask & np.array([rng.random() < 0.5 for _ in range(len(mask))])
            mask = part if part.any() else mask
        return cta.everyone if mask.all() else mask

    def slowest(self, cta: Cta) -> int:
        """In some runs one warp of each CTA falls behind."""
        return (cta.index + cta.grid.rank) % cta.num_warps if self.slow_warp else -1

    def burst(self, cta: Cta, mask: np.ndarray) -> None:
        """Executes `mask` from its place on until it parts, has to wait, or somebody else shall go on."""
        code, pc = cta.grid.code, int(cta.pc[mask.argmax()])
        begin, rng = pc, self.rng
        cta.parked[mask] = -1
        while True:
            self.steps += 1
            if self.steps > MAX_STEPS:
                raise SimulationError(f"lost progress: {self.everywhere()}")
            compiled = code[pc]
            active = mask
            cta.place = pc
            try:
                if compiled.guard is not None:
                    register, negated = compiled.guard
                    active = mask & (cta.registers[register] ^ negated)
                    if not active.any():
                        pc += 1
                        continue
                    if (active == mask).all():
                        active = mask
                if compiled.kind == "plain":
                    compiled.run(cta, active)
                    pc += 1
                    if compiled.visible:
                        if not (compiled.poll or compiled.reads):
                            cta.progress[active], self.idle = True, 0
                        if compiled.poll or rng.random() < self.switch:
                            cta.pc[mask] = pc
                            break
                elif compiled.kind == "branch":
                    if active is mask:
                        pc = compiled.target
                    else:
                        cta.pc[mask] = pc + 1
                        cta.pc[active] = compiled.target
                        break
                elif self.control(cta, compiled, mask, active, pc):
                    break
                else:
                    pc = int(cta.pc[mask.argmax()])
            except Fault as fault:
                raise SimulationError(f"{self.where(cta, pc, active)}: {fault}") from None
        if self.trace:
            last = code[min(pc, len(code) - 1)].instruction.line
            self.trace(f"{self.steps:7} {self.where(cta, begin, mask)} .. PTX {last}")

    def control(self, cta: Cta, compiled: Any, mask: np.ndarray, active: np.ndarray, pc: int) -> bool:
        """Calls, returns, exits and meetings. True: the burst is over."""
        cta.pc[mask & ~active] = pc + 1
        cta.pc[active] = pc
        if compiled.visible:
            cta.progress[active], self.idle = True, 0
        if compiled.kind == "call":
            index = compiled.run(cta, active).index
            cta.registers[index] = np.where(active, np.uint64(pc + 1), cta.registers[index])
            cta.pc[active] = compiled.target
        elif compiled.kind == "return":
            cta.pc[active] = cta.registers[compiled.run(cta, active).index][active]
            return len(np.unique(cta.pc[active])) > 1 or active is not mask
        elif compiled.kind == "exit":
            cta.leave(active)
            self.finish(cta)
            return True
        elif compiled.kind == "wait":
            return compiled.run(cta, active) or active is not mask
        elif compiled.kind == "barrier":
            cta.arrive(active, compiled.meeting(cta))
            return True
        else:
            return self.meet_warp(cta, compiled, active, pc) or active is not mask
        return active is not mask

    def meet_warp(self, cta: Cta, compiled: Any, active: np.ndarray, pc: int) -> bool:
        """Executes a warp instruction for the warps whose lanes are all here. True: somebody has to wait."""
        named = np.where(active, compiled.meeting(cta), np.uint32(0)).reshape(-1, 32).max(1)  # by those who are here
        members = np.repeat(named, 32) >> cta.special["%laneid"] & 1 != 0
        if not members[active].all():
            raise Fault("a lane executes a warp instruction whose member mask leaves it out")
        here = cta.live & (cta.pc == pc)
        expected = cta.live & members
        complete = ((here & expected) == expected).reshape(-1, 32).all(1) & active.reshape(-1, 32).any(1)
        goes = here & np.repeat(complete, 32)
        cta.blocked[active & ~goes] = WARP
        if not goes.any():
            return True
        cta.blocked[goes] = FREE
        cta.parked[goes], cta.progress[goes] = -1, True
        compiled.run(cta, cta.everyone if goes.all() else goes)
        cta.pc[goes] = pc + 1
        return bool((goes != active).any())

    def finish(self, cta: Cta) -> None:
        """After lanes have left: the end of a CTA and of its grid publishes all that is theirs."""
        if cta.live.any():
            return
        grid = cta.grid
        place = self.ctas.index(cta)
        del self.ctas[place], self.weights[place]
        self.retired.append(cta)
        grid.left -= 1
        if grid.left == 0:
            for done in [done for done in self.retired if done.grid is grid]:
                for copy in done.inflight:
                    copy.step(self.rng, force=True)
                done.view.flush()
                self.retired.remove(done)
            self.space.ranks[grid.rank].flush()
            self.running[grid.rank] = None
            self.after[grid.rank]()
        self.space.clock.events += 1

    # --- memory and copies move by themselves -------------------------------------------------------------------------

    def land_one(self) -> bool:
        candidates = [(cta, copy) for cta in (*self.ctas, *self.retired) for copy in cta.inflight]
        if not candidates:
            return False
        preferred = [pair for pair in candidates if isinstance(pair[1], self.first)] if self.first else []
        cta, copy = self.rng.choice(preferred or candidates)
        try:
            if copy.step(self.rng):
                cta.inflight.remove(copy)
        except Fault as fault:
            raise SimulationError(f"{self.where(cta, copy.place, cta.live)}, when it landed: {fault}") from None
        return True

    def drain_one(self, only_strong: bool) -> bool:
        views = [*(cta.view for cta in (*self.ctas, *self.retired)), *self.space.ranks]
        candidates = [(view, store) for view in views for store in view.pending if store.strong or not only_strong]
        if candidates:
            view, store = self.rng.choice(candidates)
            view.publish(store)
        return bool(candidates)

    def nothing_ready(self) -> None:
        """Everybody waits: for a copy, a store, the host, or the clock."""
        if self.rng.random() < self.linger:
            self.space.clock.events += 1
            return
        chances = [self.land_one, lambda: self.drain_one(only_strong=True), self.host_moves]
        self.rng.shuffle(chances)
        if any(chance() for chance in chances):
            self.idle = 0
            return
        if self.stalled and (self.idle > self.stall_idle or all(self.stalls(cta) for cta in self.ctas)):
            self.stalled = None
            return
        self.idle += 1
        self.space.clock.events += 1  # all look again, and once that has not helped, time passes
        if self.idle > 3:
            self.space.clock.now += self.tick_ns
        waiting = [cta for cta in self.ctas if (cta.live & (cta.blocked == FREE)).any()]
        if not waiting or self.idle > MAX_IDLE:
            raise SimulationError(f"{'lost progress' if waiting else 'deadlock'}: {self.everywhere()}")

    def everywhere(self) -> str:
        return "; ".join(self.where(cta, int(pc), cta.live & (cta.pc == pc))
                         for cta in self.ctas for pc in np.unique(cta.pc[cta.live]))

    def where(self, cta: Cta, pc: int, mask: np.ndarray) -> str:
        instruction = cta.grid.program.code[min(pc, len(cta.grid.program.code) - 1)]
        warps = ",".join(map(str, cta.warps(mask))) if cta.num_warps <= 8 or len(cta.warps(mask)) < 8 else "many"
        return (f"{cta.grid.program.kernel} rank {cta.grid.rank} CTA {cta.index} warp {warps} lanes {int(mask.sum())} "
                f"at {instruction.source} (PTX {instruction.line}: {instruction.text})")
