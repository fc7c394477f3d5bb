// BARRIERS: kNumBarriers BARRIERs in one launch, so that their time can be had without that of launching. One CTA of 32
// threads. Moves one post to each peer for every barrier.
#include <cupyep/sync.cuh>

using namespace cupyep;

extern "C" __global__ void __launch_bounds__(32, 1) barriers(const __grid_constant__ BarrierParams p) {
  for (u32 i = 0; i < cfg::kNumBarriers; ++i) {
    const u32 epoch = next_epoch(p.sync);
    begin(p.sync, p.post.operation, epoch);
    post(p.sync, p.post, epoch);
    const u32 verdict = wait_posts(p.sync, p.post.operation, epoch);
    end(p.sync, 1, epoch, verdict);
    __syncthreads();  // the next one's epoch and busy bit are looked at after this one's were written
    if (verdict != cfg::kVerdictDone) return;
  }
}
