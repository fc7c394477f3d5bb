"""PTX text to a Program: one list of instructions over all functions, with operands and labels resolved.

A function's registers are unique to it, so a call is two jumps: the arguments are moved into the callee's parameter
registers, and the place to return to is a register as well. That is enough, as nothing in the kernels recurses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}


class Register(NamedTuple):
    index: int


class Symbol(NamedTuple):
    """A shared variable or the kernel's parameter block, by name."""

    name: str


class Memory(NamedTuple):
    """[base + offset]; the base is a Register, a Symbol or an immediate."""

    base: Any
    offset: int


Immediate = str  # as written; its type comes from the instruction


@dataclass
class Instruction:
    opcode: list[str]  # split at the dots
    operands: list[Any]  # Register, Symbol, Memory, Immediate, or a list of them for {a, b}
    guard: tuple[int, bool] | None  # predicate register, negated
    line: int  # of the PTX
    source: str  # "file:line" of the CUDA source
    text: str
    target: int = -1  # of bra and call: an index into the code


@dataclass
class Program:
    """A kernel with the functions it calls."""

    kernel: str
    code: list[Instruction] = field(default_factory=list)
    entry: int = 0
    register_bytes: list[int] = field(default_factory=list)  # 0: a predicate
    shared: dict[str, int] = field(default_factory=dict)  # offset of each static variable
    static_bytes: int = 0
    dynamic: set[str] = field(default_factory=set)  # names of the extern array
    param_bytes: int = 0
    params: dict[str, int] = field(default_factory=dict)  # offset of each
    moved_params: set[int] = field(default_factory=set)  # registers that stand for a function's .param variables


_FUNCTION = re.compile(r"\.(entry|func)\s*(?:\(([^)]*)\))?\s*([$\w]+)\s*(?:\(([^)]*)\))?([^{;]*)([{;])")
_TOKEN = re.compile(r"\s*(?:(?P<loc>\.loc[^\n]*)\n|(?P<open>\{)|(?P<close>\})|(?P<label>[$\w]+):|(?P<text>[^;{}]"
                    r"(?:[^;\"]|\"[^\"]*\")*);)")
_VARIABLE = re.compile(r"(?:\.align (\d+) )?\.([a-z]\d+) ([$\w]+)(?:\[(\d*)\])?")


def parse(ptx: str, kernel: str) -> Program:
    """The program of `kernel` in a PTX text. Raises ValueError where the text is none we can read."""
    files = {number: path.rsplit("/", 1)[-1] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx)}
    text = re.sub(r"//[^\n]*", "", ptx)
    program = Program(kernel, dynamic=set(re.findall(r"\.extern \.shared [^;]*\.b8 (\w+)\[\]", text)))
    bodies, position = [], 0
    while match := _FUNCTION.search(text, position):
        position = match.end()
        if match[6] == "{":
            end = _closing(text, match.end())
            if match[1] == "func" or match[3] == kernel:
                bodies.append((match, end))
            position = end
    builders = {match[3]: _Function(program, match, text, end, files) for match, end in bodies}
    if kernel not in builders:
        raise ValueError(f"kernel: no entry {kernel} in the PTX")
    for builder in builders.values():
        builder.read(builders)
    for builder in builders.values():
        builder.resolve(builders)
    program.entry = builders[kernel].start
    return program


def _closing(text: str, position: int) -> int:
    depth = 1
    while depth:
        position = re.compile(r"[{}]").search(text, position).end()  # type: ignore[union-attr]
        depth += 1 if text[position - 1] == "{" else -1
    return position


