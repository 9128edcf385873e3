// Refuses outputs that share memory with one another, with themselves or with what the call reads: other threads
// would still be reading there.
#pragma once

#include <stdint.h>

#include <initializer_list>

#include "common/status.h"

namespace vegas_ops {

// The bytes of a strided argument.
class Span {
 public:
  struct Dim {
    int64_t size;
    int64_t stride;  // elements
  };

  // Of nothing where the argument is absent or holds no element. The last dimension is contiguous and `last` wide.
  Span(const char* name, const void* data, int64_t element_bytes, int64_t last, std::initializer_list<Dim> dims = {})
      : name_(name), begin_(reinterpret_cast<uint64_t>(data)) {
    row_ = extent_ = data ? last * element_bytes : 0;
    for (const Dim& dim : dims) {
      if (dim.size <= 0) extent_ = 0;
    }
    if (extent_ <= 0) {
      extent_ = row_ = 0;
      return;
    }
    // From the innermost dimension outwards, whatever their order in memory.
    int64_t below = -1;
    for (size_t n = 0; n < dims.size(); ++n) {
      const Dim* next = nullptr;
      for (const Dim& dim : dims) {
        const bool later = dim.stride > below && dim.size > 1;
        if (later && (!next || dim.stride < next->stride)) next = &dim;
      }
      if (!next) break;
      for (const Dim& dim : dims) {  // two dimensions of one stride
        if (&dim != next && dim.size > 1 && dim.stride == next->stride) repeats_ = true;
      }
      below = next->stride;
      const int64_t pitch = next->stride * element_bytes;
      if (pitch < extent_) repeats_ = true;
      row_ = extent_;
      pitch_ = pitch;
      extent_ += (next->size - 1) * pitch;
    }
  }

  const char* name() const { return name_; }
  bool repeats() const { return repeats_; }

  // Whether an element of one can lie in an element of the other. Views that take turns within rows of equal
  // pitch, such as the halves of a fused projection, do not meet.
  bool meets(const Span& other) const {
    if (extent_ == 0 || other.extent_ == 0) return false;
    if (begin_ + extent_ <= other.begin_ || other.begin_ + other.extent_ <= begin_) return false;
    if (pitch_ == 0 || pitch_ != other.pitch_) return true;
    const int64_t distance = static_cast<int64_t>(other.begin_ - begin_) % pitch_;
    const int64_t offset = distance < 0 ? distance + pitch_ : distance;
    return offset < row_ || offset + other.row_ > pitch_;
  }

 private:
  const char* name_;
  uint64_t begin_;
  int64_t extent_;     // bytes from the first to behind the last element
  int64_t row_;        // the same without the outermost dimension
  int64_t pitch_ = 0;  // bytes between its entries; 0 where there is one
  bool repeats_ = false;
};

inline int check_overlap(std::initializer_list<Span> outputs, std::initializer_list<Span> inputs) {
  for (const Span* output = outputs.begin(); output != outputs.end(); ++output) {
    VEGAS_CHECK(!output->repeats(), "`%s` must have memory of its own for every element, got strides that repeat",
                output->name());
    for (const Span* other = output + 1; other != outputs.end(); ++other) {
      VEGAS_CHECK(!output->meets(*other), "`%s` must not overlap `%s`, got memory that they share", output->name(),
                  other->name());
    }
    for (const Span& input : inputs) {
      VEGAS_CHECK(!output->meets(input), "`%s` must not overlap `%s`, got memory that they share", output->name(),
                  input.name());
    }
  }
  return VEGAS_OK;
}

inline int64_t element_bytes(VegasDtype dtype) { return dtype == VEGAS_FLOAT32 ? 4 : dtype == VEGAS_FP8_E4M3 ? 1 : 2; }

}  // namespace vegas_ops
