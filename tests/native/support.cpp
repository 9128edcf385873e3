#include "support.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <stdexcept>
#ifdef WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace native {
namespace {

constexpr int kSentinel = 0xc3;  // every byte of an output before the call; a number in each dtype

#ifdef WITH_CUDA
void require_cuda(cudaError_t error) {
  if (error != cudaSuccess) fail("CUDA: %s", cudaGetErrorString(error));
}
#endif

struct Format {
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  uint32_t nan() const { return sign() - 1; }
};

Format format_of(VegasDtype dtype) {
  switch (dtype) {
    case VEGAS_BFLOAT16:
      return {8, 7, true};
    case VEGAS_FLOAT16:
      return {5, 10, true};
    case VEGAS_FP8_E4M3:
      return {4, 3, false};
    default:
      return {8, 23, true};
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw std::runtime_error(text);
}

void require_ok(int status, VegasDevice device) {
  if (status != VEGAS_OK) fail("status %d: %s", status, vegas_last_error());
#ifdef WITH_CUDA
  if (device == VEGAS_CUDA) require_cuda(cudaDeviceSynchronize());
#else
  (void)device;
#endif
}

Memory::Memory(VegasDevice device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
#ifdef WITH_CUDA
  if (device == VEGAS_CUDA) {
    require_cuda(cudaMalloc(&data_, bytes));
    return;
  }
#endif
  if (posix_memalign(&data_, 64, bytes) != 0) fail("no memory");
}

Memory::Memory(Memory&& other) noexcept : device_(other.device_), bytes_(other.bytes_), data_(other.data_) {
  other.data_ = nullptr;
}

Memory::~Memory() {
#ifdef WITH_CUDA
  if (device_ == VEGAS_CUDA) {
    cudaFree(data_);
    return;
  }
#endif
  free(data_);
}

void Memory::upload(const void* from) {
  if (bytes_ == 0) return;
#ifdef WITH_CUDA
  if (device_ == VEGAS_CUDA) {
    require_cuda(cudaMemcpy(data_, from, bytes_, cudaMemcpyHostToDevice));
    return;
  }
#endif
  memcpy(data_, from, bytes_);
}

void Memory::fill(int byte) {
  if (bytes_ == 0) return;
#ifdef WITH_CUDA
  if (device_ == VEGAS_CUDA) {
    require_cuda(cudaMemset(data_, byte, bytes_));
    return;
  }
#endif
  memset(data_, byte, bytes_);
}

void Memory::download(void* to, size_t offset, size_t bytes) const {
  if (bytes == 0) return;
#ifdef WITH_CUDA
  if (device_ == VEGAS_CUDA) {
    require_cuda(cudaMemcpy(to, at(offset), bytes, cudaMemcpyDeviceToHost));
    return;
  }
#endif
  memcpy(to, at(offset), bytes);
}

size_t size_of(VegasDtype dtype) { return dtype == VEGAS_FLOAT32 ? 4 : dtype == VEGAS_FP8_E4M3 ? 1 : 2; }

uint32_t encode(double value, VegasDtype dtype) {
  const Format f = format_of(dtype);
  const uint32_t sign = signbit(value) ? f.sign() : 0;
  if (isnan(value)) return f.nan();
  if (isinf(value)) return sign | f.infinity();
  if (value == 0) return sign;
  const double magnitude = fabs(value);
  const int lowest = 1 - f.bias();
  const int exponent = ilogb(magnitude) > lowest ? ilogb(magnitude) : lowest;
  // A carry of the mantissa runs into the exponent, as it should.
  const double mantissa = nearbyint(ldexp(magnitude, f.mantissa_bits - exponent));
  const uint32_t bits = ((exponent - lowest) << f.mantissa_bits) + static_cast<uint32_t>(mantissa);
  const uint32_t beyond = f.has_infinity ? f.infinity() : f.nan();
  return sign | (bits < beyond ? bits : beyond);
}

double decode(uint32_t bits, VegasDtype dtype) {
  const Format f = format_of(dtype);
  const double sign = bits & f.sign() ? -1 : 1;
  bits &= f.sign() - 1;
  if (f.has_infinity && bits == f.infinity()) return sign * INFINITY;
  if (f.has_infinity ? bits > f.infinity() : bits == f.nan()) return NAN;
  const int exponent = static_cast<int>(bits >> f.mantissa_bits);
  const double mantissa = bits & ((1u << f.mantissa_bits) - 1);
  const int lowest = 1 - f.bias() - f.mantissa_bits;
  if (exponent == 0) return sign * ldexp(mantissa, lowest);
  return sign * ldexp(mantissa + (1 << f.mantissa_bits), lowest + exponent - 1);
}

double unit_roundoff(VegasDtype dtype) { return ldexp(1.0, -1 - format_of(dtype).mantissa_bits); }

Floats::Floats(VegasDevice device, VegasDtype dtype, const std::vector<double>& unrounded)
    : dtype(dtype), values(unrounded.size()), memory(device, unrounded.size() * size_of(dtype)) {
  const size_t size = size_of(dtype);
  std::vector<char> bytes(memory.bytes());
  for (size_t i = 0; i < unrounded.size(); ++i) {
    const uint32_t bits = encode(unrounded[i], dtype);
    values[i] = decode(bits, dtype);
    memcpy(bytes.data() + i * size, &bits, size);  // little-endian, as every CUDA host is
  }
  memory.upload(bytes.data());
}

Ints::Ints(VegasDevice device, std::vector<int32_t> given)
    : values(std::move(given)), memory(device, values.size() * sizeof(int32_t)) {
  memory.upload(values.data());
}

std::vector<double> normal(Random& random, size_t count) {
  std::normal_distribution<double> distribution;
  std::vector<double> values(count);
  for (double& value : values) value = distribution(random);
  return values;
}

Output::Output(VegasDevice device, size_t element_size, size_t count)
    : element_size_(element_size),
      count_(count),
      poisoned_(device, element_size * count),
      fresh_(device, element_size * count) {
  poisoned_.fill(kSentinel);
}

void Output::compare_bits(const char* name, const std::vector<char>& written, std::vector<char>& bytes) const {
  bytes.resize(poisoned_.bytes());
  poisoned_.download(bytes.data(), 0, bytes.size());
  const std::vector<char> sentinel(element_size_, static_cast<char>(kSentinel));
  std::vector<char> again;
  for (size_t i = 0; i < count_;) {
    const char* element = bytes.data() + i * element_size_;
    if (!written[i]) {
      if (memcmp(element, sentinel.data(), element_size_))
        fail("`%s` was written at %zu, where it must not be", name, i);
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < count_ && written[end]) ++end;
    again.resize((end - i) * element_size_);
    fresh_.download(again.data(), i * element_size_, again.size());
    if (memcmp(element, again.data(), again.size())) fail("`%s` differs between two calls in [%zu, %zu)", name, i, end);
    i = end;
  }
}

std::vector<double> Output::compare(const char* name, VegasDtype dtype, const Expected& expected) const {
  std::vector<char> bytes;
  compare_bits(name, expected.written, bytes);
  std::vector<double> values(count_);
  for (size_t i = 0; i < count_; ++i) {
    uint32_t bits = 0;
    memcpy(&bits, bytes.data() + i * element_size_, element_size_);
    values[i] = decode(bits, dtype);
    if (!expected.written[i]) continue;
    const double want = expected.value[i], error = expected.error[i];
    const double slack = error + unit_roundoff(dtype) * (fabs(want) + error);
    if (values[i] == want || fabs(values[i] - want) <= slack || (isnan(values[i]) && isnan(want))) continue;
    fail("`%s` is %.9g at %zu, must be %.9g give or take %.3g", name, values[i], i, want, slack);
  }
  return values;
}

void Output::compare(const char* name, const std::vector<int32_t>& expected) const {
  std::vector<char> bytes;
  compare_bits(name, std::vector<char>(count_, 1), bytes);
  for (size_t i = 0; i < count_; ++i) {
    int32_t value;
    memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
    if (value != expected[i]) fail("`%s` is %d at %zu, must be %d", name, value, i, expected[i]);
  }
}

void Session::run(const std::string& name, const std::function<void(Random&)>& body) {
  const int number = next_++;
  if (!enabled || (only >= 0 && number != only)) return;
  ++ran_;
  Random random(number + 1);
  const auto start = std::chrono::steady_clock::now();
  std::string fault;
  try {
    body(random);
  } catch (const std::exception& exception) {
    fault = exception.what();
    ++failed_;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  printf("%-4s %3d  %-80s %6.2f s%s%s\n", fault.empty() ? "ok" : "FAIL", number, name.c_str(), seconds,
         fault.empty() ? "" : "\n     ", fault.c_str());
  fflush(stdout);
}

}  // namespace native
