"""Instructions that others notice: here loads and stores, atomics and fences; the others are in meetings.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxsim import meetings
from ptxsim.instructions import DTYPES, Compiled, Operands, Run, address_of, arithmetic, lanes_of
from ptxsim.memory import DEPTH, GLOBAL, PARAM, SHARED, Fault, Store
from ptxsim.parser import Instruction, Program
from ptxsim.state import Cta

ORDERS = ("relaxed", "acquire", "release", "acq_rel", "volatile")


def compile_program(program: Program) -> list[Compiled]:
    """The code as closures, index by index."""
    return [_compile(program, instruction) for instruction in program.code]


def _compile(program: Program, instruction: Instruction) -> Compiled:
    op, operands = instruction.opcode, instruction.operands
    use, name = Operands(program), op[0]
    if run := arithmetic(program, instruction):
        return Compiled("plain", run, instruction)
    kinds = {"bra": "branch", "call": "call", "return": "return", "ret": "exit", "exit": "exit"}
    if name in kinds:
        register = operands[0] if name in ("call", "return") else None
        return Compiled(kinds[name], lambda cta, mask: register, instruction, visible=name in ("ret", "exit"))
    if name == "bar" and op[1] != "warp":
        return meetings.barrier(use, op, operands, instruction)
    if op[:3] in (["cp", "async", "wait_group"], ["cp", "async", "wait_all"]):
        return meetings.lane_wait(op, operands, instruction)
    if name in ("bar", "vote", "shfl", "elect", "match"):
        makers = {"bar": meetings.warp_barrier, "vote": meetings.vote, "shfl": meetings.shuffle,
                  "match": meetings.match, "elect": meetings.elect}
        member = use.get(operands[-1], "b32")
        return Compiled("warp", makers[name](use, op, operands), instruction, True, member)
    makers = {"ld": _load, "st": _store, "atom": _atomic, "red": _atomic, "fence": _fence, "membar": _fence,
              "mbarrier": meetings.mbarrier, "cp": meetings.copy}
    if name in makers:
        poll = (name == "ld" and any(order in op for order in ORDERS)) or op[:2] in (
            ["mbarrier", "try_wait"], ["mbarrier", "test_wait"])
        private = name == "ld" and "param" in op
        run = makers[name](use, op, operands)
        return Compiled("plain", run, instruction, not private, poll=poll, reads=name == "ld")
    if name in ("nanosleep", "prefetch", "griddepcontrol"):
        return Compiled("plain", lambda cta, mask: None, instruction, True)
    if name == "createpolicy":
        put = use.put(operands[0])
        return Compiled("plain", lambda cta, mask: put(cta, mask, np.uint64(0)), instruction)
    raise NotImplementedError(f"PTX line {instruction.line}: {instruction.text}")


# --- loads and stores -------------------------------------------------------------------------------------------------


def _space(op: list[str]) -> str:
    """The space that an access names; "" for a generic one."""
    spaces = [part.split("::")[0] for part in op]
    return next((space for space in ("global", "shared", "param") if space in spaces), "")


def _by_space(space: str, mask: np.ndarray, address: np.ndarray) -> list[tuple[str, np.ndarray, Any]]:
    """(space, lanes, addresses in it) of an access: generic ones go where their window says."""
    if space:
        return [(space, mask, address)]
    windows, found = address >> np.uint64(40), []
    for name, base in (("global", GLOBAL), ("shared", SHARED), ("param", PARAM)):
        here = windows == base >> 40
        if here.any():
            lanes = mask.copy()
            lanes[mask] = here
            found.append((name, lanes, address[here] - np.uint64(0 if name == "global" else base)))
    if sum(len(part[2]) for part in found) < len(address):
        raise Fault(f"generic access to {int(address[0]):#x}, which is no address")
    return found


def _order(op: list[str]) -> tuple[str, str]:
    order = next((part for part in op if part in ORDERS), "")
    scope = next((part for part in op if part in DEPTH), "sys" if order == "volatile" else "gpu")
    return ("relaxed" if order == "volatile" else order), scope


def _load(use: Operands, op: list[str], operands: list[Any]) -> Run:
    dtype, (order, scope) = DTYPES[op[-1]], _order(op)
    targets = operands[0] if isinstance(operands[0], list) else [operands[0]]
    puts, address, count = [use.put(target) for target in targets], address_of(use, operands[1]), len(targets)
    unsigned, width, named = np.dtype(f"u{dtype.itemsize}"), dtype.itemsize, _space(op)

    def run(cta: Cta, mask: np.ndarray) -> None:
        for space, lanes, at in _by_space(named, mask, address(cta, mask)):
            if space == "param":
                index = at.astype(np.int64) // width
                values = cta.grid.params.view(unsigned)[index[:, None] + np.arange(count) if count > 1 else index]
            elif space == "shared":
                index = cta.shared_index(at, width, count)
                cta.note_access(lanes, index, width, write=False)
                values = cta.words[width][index]
            else:
                index = cta.space.index(at, width, count)
                if order:
                    values = cta.view.current(index, width, DEPTH[scope])
                    if order == "acquire":
                        cta.view.refresh(scope)
                    cta.poll(lanes, values)
                else:
                    values = cta.view.words[width][index]
            values = values.reshape(len(at), count)
            for i, put in enumerate(puts):
                full = np.zeros(cta.num_lanes, unsigned)
                full[lanes] = values[:, i]
                put(cta, lanes, full.view(dtype))

    return run


def _store(use: Operands, op: list[str], operands: list[Any]) -> Run:
    dtype, (order, scope) = DTYPES[op[-1]], _order(op)
    sources = operands[1] if isinstance(operands[1], list) else [operands[1]]
    gets, address, count = [use.get(source, op[-1]) for source in sources], address_of(use, operands[0]), len(sources)
    unsigned, width, named = np.dtype(f"u{dtype.itemsize}"), dtype.itemsize, _space(op)

    def run(cta: Cta, mask: np.ndarray) -> None:
        for space, lanes, at in _by_space(named, mask, address(cta, mask)):
            values = np.stack([lanes_of(cta, get(cta), lanes) for get in gets], 1).view(unsigned)
            values = values if count > 1 else values[:, 0]
            if space == "shared":
                index = cta.shared_index(at, width, count)
                cta.note_access(lanes, index, width, write=True)
                cta.words[width][index] = values
            elif space == "global":
                if order == "release":
                    cta.release(lanes, scope)
                _store_global(cta, lanes, cta.space.index(at, width, count), values, width, bool(order))
            else:
                raise Fault("store to the parameters")

    return run


def _store_global(cta: Cta, mask: np.ndarray, index: np.ndarray, values: np.ndarray, width: int, strong: bool) -> None:
    """Strong stores become visible one by one, weak ones by warp."""
    lanes = np.flatnonzero(mask)
    keys = lanes if strong else lanes // 32
    for key in np.unique(keys):
        part, warp = keys == key, int(lanes[keys == key][0]) // 32
        cta.view.store(Store(index[part], values[part], width, warp, cta.tick(warp), strong))


def _atomic(use: Operands, op: list[str], operands: list[Any]) -> Run:
    dtype, (order, scope) = DTYPES[op[-1]], _order(op)
    if op[0] == "red":
        operands = ["_", *operands]
    put, address, kind = use.put(operands[0]), address_of(use, operands[1]), op[-2 if op[-2] != "noftz" else -3]
    gets, width, named = [use.get(operand, op[-1]) for operand in operands[2:]], dtype.itemsize, _space(op)

    def change(old: Any, b: Any, c: Any) -> Any:
        with np.errstate(over="ignore"):
            return {"add": lambda: old + b, "cas": lambda: c if old == b else old, "exch": lambda: b,
                    "max": lambda: max(old, b), "min": lambda: min(old, b), "or": lambda: old | b,
                    "and": lambda: old & b}[kind]()

    def run(cta: Cta, mask: np.ndarray) -> None:
        (space, lanes, at), = _by_space(named, mask, address(cta, mask))
        if order in ("release", "acq_rel") and space == "global":
            cta.release(lanes, scope)
        olds = np.zeros(cta.num_lanes, dtype)
        index = cta.shared_index(at, width) if space == "shared" else cta.space.index(at, width)
        if space == "shared":
            cta.note_access(lanes, index, width, write=True)
        arguments = [np.broadcast_to(get(cta), mask.shape) for get in gets]
        for lane, place in zip(np.flatnonzero(lanes), index, strict=True):
            one = np.array([place])
            views = [cta.view, cta.view.parent, cta.space.system][: DEPTH[scope] + 1]
            old = (cta.words[width][one] if space == "shared" else cta.view.current(one, width, DEPTH[scope]))
            olds[lane] = old.view(dtype)[0]
            new = np.array([change(olds[lane], arguments[0][lane], arguments[-1][lane])], dtype).view(f"u{width}")
            if space == "shared":
                cta.words[width][one] = new
                continue
            for view in views[:-1]:
                view.words[width][one] = new  # type: ignore[union-attr]
            views[-1].store(Store(one, new, width, 0, 0, True))  # type: ignore[union-attr]
            cta.clock.events += 1
        if order in ("acquire", "acq_rel") and space == "global":
            cta.view.refresh(scope)
        put(cta, lanes, olds)

    return run


def _fence(use: Operands, op: list[str], operands: list[Any]) -> Run:
    if op[1:3] == ["proxy", "async"]:
        where = op[3] if len(op) > 3 else "all"

        def proxy(cta: Cta, mask: np.ndarray) -> None:
            if where != "global":
                cta.proxy_fence(mask)
            if not where.startswith("shared"):
                cta.proxy = cta.view.bytes.copy()

        return proxy
    if op[1] == "mbarrier_init":

        def mbarrier_init(cta: Cta, mask: np.ndarray) -> None:
            warps = cta.warps(mask)
            for mbarrier in cta.mbarriers.values():
                mbarrier.fenced |= mbarrier.init_warp in warps

        return mbarrier_init
    scope = {"cta": "cta", "gl": "gpu", "gpu": "gpu", "sys": "sys"}[op[-1]]

    def fence(cta: Cta, mask: np.ndarray) -> None:
        cta.release(mask, scope)
        cta.view.refresh(scope)

    return fence
