// How the copy engine (TMA) sees a paged cache.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/arch/copy_sm90_desc.hpp>

namespace vegas_ops::hopper {

// Boxes of `box` tokens by 128 bytes (64 of a shorter row) of one KV head and page. A box divides a
// page and a tile of keys; box 0: pages or strides allow none, and every tile is gathered.
struct alignas(64) CacheBoxes {
  cute::TmaDescriptor k;
  cute::TmaDescriptor v;
  int box;
  int box_log2;
  cutlass::FastDivmod page_size;
};

}  // namespace vegas_ops::hopper
