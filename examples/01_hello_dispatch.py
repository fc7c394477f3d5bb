"""Each rank sends three tokens to the experts, which multiply them by their own number; the products come back summed.

Four ranks as threads:    python examples/01_hello_dispatch.py
Four ranks as processes:  mpiexec -n 4 python -m mpi4py examples/01_hello_dispatch.py
"""

import numpy as np

import cupyep


def main(comm):
    with cupyep.Buffer(comm, backend="numpy") as buffer:
        rank, num_experts = buffer.rank, 2 * buffer.size  # experts 2r and 2r + 1 live on rank r
        x = np.full((3, 8), rank + 1, np.float32)  # [num_tokens, hidden]
        here, there = 2 * rank, (2 * rank + 3) % num_experts
        topk_idx = np.array([[here, here + 1], [here, there], [-1, -1]])  # top-2 experts of each token; -1: none

        recv_x, recv_idx, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=num_experts)

        # The same on every rank: recv_idx counts its own experts from 0 and has -1 for those that live elsewhere.
        factors = np.where(recv_idx >= 0, 2 * rank + recv_idx, 0).sum(1, keepdims=True)
        combined_x = buffer.combine((recv_x * factors).astype(x.dtype), handle).combined_x

        expected = x * np.maximum(topk_idx, 0).sum(1, keepdims=True)
        if not np.array_equal(combined_x, expected):
            raise SystemExit(f"rank {rank}: expected\n{expected}, got\n{combined_x}")
        if rank == 0:
            print(f"rank 0 of {buffer.size} got {len(recv_x)} rows; its tokens came back as\n{combined_x}")


if __name__ == "__main__":
    if cupyep.env.launched_by_mpi():
        main(None)  # None: MPI.COMM_WORLD
    else:
        cupyep.run_local(main, num_ranks=4)
