// VEGAS_OPS_CHECK=1: lengths, pages and indices that a call would clamp, skip or mask are errors. The same rules read
// them on either device before anything is launched; on a GPU the host waits for their verdict.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/status.h"

#ifdef __CUDACC__
#define VEGAS_HOST_DEVICE __host__ __device__
#else
#define VEGAS_HOST_DEVICE
#endif

namespace vegas_ops {

inline bool values_are_checked() {
  static const bool on = [] {
    const char* wanted = getenv("VEGAS_OPS_CHECK");
    return wanted && *wanted && strcmp(wanted, "0") != 0;
  }();
  return on;
}

enum class Value {
  kNone,
  kCuSeqlensQ,
  kRows,
  kSequsedK,
  kSeqlens,
  kDumpRows,
  kDumpLen,
  kTopkLength,
  kTailStart,
  kSlot,
  kToken,
  kK,
  kPage,
  kWorkspace,
};

struct Fault {
  Value value;
  int32_t request;  // or word of the workspace
  int32_t column;   // of a list or a table; -1 for one value per request
  int32_t got;
  int64_t low;  // what would have been right: [low, high]
  int64_t high;
};

// Whether `got` is outside [low, high], which then is described.
VEGAS_HOST_DEVICE inline bool is_fault(Fault* fault, Value value, int request, int column, int32_t got, int64_t low,
                                       int64_t high) {
  if (got >= low && got <= high) return false;
  *fault = {value, request, column, got, low, high};
  return true;
}

inline int report(const Fault& fault) {
  if (fault.value == Value::kWorkspace) {
    return fail(VEGAS_INVALID_ARGUMENT,
                "`workspace` must hold zeros where a call's CTAs exchange words, got %#x in word %d: zero it once, and "
                "use it for no other op, nor on two streams at a time",
                fault.got, fault.request);
  }
  struct Text {
    const char* name;
    const char* bound;
  };
  const Text text = [&]() -> Text {
    switch (fault.value) {
      case Value::kCuSeqlensQ:
        return {"cu_seqlens_q", "not below the entry before, not beyond the rows of `q`"};
      case Value::kRows:
        return {"cu_seqlens_q", "rows of a request, at most `max_seqlen_q`"};
      case Value::kSequsedK:
        return {"seqused_k", "within `block_table` and `max_seqlen_k`"};
      case Value::kSeqlens:
        return {"seqlens", "within `logits` and `block_table`"};
      case Value::kDumpRows:
        return {"dump_rows", "the bits of the first and the last row"};
      case Value::kDumpLen:
        return {"dump_len", "within `seqused_k`"};
      case Value::kTopkLength:
        return {"topk_length", "within `indices`"};
      case Value::kTailStart:
        return {"tail_start", "within `seqused_k`"};
      case Value::kSlot:
        return {"indices", "slots of the cache"};
      case Value::kToken:
        return {"indices", "tokens before the tail or the end"};
      case Value::kK:
        return {"k", "at most `max_k` of the candidates"};
      case Value::kPage:
        return {"block_table", "pages of the cache"};
      case Value::kWorkspace:
      case Value::kNone:
        break;
    }
    return {"", ""};
  }();
  if (fault.column < 0) {
    return fail(VEGAS_INVALID_ARGUMENT, "`%s` must be in [%lld, %lld] (%s), got %d for request %d", text.name,
                (long long)fault.low, (long long)fault.high, text.bound, fault.got, fault.request);
  }
  return fail(VEGAS_INVALID_ARGUMENT, "`%s` must be in [%lld, %lld] (%s), got %d in column %d of request %d", text.name,
              (long long)fault.low, (long long)fault.high, text.bound, fault.got, fault.column, fault.request);
}

// Values are numbered, the more fundamental first: `count()` of them, and `find(i, fault)` says whether one is wrong.
template <class Values>
int check_host_values(const Values& values) {
  Fault fault;
  const int64_t count = values.count();
  for (int64_t i = 0; i < count; ++i) {
    if (values.find(i, &fault)) return report(fault);
  }
  return VEGAS_OK;
}

template <class Params>
struct CudaCheck {
  using Function = int (*)(const Params&, void* stream);
};

// `cuda` is null in a build without CUDA kernels, whose calls for a GPU end elsewhere.
template <class Values, class Params>
int check_values(const Params& params, VegasDevice device, void* stream, typename CudaCheck<Params>::Function cuda) {
  if (!values_are_checked()) return VEGAS_OK;
  if (device == VEGAS_CPU) return check_host_values(Values{params});
  return cuda ? cuda(params, stream) : VEGAS_OK;
}

}  // namespace vegas_ops
