#pragma once
// Types and address conversions that the PTX wrappers share.
//
// The wrappers of this folder are one instruction each, named after the opcode with its qualifiers in PTX order and
// with the operands in PTX order. Above each stands its PTX line and the first architecture that has it. Wrappers take
// plain (generic) pointers and convert them to the instruction's state space here. What an instruction orders, and with
// whom it pairs, is said where it is used. Instructions that need sm_90 do not exist for older targets: using one there
// is a compile error that names it.

namespace cupyep::ptx {

using u32 = unsigned int;
using u64 = unsigned long long;

// The 32-bit address in the CTA's shared window of a pointer into shared memory.
__device__ __forceinline__ u32 smem_addr(const void* ptr) { return static_cast<u32>(__cvta_generic_to_shared(ptr)); }

// The address in the global window of a pointer to device memory, a peer's memory or pinned host memory.
__device__ __forceinline__ u64 gmem_addr(const void* ptr) { return static_cast<u64>(__cvta_generic_to_global(ptr)); }

}  // namespace cupyep::ptx
