"""The PTX layer: every wrapper is the one instruction that it names, on the architectures that have it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from compile_helpers import inline_instructions, kernels, needs_nvrtc, ptx, sass

from cupyep.backends.cuda import jit
from cupyep.errors import CompileError

ROOT = jit.source_root()
HEADERS = sorted(path.stem for path in (ROOT / "cupyep" / "ptx").glob("*.cuh"))

# Call -> the instruction it must become. Arguments: s, t shared and g global memory, m a mbarrier, map a tensor map, n
# an int, u and w references to u32 and u64 variables, v a uint4. A call that returns something is assigned to `out`.
SM_80 = {
    "mbarrier_init(m, n)": "mbarrier.init.shared::cta.b64",
    "mbarrier_inval(m)": "mbarrier.inval.shared::cta.b64",
    "mbarrier_arrive(m)": "mbarrier.arrive.shared::cta.b64",
    "out = mbarrier_test_wait_parity(m, n)": "mbarrier.test_wait.parity.shared::cta.b64",
    "out = createpolicy_fractional_evict_first()": "createpolicy.fractional.L2::evict_first.b64",
    "out = createpolicy_fractional_evict_last()": "createpolicy.fractional.L2::evict_last.b64",
    **{
        f"out = ld_{order}_{scope}({var})": f"ld.{order}.{scope}.global.{kind}"
        for order in ("relaxed", "acquire")
        for scope in ("gpu", "sys")
        for var, kind in (("&u", "u32"), ("&w", "u64"))
    },
    **{
        f"st_{order}_{scope}({var}, n)": f"st.{order}.{scope}.global.{kind}"
        for order in ("relaxed", "release")
        for scope in ("gpu", "sys")
        for var, kind in (("&u", "u32"), ("&w", "u64"))
    },
    **{f"red_release_{scope}_add(&u, n)": f"red.release.{scope}.global.add.u32" for scope in ("gpu", "sys")},
    "out = atom_relaxed_gpu_add(&u, n)": "atom.relaxed.gpu.global.add.u32",
    **{f"out = atom_acq_rel_{scope}_add(&u, n)": f"atom.acq_rel.{scope}.global.add.u32" for scope in ("gpu", "sys")},
    **{
        f"out = atom_acq_rel_{scope}_cas({var}, n, 3)": f"atom.acq_rel.{scope}.global.cas.{kind}"
        for scope in ("gpu", "sys")
        for var, kind in (("&u", "b32"), ("&w", "b64"))
    },
    "out = atom_relaxed_gpu_cas(&u, n, 3)": "atom.relaxed.gpu.global.cas.b32",
    "out = atom_relaxed_gpu_cas(&w, n, 3)": "atom.relaxed.gpu.global.cas.b64",
    "out = ld_global_v4(g).w": "ld.global.L1::no_allocate.v4.u32",
    "st_global_v4(g, v)": "st.global.L1::no_allocate.v4.u32",
    "out = ld_shared_v4(s).w": "ld.shared.v4.u32",
    "st_shared_v4(s, v)": "st.shared.v4.u32",
    "cp_async_cg_16(s, g)": "cp.async.cg.shared.global 16",
    "cp_async_cg_16_l2_cache_hint(s, g, w)": "cp.async.cg.shared.global.L2::cache_hint",
    **{f"cp_async_ca<{size}>(s, g)": f"cp.async.ca.shared.global {size}" for size in (4, 8, 16)},
    "cp_async_commit_group()": "cp.async.commit_group",
    "cp_async_wait_group<3>()": "cp.async.wait_group 3",
    **{f"fence_acq_rel_{scope}()": f"fence.acq_rel.{scope}" for scope in ("cta", "gpu", "sys")},
    "bar_sync(n, 64)": "bar.sync",
    "bar_arrive(n, 64)": "bar.arrive",
    "bar_warp_sync()": "bar.warp.sync",
    "out = globaltimer()": "mov.u64 %globaltimer",
    "out = smid()": "mov.u32 %smid",
    "nanosleep(n)": "nanosleep.u32",
    "out = cvt_f32_f16(n)": "cvt.f32.f16",
    "out = cvt_rn_f16x2_f32(n, 3.0f)": "cvt.rn.f16x2.f32",
    "out = cvt_rn_bf16x2_f32(n, 3.0f)": "cvt.rn.bf16x2.f32",
}
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
COORDINATES = ["n", "1", "2", "3", "4"]
SM_90 = {
    "mbarrier_arrive_expect_tx(m, n)": "mbarrier.arrive.expect_tx.shared::cta.b64",
    "mbarrier_expect_tx(m, n)": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64",
    "out = mbarrier_try_wait_parity(m, n)": "mbarrier.try_wait.parity.shared::cta.b64",
    "cp_async_bulk_g2s(s, g, n, m)": LOAD,
    "cp_async_bulk_g2s_l2_cache_hint(s, g, n, m, w)": f"{LOAD}.L2::cache_hint",
    "cp_async_bulk_s2g(g, s, n)": STORE,
    "cp_async_bulk_s2g_l2_cache_hint(g, s, n, w)": f"{STORE}.L2::cache_hint",
    "cp_async_bulk_commit_group()": "cp.async.bulk.commit_group",
    "cp_async_bulk_wait_group<3>()": "cp.async.bulk.wait_group 3",
    "cp_async_bulk_wait_group_read<3>()": "cp.async.bulk.wait_group.read 3",
    "cp_async_bulk_prefetch_l2(g, n)": "cp.async.bulk.prefetch.L2.global",
    **{
        f"cp_reduce_async_bulk_s2g_{name}(g, s, n)": f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}"
        for name, op in (
            ("add_f32", "add.f32"),
            ("add_s32", "add.s32"),
            ("add_u32", "add.u32"),
            ("add_noftz_f16", "add.noftz.f16"),
            ("add_noftz_bf16", "add.noftz.bf16"),
        )
    },
    "prefetch_tensormap(&map)": "prefetch.tensormap",
    **{
        f"cp_async_bulk_tensor_{d}d_g2s(s, &map, {', '.join(COORDINATES[:d])}, m)": (
            f"cp.async.bulk.tensor.{d}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        )
        for d in range(1, 6)
    },
    **{
        f"cp_async_bulk_tensor_{d}d_s2g(&map, {', '.join(COORDINATES[:d])}, s)": (
            f"cp.async.bulk.tensor.{d}d.global.shared::cta.tile.bulk_group"
        )
        for d in range(1, 6)
    },
    "fence_proxy_async()": "fence.proxy.async",
    "fence_proxy_async_shared_cta()": "fence.proxy.async.shared::cta",
    "fence_proxy_async_global()": "fence.proxy.async.global",
    "fence_mbarrier_init_release_cluster()": "fence.mbarrier_init.release.cluster",
    "out = elect_sync()": "elect.sync",
    "out = cvt_rn_satfinite_e4m3x2_f32(n, 3.0f)": "cvt.rn.satfinite.e4m3x2.f32",
    "griddepcontrol_wait()": "griddepcontrol.wait",
    "griddepcontrol_launch_dependents()": "griddepcontrol.launch_dependents",
}


def program(calls: list[str]) -> str:
    """One kernel per call, call0, call1..., and every header."""
    body = """
