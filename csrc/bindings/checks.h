// Checks of tensors: each error names the argument and ends in std::invalid_argument.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "vegas_ops/params.h"

namespace vegas_ops::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Double:
      return "float64";
    default:
      return "another dtype";
  }
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream s;
  s << "(";
  for (int64_t i = 0; i < t.dim(); ++i) s << (i ? ", " : "") << t.size(i);
  s << (t.dim() == 1 ? ",)" : ")");
  return s.str();
}

inline std::string device_of(bool cuda, int64_t index) { return cuda ? "cuda:" + std::to_string(index) : "cpu"; }

constexpr int64_t kAny = -1;

// Where all tensors of a call must be: on the query's (or the logits') device.
struct Place {
  explicit Place(const Tensor& t) : cuda(t.is_cuda()), index(t.is_cuda() ? t.get_device_index() : 0) {}
  VegasDevice device() const { return cuda ? VEGAS_CUDA : VEGAS_CPU; }

  void check(const Tensor& t, const char* name) const {
    int64_t other = t.is_cuda() ? t.get_device_index() : 0;
    if (t.is_cuda() != cuda || other != index) {
      refuse("`", name, "` must be on ", device_of(cuda, index), " like the first argument, got ",
             t.is_cuda() || t.is_cpu() ? device_of(t.is_cuda(), other) : "another device");
    }
  }

  bool cuda;
  int64_t index;
};

inline void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t size : shape) {
    same = same && (size == kAny || t.size(i) == size);
    ++i;
  }
  if (same) return;
  std::ostringstream wanted;
  wanted << "(";
  i = 0;
  for (int64_t size : shape) {
    if (i++) wanted << ", ";
    if (size == kAny)
      wanted << "any";
    else
      wanted << size;
  }
  refuse("`", name, "` must have shape ", wanted.str(), shape.size() == 1 ? ",)" : ")", ", got ", shape_of(t));
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType type) {
  if (t.scalar_type() != type) {
    refuse("`", name, "` must be ", dtype_name(type), ", got ", dtype_name(t.scalar_type()));
  }
}

inline void check_last_dim_contiguous(const Tensor& t, const char* name) {
  int64_t last = t.dim() - 1;
  if (t.size(last) > 1 && t.stride(last) != 1) {
    refuse("`", name, "` must have a contiguous last dimension, got stride ", t.stride(last));
  }
}

inline void check_contiguous(const Tensor& t, const char* name) {
  if (t.is_contiguous()) return;
  std::ostringstream strides;
  for (int64_t i = 0; i < t.dim(); ++i) strides << (i ? ", " : "") << t.stride(i);
  refuse("`", name, "` must be contiguous, got shape ", shape_of(t), " and strides (", strides.str(), ")");
}

inline int32_t narrow(int64_t value, const char* name) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    refuse("`", name, "` must fit 32 bits, got ", value);
  }
  return static_cast<int32_t>(value);
}

inline VegasDtype to_vegas(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return VEGAS_FLOAT32;
    case ScalarType::BFloat16:
      return VEGAS_BFLOAT16;
    case ScalarType::Half:
      return VEGAS_FLOAT16;
    case ScalarType::Float8_e4m3fn:
      return VEGAS_FP8_E4M3;
    default:
      refuse("`", name, "` must be float32, bfloat16, float16 or float8_e4m3fn, got ", dtype_name(t.scalar_type()));
  }
}

// An optional contiguous vector or matrix; null where absent.
template <class T>
const T* optional_data(const OptionalTensor& t, const char* name, std::initializer_list<int64_t> shape,
                       const Place& place) {
  if (!t) return nullptr;
  check_dtype(*t, name, std::is_same_v<T, float> ? ScalarType::Float : ScalarType::Int);
  check_shape(*t, name, shape);
  place.check(*t, name);
  check_contiguous(*t, name);
  return static_cast<const T*>(t->const_data_ptr());
}

template <class T>
const T* data(const Tensor& t, const char* name, std::initializer_list<int64_t> shape, const Place& place) {
  return optional_data<T>(OptionalTensor(t), name, shape, place);
}

}  // namespace vegas_ops::bindings