class _Function:
    """One function or entry: its scopes of names while it is read, its labels, its parameters."""

    def __init__(self, program: Program, match: re.Match, text: str, end: int, files: dict[str, str]) -> None:
        self.program, self.text, self.files = program, text, files
        self.begin, self.end = match.end(), end - 1
        self.is_entry = match[1] == "entry"
        self.scopes: list[dict[str, Any]] = [{}]
        self.labels: dict[str, int] = {}
        self.pending: list[tuple[Instruction, str, dict[str, Any]]] = []
        self.results = [self.parameter(text) for text in (match[2] or "").split(",") if text.strip()]
        kind = self.entry_parameter if self.is_entry else self.parameter
        self.parameters = [kind(text) for text in (match[4] or "").split(",") if text.strip()]
        self.return_register = self.new("return", 8)

    def new(self, name: str, num_bytes: int) -> Register:
        self.program.register_bytes.append(num_bytes)
        register = Register(len(self.program.register_bytes) - 1)
        self.scopes[-1][name] = register
        return register

    def entry_parameter(self, text: str) -> Symbol:
        """A kernel's parameter: memory, one behind the other."""
        match = _VARIABLE.search(text)
        if match is None:
            raise ValueError(f"parameter: cannot read {text!r}")
        num_bytes = SIZES[match[2][1:]] * int(match[4] or 1)
        alignment = int(match[1] or num_bytes)
        offset = -(-self.program.param_bytes // alignment) * alignment
        self.program.params[match[3]] = offset
        self.program.param_bytes = offset + num_bytes
        return Symbol(match[3])

    def parameter(self, text: str) -> Register:
        """A function's parameter, or an argument of a call."""
        match = _VARIABLE.search(text)
        if match is None:
            raise ValueError(f"parameter: cannot read {text!r}")
        register = self.new(match[3], SIZES[match[2][1:]])
        self.program.moved_params.add(register.index)
        return register

    def read(self, functions: dict[str, _Function]) -> None:
        self.start, source, position = len(self.program.code), "?", self.begin
        line, counted = 1, 0  # the line of the last statement, and up to where line feeds are counted
        while position < self.end and (match := _TOKEN.match(self.text, position, self.end)):
            position = match.end()
            if match["loc"]:
                fields = match["loc"].split()
                if fields[2] != "0":
                    source = f"{self.files.get(fields[1], '?')}:{fields[2]}"
            elif match["open"]:
                self.scopes.append({})
            elif match["close"]:
                self.scopes.pop()
            elif match["label"]:
                self.labels[match["label"]] = len(self.program.code)
            else:
                line += self.text.count("\n", counted, counted := match.start("text"))
                self.statement(" ".join(match["text"].split()), line, source, functions)
        if self.text[position:self.end].strip():
            raise ValueError(f"PTX: cannot read {self.text[position:position + 80]!r}")

    def statement(self, text: str, line: int, source: str, functions: dict[str, _Function]) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(maxsplit=2)
            num_bytes = 0 if kind == ".pred" else SIZES[kind[2:]]
            for name in names.split(","):
                ranged = re.fullmatch(r"(%?\w+)<(\d+)>", name.strip())
                for full in [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name.strip()]:
                    self.new(full, num_bytes)
        elif text.startswith(".param"):
            self.parameter(text)
        elif text.startswith(".shared"):
            match = _VARIABLE.search(text)
            assert match is not None
            alignment, num_bytes = int(match[1] or 1), SIZES[match[2][1:]] * int(match[4] or 1)
            offset = -(-self.program.static_bytes // alignment) * alignment
            self.program.shared[match[3]] = offset
            self.program.static_bytes = offset + num_bytes
        elif not text.startswith("."):
            self.instruction(text, line, source, functions)

    def instruction(self, text: str, line: int, source: str, functions: dict[str, _Function]) -> None:
        guard, body = None, text
        if match := re.match(r"@(!?)(%?[\w$]+)\s+", text):
            guard, body = (self.name(match[2]).index, match[1] == "!"), text[match.end():]
        opcode, _, rest = body.partition(" ")
        parts = opcode.split(".")
        if parts[0] == "call":
            self.call(rest, line, source, functions)
        elif parts[0] == "bra":
            self.add(Instruction(parts, [rest.strip()], guard, line, source, text))
        else:
            if parts[0] == "ret" and not self.is_entry:
                parts, rest = ["return"], ""
            operands = [self.operand(part) for part in re.findall(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,]+)", rest)]
            if parts[0] == "return":
                operands = [self.return_register]
            self.add(Instruction(parts, operands, guard, line, source, text))

    def call(self, rest: str, line: int, source: str, functions: dict[str, _Function]) -> None:
        match = re.fullmatch(r"(?:\(([^)]*)\), )?([$\w]+)(?:, \(([^)]*)\))?", rest.strip())
        if match is None:
            raise ValueError(f"call: cannot read {rest!r}")
        callee = functions[match[2]]

        def move(to: Register, of: Register) -> None:
            size = f"b{8 * self.program.register_bytes[to.index]}"
            self.add(Instruction(["mov", size], [to, of], None, line, source, f"argument of {match[2]}"))

        names = [self.name(name.strip()) for name in (match[3] or "").split(",") if name.strip()]
        for to, of in zip(callee.parameters, names, strict=True):
            move(to, of)
        self.add(Instruction(["call"], [callee.return_register, match[2]], None, line, source, f"call {match[2]}"))
        results = [self.name(name.strip()) for name in (match[1] or "").split(",") if name.strip()]
        for to, of in zip(results, callee.results, strict=True):
            move(to, of)

    def add(self, instruction: Instruction) -> None:
        self.program.code.append(instruction)

    def name(self, name: str) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise ValueError(f"PTX: unknown name {name}")

    def operand(self, text: str) -> Any:
        text = text.strip()
        if text[0] == "{":
            return [self.operand(part) for part in text[1:-1].split(",")]
        if text[0] == "[":
            if "{" in text:  # a tensor map and coordinates
                base, _, coordinates = text[1:-1].partition(",")
                return [self.operand(f"[{base}]"), self.operand(coordinates)]
            base, _, offset = text[1:-1].partition("+")
            return Memory(self.operand(base), int(offset or "0", 0))
        if "|" in text:
            return [self.operand(part) for part in text.split("|")]
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text in self.program.shared or text in self.program.dynamic or text in self.program.params:
            return Symbol(text)
        if re.fullmatch(r"-?\d[\w.]*|%[a-z_]+(\.[xyz])?|_", text):
            return text
        raise ValueError(f"PTX: unknown operand {text}")

    def resolve(self, functions: dict[str, _Function]) -> None:
        for instruction in self.program.code:
            if instruction.opcode[0] == "call":
                instruction.target = functions[instruction.operands[1]].start
            elif instruction.opcode[0] == "bra" and instruction.operands[0] in self.labels:
                instruction.target = self.labels[instruction.operands[0]]