extern "C" __global__ void call{i}(char* g, u32& u, u64& w, uint4 v, int n, const __grid_constant__ Map map, u64* r) {{
  __shared__ alignas(128) char s[1024]; __shared__ u64 m[1]; u64 out = 0;
  {call};
  if ({returns}) *r = out;
}}
"""
    includes = "".join(f"#include <cupyep/ptx/{name}.cuh>\n" for name in HEADERS)
    head = includes + "using namespace cupyep::ptx;\nstruct alignas(64) Map { char bytes[128]; };\n"
    return head + "".join(
        body.format(i=i, call=call, returns=int(call.startswith("out"))) for i, call in enumerate(calls)
    )


def function_name(call: str) -> str:
    return re.sub(r"^out = ", "", call).split("(")[0].split("<")[0]


def asm_statements(text: str) -> list[str]:
    """Every asm statement of a C++ text, up to its closing bracket."""
    text, found = re.sub(r"//.*", "", text), []
    for match in re.finditer(r"\basm\b[^(]*\(", text):
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        found.append(text[match.start() : end])
    return found


def unordered_asm(text: str) -> list[str]:
    """The asm statements that order memory accesses and do not tell the compiler so."""
    orders = r'"[^"]*(barrier|\bbar\.|fence|membar|acquire|release|acq_rel|relaxed|cp\.(reduce\.)?async|griddepcontrol)'
    return [
        asm
        for asm in asm_statements(text)
        if re.search(orders, asm) and not (re.match(r"asm\s+volatile", asm) and '"memory"' in asm)
    ]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_each_header_compiles_alone(arch: str) -> None:
    for name in HEADERS:
        jit.compile_source(f"{name}.cu", f"#include <cupyep/ptx/{name}.cuh>\n", arch)
    if arch != "sm_80":
        jit.compile_source("tma.cu", "#include <cupyep/tma.cuh>\n", arch)


@needs_nvrtc
@pytest.mark.parametrize("arch, table", [("sm_80", SM_80), ("sm_90", SM_80 | SM_90)])
def test_each_wrapper_is_the_instruction_it_names(arch: str, table: dict[str, str]) -> None:
    bodies = kernels(ptx(program(list(table)), arch))
    for i, (call, instruction) in enumerate(table.items()):
        got = inline_instructions(bodies[f"call{i}"])
        assert len(got) == 1, (call, got)
        opcode, *operand = instruction.split(" ")
        assert got[0].rstrip(";").split()[0] == opcode, (call, got)
        assert not operand or got[0].rstrip(";").endswith(operand[0]), (call, got)


@needs_nvrtc
@pytest.mark.parametrize("arch, table", [("sm_80", SM_80), ("sm_100", SM_80 | SM_90)])
def test_ptxas_accepts_every_wrapper(arch: str, table: dict[str, str]) -> None:
    _, log = jit.compile_source("all.cu", program(list(table)), arch)
    assert not re.search(r"\.cuh\(\d+\): warning", log), log


@needs_nvrtc
def test_older_targets_name_the_missing_wrapper() -> None:
    with pytest.raises(CompileError) as error:
        jit.compile_source("all.cu", program(list(SM_90)), "sm_80")
    for call in SM_90:
        assert f'"{function_name(call)}" is undefined' in error.value.log


def test_the_table_lists_every_wrapper() -> None:
    defined = set()
    for header in (ROOT / "cupyep" / "ptx").glob("*.cuh"):
        defined |= set(re.findall(r"^__device__ __forceinline__ \w+ (\w+)\(", header.read_text(), flags=re.MULTILINE))
    assert defined - {"smem_addr", "gmem_addr"} == {function_name(call) for call in SM_80 | SM_90}


def test_the_comment_above_each_wrapper_is_its_instruction() -> None:
    for header in (ROOT / "cupyep" / "ptx").glob("*.cuh"):
        pieces = re.split(r"^__device__ __forceinline__ ", header.read_text(), flags=re.MULTILINE)
        for before, after in pairwise(pieces):
            if statements := asm_statements(after):
                comment = re.findall(r"(?:^//.*\n)+(?:template.*\n)?\Z", before, flags=re.MULTILINE)[0]
                opcode = re.search(r'"(?:\{.*\n\s*")?([^\s";\\]+)', statements[0])
                assert opcode and comment.startswith(f"// {opcode[1]}"), (header.name, comment, statements[0])
                arch = re.search(r" (sm_\d+)\n", comment)
                assert arch, comment
                call = after.split("(")[0].split()[-1]
                assert (int(arch[1][3:]) >= 90) == (call in map(function_name, SM_90)), (call, arch[1])


def test_every_ordering_asm_has_a_memory_clobber() -> None:
    files = [path for path in ROOT.rglob("*") if path.suffix in (".cu", ".cuh")]
    opcodes = {instruction.split()[0] for instruction in (SM_80 | SM_90).values()}
    assert sum(len(asm_statements(path.read_text())) for path in files) >= len(opcodes)
    assert {path.name: bad for path in files if (bad := unordered_asm(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        'asm volatile("fence.acq_rel.sys;" ::);',
        'asm("bar.sync 0;" ::: "memory");',
        'asm volatile("{\\n\\t"\n "mbarrier.try_wait.b64 p, [%0];}" : "=r"(f(x)) : "r"(y));',
    ],
)
def test_the_clobber_check_sees_a_missing_one(text: str) -> None:
    assert unordered_asm(text) == [text[:-1]]


@needs_nvrtc
def test_machine_code() -> None:
    expected = {
        "cp_async_bulk_g2s(s, g, n, m)": "UBLKCP.S.G",
        "cp_async_bulk_s2g(g, s, n)": "UBLKCP.G.S",
        "cp_reduce_async_bulk_s2g_add_f32(g, s, n)": "UBLKRED.G.S.ADD.F32",
        "cp_async_bulk_tensor_2d_g2s(s, &map, n, 1, m)": "UTMALDG.2D",
        "cp_async_bulk_tensor_2d_s2g(&map, n, 1, s)": "UTMASTG.2D",
        "mbarrier_init(m, n)": "SYNCS.EXCH.64",
        "mbarrier_arrive_expect_tx(m, n)": "SYNCS.ARRIVE.TRANS64",
        "out = mbarrier_try_wait_parity(m, n)": "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "out = elect_sync()": "ELECT",
        "fence_proxy_async_shared_cta()": "FENCE.VIEW.ASYNC.S",
        "out = ld_acquire_sys(&u)": "LDG.E.STRONG.SYS",
        "st_release_sys(&u, n)": "MEMBAR.ALL.SYS",
        "cp_async_cg_16(s, g)": "LDGSTS.E.BYPASS.128",
        "cp_async_ca<8>(s, g)": "LDGSTS.E.64",
        "cp_async_commit_group()": "LDGDEPBAR",
        "cp_async_wait_group<3>()": "DEPBAR.LE SB0, 0x3",
        "st_shared_v4(s, ld_global_v4(g))": "LDG.E.NA.128",
        "st_global_v4(g, v)": "STG.E.NA.128",
    }
    code = sass(jit.compile_source("sass.cu", program(list(expected)), "sm_90")[0])
    for i, (call, mnemonic) in enumerate(expected.items()):
        assert mnemonic in code[f"call{i}"], (call, code[f"call{i}"])
    assert not [name for name, text in code.items() if re.search(r"LDG\S*\.CONSTANT|\bLDL\b|\bSTL\b", text)]


@needs_nvrtc
def test_the_example_of_tma_cuh_compiles() -> None:
    text = (ROOT / "cupyep" / "tma.cuh").read_text()
    example = "\n".join(re.findall(r"^//   (.*)$", text, flags=re.MULTILINE))
    assert "tma_load_1d" in example and "tma_store_wait<0>" in example
    source = (
        "#include <cupyep/tma.cuh>\nusing namespace cupyep::tma;\n"
        "__device__ void change(unsigned char* row) { row[threadIdx.x] += 1; }\n"
        'extern "C" __global__ void example(unsigned char* dst, const unsigned char* src, unsigned num_rows) {\n'
        f"{example}\n}}\n"
    )
    cubin, log = jit.compile_source("example.cu", source, "sm_90")
    assert "warning" not in log
    assert [sass(cubin)["example"].count(name) for name in ("UBLKCP.S.G", "UBLKCP.G.S")] == [1, 1]
