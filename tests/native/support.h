// What the native tests of the three ops share: memory of the device under test in which every tensor is an
// allocation of its own and of its exact size, the floating-point formats on the host, and the comparison of outputs.
#pragma once

#include <stdint.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "vegas_ops/api.h"

namespace native {

// A fault of the op under test, or of a call to the device.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Fails unless `status`, of a call to the library, is VEGAS_OK; on CUDA waits for the kernels as well.
void require_ok(int status, VegasDevice device);

// Bytes on the device.
class Memory {
 public:
  Memory(VegasDevice device, size_t bytes);
  Memory(Memory&& other) noexcept;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  void* at(size_t offset = 0) const { return static_cast<char*>(data_) + offset; }
  size_t bytes() const { return bytes_; }
  void upload(const void* from);
  void fill(int byte);
  void download(void* to, size_t offset, size_t bytes) const;

 private:
  VegasDevice device_;
  size_t bytes_;
  void* data_ = nullptr;  // NULL where there are no bytes
};

// ---- floating-point formats --------------------------------------------------------------------------------------

size_t size_of(VegasDtype dtype);
uint32_t encode(double value, VegasDtype dtype);
double decode(uint32_t bits, VegasDtype dtype);
inline double rounded(double value, VegasDtype dtype) { return decode(encode(value, dtype), dtype); }
double unit_roundoff(VegasDtype dtype);

// Values as stored, and their bits on the device.
struct Floats {
  VegasDtype dtype;
  std::vector<double> values;
  Memory memory;

  Floats(VegasDevice device, VegasDtype dtype, const std::vector<double>& unrounded);
  float* floats() const { return static_cast<float*>(memory.at()); }
};

struct Ints {
  std::vector<int32_t> values;
  Memory memory;

  Ints(VegasDevice device, std::vector<int32_t> values);
  int32_t* data() const { return static_cast<int32_t*>(memory.at()); }
};

using Random = std::mt19937;
std::vector<double> normal(Random& random, size_t count);

// ---- outputs -----------------------------------------------------------------------------------------------------

// What an output must hold: where written, `value` give or take `error` and one rounding to its dtype; elsewhere
// whatever was there before.
struct Expected {
  std::vector<double> value;
  std::vector<double> error;
  std::vector<char> written;

  explicit Expected(size_t count) : value(count), error(count), written(count) {}
  void set(size_t i, double v, double e) { value[i] = v, error[i] = e, written[i] = 1; }
};

// Two allocations for an output: one full of a sentinel, to find what is written where nothing should be, and one
// without initial contents, of which only what must be written is ever read: initcheck finds what was left out.
class Output {
 public:
  Output(VegasDevice device, size_t element_size, size_t count);

  void* poisoned() const { return poisoned_.at(); }
  void* fresh() const { return fresh_.at(); }
  // Values of the poisoned copy, after the same bits have been found in the other.
  std::vector<double> compare(const char* name, VegasDtype dtype, const Expected& expected) const;
  void compare(const char* name, const std::vector<int32_t>& expected) const;

 private:
  void compare_bits(const char* name, const std::vector<char>& written, std::vector<char>& bytes) const;

  size_t element_size_;
  size_t count_;
  Memory poisoned_;
  Memory fresh_;
};

// ---- cases -------------------------------------------------------------------------------------------------------

// Runs cases, numbered in their order, and counts those that fail.
class Session {
 public:
  explicit Session(VegasDevice device) : device(device) {}

  const VegasDevice device;
  int only = -1;        // the number of the case to run; -1: all
  bool enabled = true;  // cases are counted, not run, where it is false
  void run(const std::string& name, const std::function<void(Random&)>& body);
  int ran() const { return ran_; }
  int failed() const { return failed_; }

 private:
  int next_ = 0;
  int ran_ = 0;
  int failed_ = 0;
};

void run_verify(Session& session);
void run_select(Session& session);
void run_sparse(Session& session);
void run_hostile(Session& session);

}  // namespace native
