// BARRIER: returns when every rank has come. One CTA of 32 threads. Moves one post to each peer. With the post of a
// push or a pull it is that operation without rows, by which ranks agree on what is new to them.
// ABORT: leaves for good on the host's behalf, also while another kernel of ours waits. One thread.
#include <cupyep/sync.cuh>

using namespace cupyep;

extern "C" __global__ void __launch_bounds__(32, 1) barrier(const __grid_constant__ BarrierParams p) {
  const u32 epoch = next_epoch(p.sync);
  begin(p.sync, p.post.operation, epoch);
  post(p.sync, p.post, epoch);
  end(p.sync, 1, epoch, wait_posts(p.sync, p.post.operation, epoch));
}

extern "C" __global__ void __launch_bounds__(1, 1) abort_peers(const __grid_constant__ AbortParams p) {
  const u32 epoch = next_epoch(p.sync);  // of the operation that runs, or comes next
  abort_all(p.sync, p.word | epoch, epoch);
}
